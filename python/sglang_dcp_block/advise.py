"""Formulas for choosing dcp_size, page and block size, and the advice made from them.

Every number that ``explain`` and ``advise`` print about bytes comes from the functions of this file. Lengths are
tokens, sizes are bytes, a *row* is one token of one layer in the KV pool. MLA keeps one latent of
``kv_lora_rank + qk_rope_head_dim`` values per token and layer, the same on every tensor-parallel rank; DCP is what
makes ranks keep different tokens.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dcp_block import server_args
from sglang_dcp_block.dcp.layout import DcpLayout

# Mooncake cuts a request into slices of this size unless MC_SLICE_SIZE says otherwise; smaller segments pay a work
# request each for less than one slice.
TRANSPORT_SLICE_BYTES = 65_536
# Tokens in flight (concurrency * context) from which DCP 8 was ahead of DCP 1 in the one public measurement that
# varies both (SGLang pull request 33926, TRT-LLM MLA, one node: 16 requests at 32K, 8 at 64K, 4 at 128K).
DCP_PAYS_FROM_TOKENS = 524_288
# A request's longest shard may exceed the mean shard by this part before a smaller block is advised.
MAX_TAIL_SKEW = 0.125
# About what SGLang gives to weights and KV when --mem-fraction-static isn't set.
MEM_FRACTION_STATIC = 0.88
BLOCK_SIZES = (16, 32, 64, 128, 256)

KV_DTYPE_BYTES = {
    "bf16": 2,
    "bfloat16": 2,
    "fp16": 2,
    "float16": 2,
    "fp32": 4,
    "float32": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


class UserError(ValueError):
    """Bad input; the message is one sentence that says what to change."""


@dataclass(frozen=True)
class ModelShape:
    """What the formulas need to know of an MLA model. Weights are bytes of the whole model."""

    name: str
    layers: int
    heads: int
    kv_lora_rank: int
    qk_rope_head_dim: int
    max_context: int
    weight_bytes: int
    architecture: str


# -- reading what the user gave --------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Bytes of "141GB" (powers of ten), "131GiB" (powers of two) or a plain number of bytes."""
    number, unit = _split_unit(text)
    if unit.upper() not in _SIZE_UNITS:
        raise UserError(f"{text!r} is not a size: write a number and a unit such as 141GB or 131GiB.")
    return int(number * _SIZE_UNITS[unit.upper()])


def parse_tokens(text: str) -> int:
    """Tokens of "128K" (1024 each), "1M" (1024 * 1024) or a plain number."""
    number, unit = _split_unit(text)
    if unit.upper() not in ("", "K", "M"):
        raise UserError(f"{text!r} is not a number of tokens: write it like 131072, 128K or 1M.")
    return int(number * {"": 1, "K": 1024, "M": 1024**2}[unit.upper()])


def _split_unit(text: str) -> tuple[float, str]:
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    try:
        number = float(digits)
    except ValueError:
        raise UserError(f"{text!r} is not a number with a unit: write it like 141GB or 128K.") from None
    if not math.isfinite(number) or number <= 0:
        raise UserError(f"{text!r} must be above zero.")
    return number, text.strip()[len(digits) :].strip()


def kv_dtype_bytes(dtype: str) -> int:
    """Bytes of one KV value."""
    if dtype not in KV_DTYPE_BYTES:
        raise UserError(f"unknown KV dtype {dtype!r}: use one of bf16, fp16, fp32, fp8.")
    return KV_DTYPE_BYTES[dtype]


