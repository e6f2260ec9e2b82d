"""Start a model from a smaller one's checkpoint: the same function, with a wider latent, more rotary pairs and another
vocabulary.
"""

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from tiny_math.model import TinyDeepseekV2
from tiny_math.tokenizer import Tokenizer


def spread_pairs(rotary: Tensor, pairs: int, fill: Tensor) -> Tensor:
    """Rotary rows [..., old pairs * 2, n] at the frequencies they had: pair k of `old` is pair k * pairs / old."""
    old = rotary.shape[-2] // 2
    wide = fill.unflatten(-2, (old, pairs // old, 2)).clone()
    wide[..., :, 0, :, :] = rotary.unflatten(-2, (old, 2))
    return wide.flatten(-4, -2)


@torch.no_grad()
def load_widened(model: TinyDeepseekV2, directory: Path, tokenizer: Tokenizer) -> None:
    """Fills `model` (float32, freshly drawn) so that it computes what `directory`'s checkpoint does. New latent rows
    are small and read by nobody yet; new rotary pairs have keys but no queries, so both can learn.
    """
    from safetensors.torch import load_file

    old_config, config = json.loads((directory / "config.json").read_text()), model.config
    old_words = Tokenizer.load(directory).ids
    old = {name: weight.float() for name, weight in load_file(directory / "model.safetensors").items()}
    rank, old_rank = config["kv_lora_rank"], old_config["kv_lora_rank"]
    rope, old_rope = config["qk_rope_head_dim"], old_config["qk_rope_head_dim"]
    nope, heads = config["qk_nope_head_dim"], config["num_attention_heads"]
    shared = [word for word in tokenizer.words if word in old_words]
    new_rows, old_rows = [tokenizer.ids[w] for w in shared], [old_words[w] for w in shared]
    narrower = math.sqrt(old_rank / rank)  # zeros in the mean square make the normed latent larger by this much
    sharper = math.sqrt((nope + rope) / (nope + old_rope))  # the softmax scale is 1/sqrt of the head size
    for name, weight in model.state_dict().items():
        if "embed_tokens" in name or "lm_head" in name:
            weight[new_rows] = old[name][old_rows]
        elif "kv_a_proj" in name:
            latent, rotary = old[name].split([old_rank, old_rope])
            weight[:old_rank] = latent
            weight[old_rank:rank] *= 0.05 * latent.std() / weight[old_rank:rank].std()
            weight[rank:] = spread_pairs(rotary, rope // 2, weight[rank:])
        elif "kv_a_layernorm" in name:
            weight.fill_(narrower)
            weight[:old_rank] = old[name] * narrower
        elif "kv_b_proj" in name:
            weight.zero_()
            weight[:, :old_rank] = old[name]
        elif "q_proj" in name:
            plain, rotary = old[name].unflatten(0, (heads, nope + old_rope)).split([nope, old_rope], 1)
            wide = spread_pairs(rotary, rope // 2, torch.zeros(heads, rope, weight.shape[1]))
            weight.copy_((torch.cat([plain, wide], 1) * sharper).flatten(0, 1))
        else:
            weight.copy_(old[name])
