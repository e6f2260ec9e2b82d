"""A tiny random checkpoint with multi-head latent attention (MLA), or with grouped queries (GQA).

Seeded, float32, about 2 MB, made in a second.

    python -m sglang_dcp_block.testing.tiny_model FOLDER [--heads 8] [--layers 2]

Random weights are no random answers: the scales below keep attention sharp enough that a wrong KV row changes logits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TinyMla:
    """Sizes of the model. heads must be a multiple of the TP size; kv_lora_rank 256 with rope 32 is the smallest pair
    that SGLang's Triton MLA decode kernel takes (besides the real 512 with 64).

    architecture: one of ARCHITECTURES. Models that differ in nothing else have the same weights.
    """

    architecture: str = "DeepseekV2ForCausalLM"
    heads: int = 4
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 256
    kv_lora_rank: int = 256
    rope_dim: int = 32
    nope_dim: int = 32
    value_dim: int = 32
    max_position: int = 8192
    seed: int = 0


@dataclass(frozen=True)
class TinyGqa:
    """Sizes of a model with grouped-query attention; kv_heads must divide heads. architecture: one of GQA_FAMILIES."""

    architecture: str = "LlamaForCausalLM"
    heads: int = 4
    kv_heads: int = 1
    layers: int = 2
    hidden: int = 128
    intermediate: int = 256
    vocab: int = 256
    head_dim: int = 32
    max_position: int = 8192
    seed: int = 0


TinyModel = TinyMla | TinyGqa

#: Architecture -> model_type.
GQA_FAMILIES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}

KIMI_K25 = "KimiK25ForConditionalGeneration"
#: Architecture -> model_type of its language model.
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    KIMI_K25: "deepseek_v3",
}


def tiny(architecture: str, heads: int, kv_heads: int = 1) -> TinyModel:
    """The tiny model of an architecture; kv_heads says nothing of MLA."""
    if architecture in GQA_FAMILIES:
        return TinyGqa(architecture, heads, kv_heads)
    return TinyMla(architecture, heads)


def config(model: TinyModel) -> dict[str, Any]:
    """The Hugging Face config.json."""
    if isinstance(model, TinyGqa):
        return _gqa_config(model)
    if model.architecture != KIMI_K25:
        return _text_config(model, model.architecture)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    vision = sizes | {f"vt_{name}": size for name, size in sizes.items()}  # SGLang reads both names
    vision |= {"init_pos_emb_height": 4, "init_pos_emb_width": 4, "text_hidden_size": model.hidden}
    return {
        "architectures": [KIMI_K25],
        "model_type": "kimi_k25",
        "torch_dtype": "float32",
        "media_placeholder_token_id": model.vocab - 1,
        "text_config": _text_config(model, "DeepseekV3ForCausalLM"),
        "vision_config": vision,
    }


def _gqa_config(model: TinyGqa) -> dict[str, Any]:
    return {
        "architectures": [model.architecture],
        "model_type": GQA_FAMILIES[model.architecture],
        "torch_dtype": "float32",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.max_position,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _text_config(model: TinyMla, architecture: str) -> dict[str, Any]:
    """MoE fields are required but unused: every layer is dense."""
    return {
        "architectures": [architecture],
        "model_type": ARCHITECTURES[architecture],
        "torch_dtype": "float32",
        "vocab_size": model.vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.heads,
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": None,
        "qk_rope_head_dim": model.rope_dim,
        "qk_nope_head_dim": model.nope_dim,
        "v_head_dim": model.value_dim,
        "first_k_dense_replace": model.layers,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,  # SGLang refuses null
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.max_position,
        "rope_theta": 10000.0,
        # factor 1.0 changes nothing; plain rope has no CPU path for MLA in SGLang
        "rope_scaling": {
            "type": "yarn",
            "rope_type": "deepseek_yarn",
            "factor": 1.0,
            "original_max_position_embeddings": model.max_position,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


Tensors = Iterator[tuple[str, tuple[int, ...], float]]


def _tensors(m: TinyModel) -> Tensors:
    """(name, shape, gain): a matrix is normal with deviation gain / sqrt(inputs), a vector is all ones."""
    yield "model.embed_tokens.weight", (m.vocab, m.hidden), m.hidden**0.5
    yield "model.norm.weight", (m.hidden,), 1
    yield "lm_head.weight", (m.vocab, m.hidden), 2
    for i in range(m.layers):
        layer, attn = f"model.layers.{i}", f"model.layers.{i}.self_attn"
        yield f"{layer}.input_layernorm.weight", (m.hidden,), 1
        yield f"{layer}.post_attention_layernorm.weight", (m.hidden,), 1
        yield from _gqa_tensors(m, attn) if isinstance(m, TinyGqa) else _mla_tensors(m, attn)
        yield f"{layer}.mlp.gate_proj.weight", (m.intermediate, m.hidden), 1
        yield f"{layer}.mlp.up_proj.weight", (m.intermediate, m.hidden), 1
        yield f"{layer}.mlp.down_proj.weight", (m.hidden, m.intermediate), 1


def _mla_tensors(m: TinyMla, attn: str) -> Tensors:
    yield f"{attn}.q_proj.weight", (m.heads * (m.nope_dim + m.rope_dim), m.hidden), 2
    yield f"{attn}.kv_a_proj_with_mqa.weight", (m.kv_lora_rank + m.rope_dim, m.hidden), 1
    yield f"{attn}.kv_a_layernorm.weight", (m.kv_lora_rank,), 1
    yield f"{attn}.kv_b_proj.weight", (m.heads * (m.nope_dim + m.value_dim), m.kv_lora_rank), 1
    yield f"{attn}.o_proj.weight", (m.hidden, m.heads * m.value_dim), 3


def _gqa_tensors(m: TinyGqa, attn: str) -> Tensors:
    yield f"{attn}.q_proj.weight", (m.heads * m.head_dim, m.hidden), 2
    yield f"{attn}.k_proj.weight", (m.kv_heads * m.head_dim, m.hidden), 1
    yield f"{attn}.v_proj.weight", (m.kv_heads * m.head_dim, m.hidden), 1
    yield f"{attn}.o_proj.weight", (m.hidden, m.heads * m.head_dim), 3
    if m.architecture == "Qwen2ForCausalLM":
        yield f"{attn}.q_proj.bias", (m.heads * m.head_dim,), 1
        yield f"{attn}.k_proj.bias", (m.kv_heads * m.head_dim,), 1
        yield f"{attn}.v_proj.bias", (m.kv_heads * m.head_dim,), 1
    if m.architecture == "Qwen3ForCausalLM":
        yield f"{attn}.q_norm.weight", (m.head_dim,), 1
        yield f"{attn}.k_norm.weight", (m.head_dim,), 1


def write(folder: str | os.PathLike, model: TinyModel | None = None) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder`` and return it."""
    import torch
    from safetensors.torch import save_file

    model = model or TinyMla()
    generator = torch.Generator().manual_seed(model.seed)
    prefix = "language_model." if model.architecture == KIMI_K25 else ""  # its vision tower stays unset
    weights = {
        prefix + name: torch.randn(shape, generator=generator) * (gain / shape[1] ** 0.5)
        if len(shape) == 2
        else torch.ones(shape)
        for name, shape, gain in _tensors(model)
    }
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config(model), indent=1))
    return folder


def cached(model: TinyModel | None = None) -> Path:
    """The checkpoint's folder under the system's temporary folder, written on the first call."""
    model = model or TinyMla()
    digest = hashlib.sha256(json.dumps([asdict(model), config(model), [*_tensors(model)]]).encode()).hexdigest()[:12]
    name = f"{type(model).__name__.lower()}-{digest}"
    target = Path(tempfile.gettempdir()) / f"sglang-dcp-block-{os.getuid()}" / name
    if not (target / "config.json").exists():
        scratch = write(f"{target}.{os.getpid()}", model)
        try:
            scratch.rename(target)
        except OSError:  # another process was faster
            if not (target / "config.json").exists():
                raise
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a tiny random DeepSeek-V2 MLA checkpoint.")
    parser.add_argument("folder")
    parser.add_argument("--heads", type=int, default=TinyMla.heads)
    parser.add_argument("--layers", type=int, default=TinyMla.layers)
    parser.add_argument("--seed", type=int, default=TinyMla.seed)
    arguments = parser.parse_args()
    model = TinyMla(heads=arguments.heads, layers=arguments.layers, seed=arguments.seed)
    print(write(arguments.folder, model))


if __name__ == "__main__":
    main()