def load_model(path: str | Path) -> ModelShape:
    """Read a config.json, or a model folder that has one.

    Weight bytes come from ``model.safetensors.index.json`` beside it when that exists, else from :func:`parameters`.

    Raises:
        UserError: no such file, not JSON, not an MLA model, or one whose attention the plugin doesn't take.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError:
        raise UserError(f"can't read {file}: give the path of a config.json or of a model folder.") from None
    except ValueError:
        raise UserError(f"{file} is not JSON: give the path of a model's config.json.") from None
    name = file.parent.name if file.name == "config.json" else file.stem
    text = config.get("text_config", config)
    missing = [
        k for k in ("kv_lora_rank", "qk_rope_head_dim", "num_hidden_layers", "num_attention_heads") if not text.get(k)
    ]
    if missing:
        raise UserError(
            f"{file} has no {missing[0]}: sizes are advised for MLA models only, such as DeepSeek-V2 or V3."
        )
    if "index_topk" in text:
        raise UserError(
            f"{file} uses sparse attention (index_topk), which the block layout does not support: leave it off."
        )
    index = file.parent / "model.safetensors.index.json"
    total = json.loads(index.read_text()).get("metadata", {}).get("total_size") if index.exists() else None
    return ModelShape(
        name=name,
        layers=text["num_hidden_layers"],
        heads=text["num_attention_heads"],
        kv_lora_rank=text["kv_lora_rank"],
        qk_rope_head_dim=text["qk_rope_head_dim"],
        max_context=text.get("max_position_embeddings", 0),
        weight_bytes=int(total or parameters(text) * _weight_bits(config) / 8),
        architecture=(config.get("architectures") or ["unknown"])[0],
    )


def _weight_bits(config: dict[str, Any]) -> float:
    text = config.get("text_config", config)
    quant = config.get("quantization_config") or text.get("quantization_config") or {}
    if quant.get("quant_method") == "fp8":
        return 8
    if bits := quant.get("bits") or quant.get("num_bits"):
        return bits
    if quant.get("quant_method") == "compressed-tensors":
        groups = quant.get("config_groups", {}).values()
        return min((g["weights"]["num_bits"] for g in groups if g.get("weights")), default=16)
    dtype = config.get("torch_dtype") or config.get("dtype") or text.get("torch_dtype") or "bfloat16"
    return 32 if dtype == "float32" else 16


def parameters(config: dict[str, Any]) -> int:
    """Parameters of a DeepSeek-V2/V3-shaped model: embeddings, attention, dense and expert MLPs, without norms."""
    h, layers, heads = config["hidden_size"], config["num_hidden_layers"], config["num_attention_heads"]
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    q = h * q_rank + q_rank * heads * (nope + rope) if q_rank else h * heads * (nope + rope)
    attention = q + h * (kv_rank + rope) + kv_rank * heads * (nope + v) + heads * v * h
    dense_mlp = 3 * h * config["intermediate_size"]
    experts = config.get("n_routed_experts") or 0
    dense_layers = min(config.get("first_k_dense_replace", 0), layers) if experts else layers
    moe_mlp = 0
    if experts:
        shared = config.get("n_shared_experts") or 0
        moe_mlp = 3 * h * config["moe_intermediate_size"] * (experts + shared) + h * experts
    embeddings = config["vocab_size"] * h * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * attention + dense_layers * dense_mlp + (layers - dense_layers) * moe_mlp


# -- formulas ----------------------------------------------------------------------------------------------------------


def row_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token in one layer: (kv_lora_rank + qk_rope_head_dim) * bytes of a value."""
    return (shape.kv_lora_rank + shape.qk_rope_head_dim) * kv_dtype_bytes(dtype)


def token_bytes(shape: ModelShape, dtype: str) -> int:
    """Bytes of one token in all layers, on the one DCP rank that owns it."""
    return shape.layers * row_bytes(shape, dtype)


def capacity_tokens(layout: DcpLayout, page_size: int, kv_bytes_per_rank: int, bytes_per_token: int) -> int:
    """Tokens that fit when each rank gives ``kv_bytes_per_rank`` to KV: whole virtual pages only."""
    rows = kv_bytes_per_rank // bytes_per_token
    pages = rows // layout.rows_per_virtual_page(page_size)
    return pages * layout.virtual_page_size(page_size)


def allocated_tokens(layout: DcpLayout, page_size: int, tokens: int) -> int:
    """Slots that a request of ``tokens`` takes: its length rounded up to virtual pages."""
    return tokens + layout.unused_slots(tokens, page_size)


def prefix_hit_tokens(granularity: int, shared_prefix: int) -> int:
    """Tokens of a shared prefix that a radix tree with this page size can reuse: whole pages only."""
    return shared_prefix // granularity * granularity


def shard_lengths(layout: DcpLayout, tokens: int) -> list[int]:
    """Rows of a request of ``tokens`` on each rank."""
    return [layout.local_len(tokens, rank) for rank in range(layout.dcp_size)]


