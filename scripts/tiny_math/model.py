"""DeepSeek-V2 architecture (MLA, dense MLP) in plain PyTorch, with the parameter names of `DeepseekV2ForCausalLM`.

Rotary embedding turns neighbouring pairs (2i, 2i+1), as DeepSeek-V2 does. The config asks for yarn with factor 1.0, as
SGLang has no plain rotary embedding for DeepSeek on a CPU; every yarn correction is then 1, so the frequencies are the
plain ones and the softmax scale is 1/sqrt(qk_head_dim).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def make_config(
    vocab_size: int, layers: int, hidden: int, heads: int, intermediate: int, max_positions: int = 16384
) -> dict:
    """A config.json that transformers and SGLang accept. kv_lora_rank 512 + rope 64 is the row size of the real
    models, which every MLA kernel takes.
    """
    return {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": layers,
        "moe_layer_freq": 1,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "max_position_embeddings": max_positions,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-06,
        "use_cache": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "yarn",
            "factor": 1.0,
            "original_max_position_embeddings": max_positions,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def rotary_table(positions: int, size: int, theta: float, device) -> Tensor:
    """Complex turns [positions, size/2] = exp(i * position * theta^(-2k/size))."""
    frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float32, device=device) / size)
    angles = torch.arange(positions, dtype=torch.float32, device=device)[:, None] * frequencies
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    """x [..., size] in pairs (2i, 2i+1), turns broadcastable to [..., size/2]; returns x's dtype."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.heads, hidden = config["num_attention_heads"], config["hidden_size"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.rank = config["v_head_dim"], config["kv_lora_rank"]
        self.q_proj = nn.Linear(hidden, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(self.rank, config["rms_norm_eps"])
        self.kv_b_proj = nn.Linear(self.rank, self.heads * (self.nope + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, hidden, bias=False)

    def project(self, x: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [batch, n, hidden], turns [batch or 1, n, rope/2] -> query, key [batch, heads, n, nope+rope], value
        [batch, heads, n, v].
        """
        batch, n, _ = x.shape
        q_nope, q_rope = self.q_proj(x).view(batch, n, self.heads, -1).split([self.nope, self.rope], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent).to(latent.dtype)).view(batch, n, self.heads, -1)
        k_nope, value = kv.split([self.nope, self.value], -1)
        query = torch.cat([q_nope, rotate(q_rope, turns[:, :, None])], -1)
        key = torch.cat([k_nope, rotate(k_rope, turns)[:, :, None].expand(-1, -1, self.heads, -1)], -1)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, attended: Tensor) -> Tensor:
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        query, key, value = self.project(x, turns)
        # Flash attention wants one head size for all three.
        padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        attended = F.scaled_dot_product_attention(query, key, padded, is_causal=True)[..., : self.value]
        return self.finish(attended)


class MLP(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turns)
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])


class TinyDeepseekV2(nn.Module):
    """`DeepseekV2ForCausalLM` with dense layers; `state_dict()` is the checkpoint."""

    def __init__(self, config: dict):
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        depth_scale = (2 * config["num_hidden_layers"]) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = depth_scale if "o_proj" in name or "down_proj" in name else 1.0
                std = 0.5 if "embed_tokens" in name else parameter.shape[1] ** -0.5 * scale
                nn.init.normal_(parameter, std=std)

    def turns(self, positions: int, device) -> Tensor:
        return rotary_table(positions, self.config["qk_rope_head_dim"], self.config["rope_theta"], device)

    def hidden(self, ids: Tensor) -> Tensor:
        """ids [batch, n] -> normed hidden states [batch, n, hidden]; positions start at 0."""
        turns = self.turns(ids.shape[1], ids.device)[None]
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, turns)
        return self.model.norm(x)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.hidden(ids))

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], new_tokens: int, stop_id: int | None = None) -> list[list[int]]:
        """Greedy continuation of each prompt with a key-value cache, in the parameters' dtype; a stop token is not
        returned.
        """
        device = self.lm_head.weight.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        longest, batch = int(lengths.max()), len(prompts)
        capacity = longest + new_tokens
        ids = torch.zeros(batch, longest, dtype=torch.long, device=device)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt, device=device)
        table = self.turns(capacity, device)
        rows = torch.arange(batch, device=device)
        caches = []
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:  # prompts are padded on the right, where causal attention doesn't look
            attention = layer.self_attn
            query, key, value = attention.project(layer.input_layernorm(x), table[None, :longest])
            x = x + attention.finish(F.scaled_dot_product_attention(query, key, value, is_causal=True))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            caches.append((F.pad(key, (0, 0, 0, new_tokens)), F.pad(value, (0, 0, 0, new_tokens))))
        state = x[rows, lengths - 1]
        produced = []
        for step in range(new_tokens):
            token = self.lm_head(self.model.norm(state)).argmax(-1)
            produced.append(token)
            positions = lengths + step
            visible = torch.arange(capacity, device=device)[None] <= positions[:, None]
            x = self.model.embed_tokens(token)[:, None]
            for layer, (keys, values) in zip(self.model.layers, caches, strict=True):
                attention = layer.self_attn
                query, key, value = attention.project(layer.input_layernorm(x), table[positions][:, None])
                keys[rows, :, positions], values[rows, :, positions] = key[:, :, 0], value[:, :, 0]
                mask = visible[:, None, None]
                x = x + attention.finish(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            state = x[:, 0]
        outputs = torch.stack(produced, 1).tolist()
        return [o[: o.index(stop_id)] if stop_id in o else o for o in outputs]
