"""Real engines on one GPU: answers and pool audit of every layout, long prompts, a soak, and P->D over Mooncake's TCP.

    python scripts/one_gpu.py --dry-run
    python scripts/one_gpu.py --stage answers --budget 500 --out results --prefix h200

Two ranks share the card, with their collectives through the host (sglang_dcp_block.testing.one_gpu_testbed): kernels,
pools, scheduler and models are real, speed is not. CUDA graphs run where no collective is in them: on one rank.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import V2_LITE, Engine
from gpu_stages import (
    BACKENDS,
    Answers,
    Plan,
    PrefillDecode,
    Stage,
    command,
    every_layout,
    pack_against_blocks,
    triton_soak,
    with_blocks,
    without_dcp,
)

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 500, 1024, 3000, 9000)
LONG = (1, 64, 129, 8191, 32_768, 131_072)

SHARED = Engine("", tp=2, bed="one_gpu", graphs=False, context=40_000, max_tokens=65_536, chunked=4096)
LARGE = replace(SHARED, context=140_000, max_tokens=300_000, chunked=16_384)


def answers() -> Stage:
    one = without_dcp(replace(SHARED, tp=1, graphs=True), 2)
    graphs = [(replace(e, name=f"{short}-tp1-graphs"), e.name) for short, e in zip(BACKENDS, one, strict=True)]
    return Answers(
        "answers", "tokens, logprobs and KV rows of DCP2 against DCP1", 420, at_once=6,
        references=without_dcp(SHARED, 2), others=every_layout(replace(SHARED, dcp=2)) + graphs, lengths=LENGTHS,
        new_tokens=32, audit=True,
    )  # fmt: skip


def long() -> Stage:
    return Answers(
        "long", "prompts of up to 128K tokens at block 64 against DCP1", 150, at_once=4,
        references=without_dcp(LARGE, 2), others=with_blocks(replace(LARGE, dcp=2), (64,)), lengths=LONG, new_tokens=32,
    )  # fmt: skip


def pd() -> PrefillDecode:
    base = replace(LARGE, backend="flashinfer")
    return pack_against_blocks(replace(base, tp=1), replace(base, dcp=2), (64, 256))


PLAN = Plan(
    "Engines on one GPU",
    1,
    V2_LITE,
    [answers(), long(), triton_soak(SHARED, 2), pd()],
    replaced="NCCL by gloo over host memory between the two ranks on the card; custom all-reduce off",
)

app = command(PLAN)

if __name__ == "__main__":
    app()