def tail_skew(layout: DcpLayout, tokens: int) -> float:
    """How much longer than the mean the longest shard is, as a part of the mean: a decode step waits for that rank."""
    return max(shard_lengths(layout, tokens)) * layout.dcp_size / tokens - 1


def worst_tail_skew(layout: DcpLayout, tokens: int) -> float:
    """:func:`tail_skew` at the worst request length within one cycle above ``tokens``.

    The longest shard is rank 0's, and it leads most when it has just filled its block, so that length is tried.
    """
    filled = math.ceil(max(tokens - layout.block_size, 0) / layout.cycle) * layout.cycle + layout.block_size
    return max(tail_skew(layout, tokens), tail_skew(layout, filled))


def segment_bytes(layout: DcpLayout, bytes_per_row: int) -> int:
    """Bytes of one full block of one layer: the least that a transfer moves in one piece, apart from tails."""
    return layout.block_size * bytes_per_row


def segments_per_layer(layout: DcpLayout, tokens: int, rank: int) -> int:
    """Blocks of a request that ``rank`` owns: pieces of one layer when neighbouring pages aren't merged."""
    return len(layout.owned_intervals(0, tokens, rank).length)


def kv_budget(shape: ModelShape, tp_size: int, gpu_memory: int, mem_fraction: float = MEM_FRACTION_STATIC) -> int:
    """Bytes per GPU left for KV: gpu_memory * mem_fraction - weights / tp_size; the server logs what it really has."""
    return int(gpu_memory * mem_fraction - shape.weight_bytes / tp_size)


def dcp_sizes(tp_size: int, heads: int) -> list[int]:
    """DCP sizes that split both the ranks and the heads evenly."""
    return [p for p in range(1, tp_size + 1) if tp_size % p == 0 and heads % p == 0]


def choose_dcp_size(fits: dict[int, bool], tokens_in_flight: int) -> int:
    """The smallest size whose ranks hold the load; the largest when the load is long enough that reading KV dominates,
    or when none holds it."""
    largest = max(fits)
    if tokens_in_flight >= DCP_PAYS_FROM_TOKENS:
        return largest
    return min((p for p, ok in fits.items() if ok), default=largest)


def choose_block_size(dcp_size: int, bytes_per_row: int, context: int) -> int:
    """The smallest block whose segment fills a transport slice, made smaller while requests of ``context`` tokens
    would be split too unevenly."""
    block = next((b for b in BLOCK_SIZES if b * bytes_per_row >= TRANSPORT_SLICE_BYTES), BLOCK_SIZES[-1])
    while block > BLOCK_SIZES[0] and worst_tail_skew(DcpLayout(dcp_size, block), context) > MAX_TAIL_SKEW:
        block = max(b for b in BLOCK_SIZES if b < block)
    return block


# -- advice ------------------------------------------------------------------------------------------------------------


