"""Real engines on one GPU: answers and pool audit of every layout, long prompts, a soak, and P->D over Mooncake's TCP.

    python scripts/one_gpu.py --dry-run
    python scripts/one_gpu.py --stage answers --budget 500 --out results --prefix h200

Two ranks share the card, with their collectives through the host (sglang_dcp_block.testing.one_gpu_testbed): kernels,
pools, scheduler and models are real, speed is not. CUDA graphs run where no collective is in them: on one rank.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import V2_LITE, Engine, Pair
from gpu_stages import Answers, Plan, PrefillDecode, Soak, Stage, command, layouts

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 500, 1024, 3000, 9000)
LONG = (1, 64, 129, 8191, 32_768, 131_072)
PD_LENGTHS = (1000, 8192, 32_768, 131_072)
BACKENDS = (("tri", "triton"), ("fi", "flashinfer"))

SHARED = Engine("", tp=2, bed="one_gpu", graphs=False, context=40_000, max_tokens=65_536, chunked=4096)
LARGE = replace(SHARED, context=140_000, max_tokens=300_000, chunked=16_384)


def answers() -> Stage:
    references, others = [], []
    for short, backend in BACKENDS:
        without = replace(SHARED, backend=backend, page=2 * SHARED.page)
        references.append(replace(without, name=f"{short}-dcp1"))
        tried = layouts(replace(SHARED, dcp=2, backend=backend), short)
        tried.append(replace(without, name=f"{short}-tp1-graphs", tp=1, graphs=True))
        others += [(engine, f"{short}-dcp1") for engine in tried]
    others.sort(key=lambda pair: ("agrs" in pair[0].name, "b64" not in pair[0].name))
    return Answers(
        "answers", "tokens, logprobs and KV rows of DCP2 against DCP1", 420, at_once=6, references=references,
        others=others, lengths=LENGTHS, new_tokens=32, audit=True,
    )  # fmt: skip


def long() -> Stage:
    references = [
        replace(LARGE, name=f"{short}-long-dcp1", backend=backend, page=2 * LARGE.page) for short, backend in BACKENDS
    ]
    others = [
        (replace(LARGE, name=f"{short}-long-b64", backend=backend, dcp=2, block=64), f"{short}-long-dcp1")
        for short, backend in BACKENDS
    ]
    what = "prompts of up to 128K tokens at block 64 against DCP1"
    return Answers("long", what, 150, at_once=4, references=references, others=others, lengths=LONG, new_tokens=32)


def soak() -> Stage:
    return Soak(
        "soak", "mixed lengths, prefix reuse and aborts", 760,
        engine=replace(SHARED, name="soak-tri-b64", dcp=2, block=64),
        reference=replace(SHARED, name="soak-tri-dcp1", max_tokens=262_144),
    )  # fmt: skip


def pd() -> Stage:
    prefill = replace(LARGE, tp=1, backend="flashinfer")
    decode = replace(LARGE, dcp=2, backend="flashinfer")
    pairs = [
        Pair("stock", replace(prefill, name="stock-prefill"), replace(decode, name="stock-decode")),
        Pair(
            "block64",
            replace(prefill, name="block64-prefill", block=1),
            replace(decode, name="block64-decode", block=64),
        ),
        Pair(
            "block256",
            replace(prefill, name="block256-prefill", block=1, page=256),
            replace(decode, name="block256-decode", block=256, page=256),
        ),
    ]
    what = "blocks of 64 and 256 against stock token round-robin with its pack buffer"
    return PrefillDecode("pd", what, 150, pairs=pairs, against="stock", lengths=PD_LENGTHS, repeats=5)


PLAN = Plan(
    "Engines on one GPU",
    1,
    V2_LITE,
    [answers(), long(), soak(), pd()],
    replaced="NCCL by gloo over host memory between the two ranks on the card; custom all-reduce off",
)

app = command(PLAN)

if __name__ == "__main__":
    app()
