"""The tiny model with the head sizes of the real ones, padded with zeros: the same function, for kernels that know no
other sizes (FlashInfer's prefill wants heads of 192 and 128).
"""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

HEADS, NOPE, VALUE = 16, 128, 128


def pad_to(weight: Tensor, *sizes: int) -> Tensor:
    """`weight` with zeros behind its rows in every dimension."""
    widths = [pad for old, new in zip(reversed(weight.shape), reversed(sizes), strict=True) for pad in (0, new - old)]
    return F.pad(weight, widths)


def write_padded(source: Path, target: Path) -> None:
    """Writes to `target` a float32 checkpoint that computes what `source`'s does. The softmax scale is 1/sqrt of the
    head size, so the queries grow by what it shrinks.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((source / "config.json").read_text())
    heads, rope, rank = config["num_attention_heads"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
    sharper = math.sqrt((NOPE + rope) / (nope + rope))
    weights = {}
    for name, weight in load_file(source / "model.safetensors").items():
        weight = weight.float()
        if "q_proj" in name:
            plain, rotary = weight.unflatten(0, (heads, -1)).split([nope, rope], 1)
            wide = torch.cat([pad_to(plain, heads, NOPE, weight.shape[1]), rotary], 1) * sharper
            weight = pad_to(wide, HEADS, NOPE + rope, weight.shape[1]).flatten(0, 1)
        elif "kv_b_proj" in name:
            key, values = weight.unflatten(0, (heads, -1)).split([nope, value], 1)
            weight = torch.cat([pad_to(key, HEADS, NOPE, rank), pad_to(values, HEADS, VALUE, rank)], 1).flatten(0, 1)
        elif "o_proj" in name:
            weight = pad_to(weight.unflatten(1, (heads, -1)), weight.shape[0], HEADS, VALUE).flatten(1, 2)
        weights[name] = weight.contiguous()
    sizes = dict(num_attention_heads=HEADS, num_key_value_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=VALUE)
    if config["rope_scaling"]["factor"] == 1.0:  # changes nothing, and plain rope is what GPUs have a kernel for
        sizes |= dict(rope_scaling=None)
    target.mkdir(parents=True, exist_ok=True)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config | sizes, indent=1) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).write_text((source / name).read_text())