def advise(
    shape: ModelShape,
    *,
    tp_size: int,
    gpu_memory: int,
    context: int,
    concurrency: int,
    dtype: str = "bf16",
    mem_fraction: float = MEM_FRACTION_STATIC,
) -> dict[str, Any]:
    """Recommend dcp_size, page and block size for ``concurrency`` requests of ``context`` tokens.

    Returns a JSON-ready dict: ``recommendation``, ``reasons`` (sentences), and the two tables ``dcp_sizes`` and
    ``block_sizes`` with the trade-off of every candidate.

    Raises:
        UserError: the load or the machine can't be: a size below 1, weights that don't fit.
    """
    for name, value in (("--tp", tp_size), ("--context", context), ("--concurrency", concurrency)):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    if not 0 < mem_fraction <= 1:
        raise UserError(f"--mem-fraction must be above 0 and at most 1, got {mem_fraction}.")
    if shape.max_context and context > shape.max_context:
        raise UserError(f"--context {context} is longer than the model's {shape.max_context}: ask for at most that.")
    budget = kv_budget(shape, tp_size, gpu_memory, mem_fraction)
    per_row, per_token = row_bytes(shape, dtype), token_bytes(shape, dtype)
    if budget < per_token:
        need = shape.weight_bytes / tp_size / mem_fraction
        raise UserError(
            f"the weights leave no room for KV: each of {tp_size} GPUs needs over {need / 1e9:.0f} GB, so raise --tp "
            "or --gpu-memory."
        )
    # P first at page 64, then B; capacity differs by less than a virtual page between candidates of B.
    in_flight = concurrency * context
    by_dcp = []
    for p in dcp_sizes(tp_size, shape.heads):
        layout = DcpLayout(p, 64 if p > 1 else 1)
        capacity = capacity_tokens(layout, 64, budget, per_token)
        needed = concurrency * allocated_tokens(layout, 64, context)
        by_dcp.append(
            {
                "dcp_size": p,
                "capacity_tokens": capacity,
                "requests": capacity // allocated_tokens(layout, 64, context),
                "fits": needed <= capacity,
                # Every rank reads its own rows once per step; without DCP each reads all of them.
                "kv_read_per_step_bytes": concurrency * layout.local_len(context, 0) * per_token,
            }
        )
    p = choose_dcp_size({row["dcp_size"]: row["fits"] for row in by_dcp}, in_flight)
    block = choose_block_size(p, per_row, context) if p > 1 else 1
    by_block = [_block_row(DcpLayout(p, b), b, context, shape, per_row) for b in (1, *BLOCK_SIZES)] if p > 1 else []
    chosen = next(row for row in by_dcp if row["dcp_size"] == p)
    page = block if p > 1 else 64
    flags = f"--tp-size {tp_size} --page-size {page}"
    if p > 1:
        flags = f"--tp-size {tp_size} --dcp-size {p} --dcp-block-size {block} --page-size {page}"
    reasons = _reasons(shape, by_dcp, by_block, chosen, block, per_row, context, concurrency)
    return {
        "schema": 1,
        "model": shape.name,
        "kv_dtype": dtype,
        "tp_size": tp_size,
        "context": context,
        "concurrency": concurrency,
        "kv_budget_bytes": budget,
        "row_bytes": per_row,
        "token_bytes": per_token,
        "recommendation": {
            "dcp_size": p,
            "block_size": block,
            "page_size": page,
            "fits": chosen["fits"],
            "flags": flags,
        },
        "reasons": reasons + (_refused_yet(shape, dtype) if p > 1 else []),
        "dcp_sizes": by_dcp,
        "block_sizes": by_block,
    }


def _block_row(layout: DcpLayout, block: int, context: int, shape: ModelShape, per_row: int) -> dict[str, Any]:
    """One candidate of the block size; the page is as large as the block (64 at B = 1)."""
    page = block if block > 1 else 64
    return {
        "block_size": block,
        "page_size": page,
        "segment_bytes": segment_bytes(layout, per_row),
        "segments_per_request_and_rank": shape.layers * segments_per_layer(layout, context, 0),
        "worst_tail_skew": round(worst_tail_skew(layout, context), 4),
        "empty_rank_below_tokens": (layout.dcp_size - 1) * layout.block_size + 1,
        "prefix_hit_granularity": layout.virtual_page_size(page),
    }


