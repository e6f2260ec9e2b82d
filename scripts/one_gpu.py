"""Real engines on one GPU: answers and pool audit of every layout, and P->D with GPU memory over Mooncake's TCP.

    python scripts/one_gpu.py --dry-run
    python scripts/one_gpu.py --stage answers --budget 500 --out results

Two ranks share the card, with their collectives through the host (sglang_dcp_block.testing.one_gpu_testbed): kernels,
pools, scheduler and models are real, speed is not. CUDA graphs run where no collective is in them: on one rank.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import V2_LITE, Engine, Pair
from gpu_stages import Answers, Plan, PrefillDecode, Stage, command

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 500, 1024, 3000, 9000)
PD_LENGTHS = (1000, 8192, 32768, 131072)

SHARED = Engine("", tp=2, bed="one_gpu", graphs=False, context=40_000, max_tokens=65_536, chunked=4096)
ALONE = replace(SHARED, tp=1, graphs=True)


def answers() -> Stage:
    references, others = [], []
    for short, backend in (("tri", "triton"), ("fi", "flashinfer")):
        references.append(replace(SHARED, name=f"{short}-dcp1", backend=backend))
        two = replace(SHARED, dcp=2, backend=backend)
        layouts = [replace(two, name=f"{short}-b{b}", block=b) for b in (64, 1, 16)]
        layouts.append(replace(two, name=f"{short}-b64-agrs", block=64, comm="ag_rs"))
        if backend == "flashinfer":
            layouts.append(replace(two, name="fi-stock"))
        layouts.append(replace(ALONE, name=f"{short}-tp1-graphs", backend=backend))
        others += [(engine, f"{short}-dcp1") for engine in layouts]
    return Answers(
        "answers", "tokens, logprobs and KV rows of DCP2 against DCP1", 420, at_once=5, references=references,
        others=others, lengths=LENGTHS, audit=True,
    )  # fmt: skip


def pd() -> Stage:
    base = replace(SHARED, context=140_000, max_tokens=300_000, chunked=16384)
    prefill = replace(base, tp=1, backend="flashinfer")
    decode = replace(base, dcp=2, backend="flashinfer")
    pairs = [
        Pair("stock", replace(prefill, name="stock-prefill"), replace(decode, name="stock-decode")),
        Pair(
            "block64",
            replace(prefill, name="block64-prefill", block=1),
            replace(decode, name="block64-decode", block=64),
        ),
    ]
    what = "block 64 against stock token round-robin with its pack buffer"
    return PrefillDecode("pd", what, 240, pairs=pairs, against="stock", lengths=PD_LENGTHS, repeats=5)


PLAN = Plan(
    "Engines on one GPU",
    1,
    V2_LITE,
    [answers(), pd()],
    replaced="NCCL by gloo over host memory between the two ranks on the card; custom all-reduce off",
)

app = command(PLAN)

if __name__ == "__main__":
    app()
