"""Engines over NCCL on two GPUs, in stages: answers, audit, kinds (merges, FP8 KV, rotation), gqa (a grouped-query
model), speed, pd (P->D with both servers on the two cards), and a soak.

    python scripts/two_gpus.py --dry-run
    python scripts/two_gpus.py --stage answers --stage audit --budget 540 --out results --prefix h200x2
    python scripts/two_gpus.py --stage speed --budget 540 --out results --prefix h200x2

A random model with DeepSeek-V2-Lite's attention (16 heads, kv_lora 512, rope 64, few layers), tp 2, CUDA graphs and
overlap scheduling on. ``--rehearse`` runs the same stages with tiny sizes on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import ONE_KV_HEAD, TIMED, V2_LITE, V2_LITE_DEEP, Engine
from gpu_stages import (
    Answers,
    Plan,
    PrefillDecode,
    Speed,
    Stage,
    TimedCell,
    command,
    every_layout,
    pack_against_blocks,
    triton_soak,
    variant,
    with_blocks,
    without_dcp,
)

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 8191, 32_768, 131_072)
AUDIT_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500, 3000, 9000)
CELLS = [TimedCell(batch, context) for context in (131_072, 8192, 32_768) for batch in (8, 64, 1)]

#: Mooncake cuts a segment into chunks of this many bytes, 65,536 by default: a block of 64 rows is 73,728.
SLICE = {"MC_TCP_SLICE_SIZE": "131072"}
FP8 = {"kv_cache_dtype": "fp8_e4m3"}

DCP1 = Engine("", tp=2, max_tokens=2_400_000)
DCP2 = replace(DCP1, dcp=2)


def answers() -> Stage:
    small = replace(DCP1, max_tokens=400_000)
    references = without_dcp(small, 2)
    # What SGLang's wrong base of the LSE does to DCP1 itself: other pages, and no join of prefix and extension at all.
    flashinfer = references[1]
    no_join = {"SGLANG_MAX_KV_CHUNK_CAPACITY": str(1 << 20)}
    itself = [
        (replace(flashinfer, name="fi-dcp1-page64", page=64), flashinfer.name),
        (replace(flashinfer, name="fi-dcp1-no-join", env=no_join), references[0].name),
        (replace(flashinfer, name="fi-b64-no-join", env=no_join, dcp=2, block=64, page=64), references[0].name),
    ]
    others = every_layout(replace(small, dcp=2))
    return Answers(
        "answers", "tokens and logprobs of every layout against DCP1", 500, at_once=6, references=references,
        others=others[:7] + itself + others[7:], lengths=LENGTHS,
    )  # fmt: skip


def audit() -> Stage:
    small = replace(DCP1, max_tokens=65_536, context=40_000, chunked=4096)
    return Answers(
        "audit", "KV rows of DCP2 at block 64", 150, at_once=4, references=without_dcp(small, 2),
        others=with_blocks(replace(small, dcp=2), (64,)), lengths=AUDIT_LENGTHS, audit=True,
    )  # fmt: skip


def kinds() -> Stage:
    """Both merges and backends beside FP8 KV and rotation. FP8 on Triton is judged by FlashInfer's DCP1: SGLang's own
    Triton kernels round queries and softmax weights to FP8 too, this project's don't. ``fi-fp8-tp1`` is no DCP either:
    what another sum in bf16 makes of an answer where rows are rounded to FP8."""
    small = replace(DCP1, max_tokens=40_960, context=40_000, chunked=4096)
    two = replace(small, dcp=2)
    # One chunk: with FP8 KV, FlashInfer reads the new tokens of a further one as FP8, and Triton as computed.
    fp8 = {"extra": FP8, "chunked": 16_384}
    plain, eight = without_dcp(small, 2), without_dcp(replace(small, **fp8), 2)
    eight = [replace(e, name=e.name.replace("-", "-fp8-")) for e in eight]
    others = [
        (replace(two, name="tri-fp8-b64", block=64, **fp8), "fi-fp8-dcp1"),
        (replace(two, name="fi-fp8-b64", block=64, backend="flashinfer", **fp8), "fi-fp8-dcp1"),
        (replace(eight[1], name="fi-fp8-tp1", tp=1), "fi-fp8-dcp1"),
        (replace(two, name="tri-b64-rotated", block=64, extra={"dcp_rotate": True}), "tri-dcp1"),
        *with_blocks(two, (64, 1)),
        *with_blocks(replace(two, comm="ag_rs"), (64, 1), "-agrs"),
    ]
    return Answers(
        "kinds", "answers and KV rows: merges, FP8 KV, rotation", 250, at_once=8, references=plain + eight,
        others=others, lengths=AUDIT_LENGTHS, audit=True,
        beside=[("tri-fp8-dcp1", "tri-fp8-b64"), ("fi-fp8-dcp1", "tri-fp8-dcp1"), ("fi-dcp1", "fi-fp8-dcp1")],
    )  # fmt: skip


def gqa() -> Stage:
    small = replace(DCP1, max_tokens=40_960, context=40_000, chunked=4096)
    references = [e for e in without_dcp(small, 2) if e.backend == "triton"]
    others = [(e, r) for e, r in with_blocks(replace(small, dcp=2, comm="ag_rs"), (64,)) if e.backend == "triton"]
    return Answers(
        "gqa", "answers and KV rows of a model with one KV head, on Triton", 150, at_once=2, sizes=ONE_KV_HEAD,
        references=references, others=others, lengths=AUDIT_LENGTHS, audit=True,
    )  # fmt: skip


def speed() -> Stage:
    rows = 3 * 131_072  # the KV of 64 requests would not fit six times
    pool = rows + 65_536
    two = replace(DCP2, max_tokens=pool // 2)
    timed = [engine for engine, _ in with_blocks(two, (64, 1))]
    timed.append(replace(two, name="fi-stock", backend="flashinfer"))
    timed += without_dcp(replace(DCP1, max_tokens=pool), 1)
    timed = [replace(engine, extra=TIMED, mem_fraction=0.9) for engine in timed]
    pairs = [("tri-b64", "tri-b1"), ("fi-b64", "fi-b1"), ("fi-b64", "fi-stock"), ("tri-b64", "fi-b64")]
    pairs += [("tri-b64", "tri-dcp1"), ("fi-b64", "fi-dcp1")]
    return Speed(
        "speed", "block 64 over 1, Triton over FlashInfer, DCP2 over DCP1", 450, sizes=V2_LITE_DEEP, weights=False,
        timed=timed, cells=CELLS, rows=rows, pairs=pairs,
    )  # fmt: skip


def pd() -> PrefillDecode:
    """Five pairs: also with chunks of two blocks in Mooncake, for blocks and for packing."""
    # A fraction of what was free before the others started: a small one leaves the last server no pool.
    base = replace(DCP1, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.9)
    stage = pack_against_blocks(replace(base, tp=1), replace(base, dcp=2, max_tokens=200_000), (64, 256))
    stock, block64, _ = stage.pairs
    stage.pairs += [
        variant(stock, "stock-128k", SLICE),
        variant(block64, "block64-128k", SLICE, against="stock-128k"),
    ]
    stage.what += "; stock and blocks of 64 again with Mooncake's slices of 128 KiB"
    stage.needs_s = 200  # 192 s with a sixth pair
    return stage


SOAK = triton_soak(replace(DCP1, context=40_000, chunked=4096), 2)
REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan(
    "Engines over NCCL on two GPUs",
    2,
    V2_LITE,
    [answers(), audit(), kinds(), gqa(), speed(), pd(), SOAK],
    replaced=REPLACED,
)

app = command(PLAN)

if __name__ == "__main__":
    app()