def _reasons(
    shape: ModelShape,
    by_dcp: list[dict[str, Any]],
    by_block: list[dict[str, Any]],
    chosen: dict[str, Any],
    block: int,
    per_row: int,
    context: int,
    concurrency: int,
) -> list[str]:
    p, in_flight = chosen["dcp_size"], concurrency * context
    one = by_dcp[0]
    out = [
        f"{concurrency} requests of {context:,} tokens are {in_flight:,} tokens; one rank's rows alone hold "
        f"{one['capacity_tokens']:,}, dcp_size {p} holds {chosen['capacity_tokens']:,}."
    ]
    if not chosen["fits"]:
        out.append(
            f"That is {chosen['requests']} requests at once, not {concurrency}: the rest waits or is retracted; raise "
            "--tp, or lower --context."
        )
    if p == 1:
        out.append(
            "Leave DCP off: the load fits without it, and below "
            f"{DCP_PAYS_FROM_TOKENS:,} tokens in flight its extra communication costs more than it saves."
        )
        return out
    if in_flight >= DCP_PAYS_FROM_TOKENS:
        read_one, read_p = (one["kv_read_per_step_bytes"] / 2**30, chosen["kv_read_per_step_bytes"] / 2**30)
        out.append(
            f"Above {DCP_PAYS_FROM_TOKENS:,} tokens in flight reading KV dominates a decode step: dcp_size {p} cuts it "
            f"from {read_one:,.1f} to {read_p:,.1f} GiB per rank."
        )
    else:
        out.append(f"dcp_size {p} is the smallest that holds the load; larger ones only add communication.")
    row = next(r for r in by_block if r["block_size"] == block)
    rr = by_block[0]
    filled = "fills" if row["segment_bytes"] >= TRANSPORT_SLICE_BYTES else "is below"
    out += [
        f"A block of {block} makes segments of {row['segment_bytes']:,} bytes, which {filled} the transport's "
        f"{TRANSPORT_SLICE_BYTES:,}-byte slice; token round-robin sends {rr['segment_bytes']:,}-byte rows.",
        f"A prefill then sends {row['segments_per_request_and_rank']:,} segments per request and rank instead of "
        f"{rr['segments_per_request_and_rank']:,}, from whole pages and without a pack buffer.",
        f"The price: the longest shard leads the mean by up to {row['worst_tail_skew']:.1%} at this context, and "
        f"requests under {row['empty_rank_below_tokens']} tokens leave a rank without rows.",
        f"A prefix is reused in steps of {row['prefix_hit_granularity']:,} tokens (dcp_size * lcm(page, block)); token "
        f"round-robin with page {rr['page_size']} has {rr['prefix_hit_granularity']:,}.",
        f"Give --page-size {row['page_size']} on the prefill server as well: smaller pages there make more segments.",
    ]
    return out


def _refused_yet(shape: ModelShape, dtype: str) -> list[str]:
    """What the server would refuse in this advice today, told from its own lists."""
    out = []
    if shape.architecture not in server_args.TESTED_ARCHITECTURES:
        tested = ", ".join(server_args.TESTED_ARCHITECTURES)
        out.append(f"Not yet: the server refuses {shape.architecture} with a block size above 1 (tested: {tested}).")
    if dtype == "fp8_e5m2" and dtype not in server_args.TESTED_KV_DTYPES:
        out.append("Not yet: the server refuses fp8_e5m2 KV with a block size above 1 (fp8_e4m3 is tested).")
    return out


def render_text(result: dict[str, Any], console: Console) -> None:
    """Print the advice; readable at 80 columns and without colour."""
    best = result["recommendation"]
    console.print(
        Text(f"{result['model']}, tp {result['tp_size']}, KV {result['kv_dtype']}: about ", style="bold").append(
            f"{result['kv_budget_bytes'] / 2**30:,.1f} GiB for KV on each GPU"
        )
    )
    console.print(Text("\n  " + best["flags"] + "\n", style="bold green"), soft_wrap=True)
    reasons = Table.grid(padding=(0, 1, 0, 0))
    for reason in result["reasons"]:
        reasons.add_row(" -", reason)
    console.print(reasons)
    console.print(_title("Ranks"))
    table = _table("", "dcp", "capacity", "requests", "fits", "KV read per step and rank")
    for row in result["dcp_sizes"]:
        table.add_row(
            "*" if row["dcp_size"] == best["dcp_size"] else "",
            f"{row['dcp_size']}",
            f"{row['capacity_tokens']:,}",
            f"{row['requests']:,}",
            "yes" if row["fits"] else "no",
            f"{row['kv_read_per_step_bytes'] / 2**30:,.1f} GiB",
        )
    console.print(table)
    if result["block_sizes"]:
        console.print(_title("Blocks"))
        table = _table("", "block", "page", "segment", "segments", "worst skew", "empty rank", "prefix step")
        for row in result["block_sizes"]:
            table.add_row(
                "*" if row["block_size"] == best["block_size"] else "",
                f"{row['block_size']}",
                f"{row['page_size']}",
                f"{row['segment_bytes']:,} B",
                f"{row['segments_per_request_and_rank']:,}",
                f"{row['worst_tail_skew']:.1%}",
                f"< {row['empty_rank_below_tokens']:,}",
                f"{row['prefix_hit_granularity']:,}",
            )
        console.print(table)
        console.print(
            Text(
                "* advised. Segments: per request and rank, all layers. Empty rank: shorter requests leave one.", "dim"
            )
        )


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
