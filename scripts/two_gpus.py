"""Engines over NCCL on two GPUs: answers, audit, speed, a soak, and P->D with both servers on the two cards.

    python scripts/two_gpus.py --dry-run
    python scripts/two_gpus.py --stage answers --stage audit --budget 540 --out results --prefix h200x2
    python scripts/two_gpus.py --stage speed --budget 540 --out results --prefix h200x2

A random model with DeepSeek-V2-Lite's attention (16 heads, kv_lora 512, rope 64, few layers), tp 2, CUDA graphs and
overlap scheduling on. ``--rehearse`` runs the same stages with tiny sizes on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import TIMED, V2_LITE, V2_LITE_DEEP, Engine, Pair
from gpu_stages import Answers, Plan, PrefillDecode, Soak, Speed, Stage, command, layouts

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 8191, 32_768, 131_072)
AUDIT_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500, 3000, 9000)
CELLS = [(batch, context) for context in (131_072, 8192, 32_768) for batch in (8, 64, 1)]

DCP1 = Engine("", tp=2, max_tokens=2_400_000)
DCP2 = replace(DCP1, dcp=2)
BACKENDS = (("tri", "triton"), ("fi", "flashinfer"))


def answers() -> Stage:
    small = replace(DCP1, max_tokens=400_000)
    references = [
        replace(small, name=f"{short}-dcp1", backend=backend, page=2 * small.page) for short, backend in BACKENDS
    ]
    others = [
        (engine, f"{short}-dcp1")
        for short, backend in BACKENDS
        for engine in layouts(replace(small, dcp=2, backend=backend), short)
    ]
    others.sort(key=lambda pair: ("agrs" in pair[0].name, "b64" not in pair[0].name))
    what = "tokens and logprobs of every layout against DCP1"
    return Answers("answers", what, 500, at_once=5, references=references, others=others, lengths=LENGTHS)


def audit() -> Stage:
    small = replace(DCP1, max_tokens=65_536, context=40_000, chunked=4096)
    references = [
        replace(small, name=f"{short}-audit-dcp1", backend=backend, page=2 * small.page) for short, backend in BACKENDS
    ]
    others = [
        (replace(small, name=f"{short}-audit-b64", backend=backend, dcp=2, block=64), f"{short}-audit-dcp1")
        for short, backend in BACKENDS
    ]
    return Answers(
        "audit", "KV rows of DCP2 at block 64", 150, at_once=4, references=references, others=others,
        lengths=AUDIT_LENGTHS, audit=True,
    )  # fmt: skip


def speed() -> Stage:
    rows = 3 * 131_072  # the KV of 64 requests would not fit six times
    pool, two = rows + 65_536, replace(DCP2, max_tokens=(rows + 65_536) // 2)
    timed = [replace(two, name=f"{short}-b{b}", backend=name, block=b) for short, name in BACKENDS for b in (64, 1)]
    timed += [replace(two, name="fi-stock", backend="flashinfer")]
    timed += [replace(DCP1, name=f"{short}-dcp1", backend=name, max_tokens=pool) for short, name in BACKENDS]
    timed = [replace(engine, extra=TIMED, mem_fraction=0.9) for engine in timed]
    pairs = [("tri-b64", "tri-b1"), ("fi-b64", "fi-b1"), ("fi-b64", "fi-stock"), ("tri-b64", "fi-b64")]
    pairs += [("tri-b64", "tri-dcp1"), ("fi-b64", "fi-dcp1")]
    return Speed(
        "speed", "block 64 over 1, Triton over FlashInfer, DCP2 over DCP1", 450, sizes=V2_LITE_DEEP, weights=False,
        timed=timed, cells=CELLS, rows=rows, pairs=pairs,
    )  # fmt: skip


def pd() -> Stage:
    prefill = replace(DCP1, tp=1, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.5)
    decode = replace(DCP2, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.5)
    pairs = [
        Pair("stock", replace(prefill, name="stock-prefill"), replace(decode, name="stock-decode")),
        Pair(
            "block64",
            replace(prefill, name="block64-prefill", block=1, base_gpu=1),
            replace(decode, name="block64-decode", block=64),
        ),
        Pair(
            "block256",
            replace(prefill, name="block256-prefill", block=1, base_gpu=1, page=256),
            replace(decode, name="block256-decode", block=256, page=256),
        ),
    ]
    what = "blocks of 64 and 256 against stock token round-robin with its pack buffer"
    return PrefillDecode("pd", what, 300, pairs=pairs, against="stock", lengths=(1000, 8192, 32_768, 131_072))


def soak() -> Stage:
    small = replace(DCP1, context=40_000, chunked=4096)
    return Soak(
        "soak", "mixed lengths, prefix reuse and aborts", 760,
        engine=replace(small, name="soak-tri-b64", dcp=2, block=64, max_tokens=65_536),
        reference=replace(small, name="soak-tri-dcp1", max_tokens=262_144),
    )  # fmt: skip


REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan("Engines over NCCL on two GPUs", 2, V2_LITE, [answers(), audit(), speed(), pd(), soak()], replaced=REPLACED)

app = command(PLAN)

if __name__ == "__main__":
    app()
