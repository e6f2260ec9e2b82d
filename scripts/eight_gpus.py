"""``--tp-size 8 --dcp-size 8 --dcp-block-size 64``: answers, capacity, audit, speed, and P->D, on eight GPUs.

    python scripts/eight_gpus.py --dry-run
    python scripts/eight_gpus.py --stage answers --budget 540 --out results --prefix h200x8

A random model with DeepSeek-V3's attention (128 heads, kv_lora 512, rope 64) in few layers; DCP1, DCP8 at B = 1 and at
B = 64, on Triton and FlashInfer, CUDA graphs on. ``--rehearse`` runs the same stages with 2 ranks on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import TIMED, V3, Engine
from gpu_stages import (
    Answers,
    Plan,
    PrefillDecode,
    Speed,
    Stage,
    TimedCell,
    command,
    pack_against_blocks,
    with_blocks,
    without_dcp,
)

from sglang_dcp_block.dcp.layout import DcpLayout

P, B = 8, 64
LENGTHS = (1, B - 1, B, B + 1, P * B - 1, P * B, P * B + 1, 8192, 32_768, 131_072)
AUDIT_LENGTHS = (1, B - 1, B, B + 1, P * B - 1, P * B, P * B + 1, 3000, 9000)
CELLS = [TimedCell(batch, context) for context in (131_072, 8192, 32_768) for batch in (1, 8, 64)]

#: As many KV rows as fit: max_total_num_tokens of DCP8 over DCP1 is one of the results.
DCP1 = Engine("", tp=P)


def answers() -> Stage:
    what = "tokens and logprobs of DCP8 against DCP1, and the pools' capacity"
    others = with_blocks(replace(DCP1, dcp=P), (B, 1))
    return Answers("answers", what, 540, references=without_dcp(DCP1, P), others=others, lengths=LENGTHS)


def audit() -> Stage:
    small = replace(DCP1, max_tokens=32_768, context=40_000, chunked=4096)
    return Answers(
        "audit", f"KV rows of DCP8 at block {B}", 200, references=without_dcp(small, P)[:1],
        others=with_blocks(replace(small, dcp=P), (B,))[:1], lengths=AUDIT_LENGTHS, audit=True,
    )  # fmt: skip


def speed() -> Stage:
    rows = 16 * 131_072
    pool = rows + 65_536
    timed = [e for e, _ in with_blocks(replace(DCP1, dcp=P, max_tokens=DcpLayout(P).local_len(pool, 0)), (B, 1))]
    timed += without_dcp(replace(DCP1, max_tokens=pool), 1)
    pairs = [(f"{short}-b{B}", f"{short}-{other}") for short in ("tri", "fi") for other in ("b1", "dcp1")]
    pairs.append((f"tri-b{B}", f"fi-b{B}"))
    return Speed(
        "speed", "block 64 over 1, Triton over FlashInfer, DCP8 over DCP1", 450, sizes=replace(V3, layers=12),
        weights=False, timed=[replace(e, extra=TIMED) for e in timed], cells=CELLS, rows=rows, pairs=pairs,
    )  # fmt: skip


def pd() -> PrefillDecode:
    prefill = Engine("", tp=4, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.5)
    return pack_against_blocks(prefill, replace(prefill, dcp=4, base_gpu=4), (B,))


REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan("tp 8, dcp 8 on eight GPUs", P, V3, [answers(), audit(), speed(), pd()], replaced=REPLACED)

app = command(PLAN)

if __name__ == "__main__":
    app()
