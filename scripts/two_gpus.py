"""Engines over NCCL on two GPUs: answers, audit, speed, a soak, and P->D with both servers on the two cards.

    python scripts/two_gpus.py --dry-run
    python scripts/two_gpus.py --stage answers --stage audit --budget 540 --out results --prefix h200x2
    python scripts/two_gpus.py --stage speed --budget 540 --out results --prefix h200x2

A random model with DeepSeek-V2-Lite's attention (16 heads, kv_lora 512, rope 64, few layers), tp 2, CUDA graphs and
overlap scheduling on. ``--rehearse`` runs the same stages with tiny sizes on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import TIMED, V2_LITE, V2_LITE_DEEP, Engine
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
    with_blocks,
    without_dcp,
)

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 8191, 32_768, 131_072)
AUDIT_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500, 3000, 9000)
CELLS = [TimedCell(batch, context) for context in (131_072, 8192, 32_768) for batch in (8, 64, 1)]

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
    base = replace(DCP1, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.5)
    return pack_against_blocks(replace(base, tp=1), replace(base, dcp=2), (64, 256), first_gpu=1)


SOAK = triton_soak(replace(DCP1, context=40_000, chunked=4096), 2)
REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan("Engines over NCCL on two GPUs", 2, V2_LITE, [answers(), audit(), speed(), pd(), SOAK], replaced=REPLACED)

app = command(PLAN)

if __name__ == "__main__":
    app()
