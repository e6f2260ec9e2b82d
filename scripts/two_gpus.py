"""Engines over NCCL on two GPUs: answers, audit, speed, a soak, and P->D with both servers on the two cards.

    python scripts/two_gpus.py --dry-run
    python scripts/two_gpus.py --stage answers --stage audit --budget 540 --out results --prefix h200x2
    python scripts/two_gpus.py --stage speed --budget 540 --out results --prefix h200x2

A random model with DeepSeek-V2-Lite's attention (16 heads, kv_lora 512, rope 64, few layers), tp 2, CUDA graphs and
overlap scheduling on. ``--rehearse`` runs the same stages with tiny sizes on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import V2_LITE, Engine, Pair
from gpu_stages import Answers, Plan, PrefillDecode, Soak, Speed, Stage, command

LENGTHS = (1, 63, 64, 65, 127, 128, 129, 1000, 8191, 32_768, 131_072)
AUDIT_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500, 3000, 9000)
CONTEXTS = (8192, 32_768, 131_072)
CELLS = [(batch, context) for context in CONTEXTS for batch in (1, 8, 64) if batch * context <= 64 * 32_768]

DCP1 = Engine("", tp=2, max_tokens=2_400_000)
DCP2 = replace(DCP1, dcp=2)
BACKENDS = (("tri", "triton"), ("fi", "flashinfer"))


def layouts(short: str, backend: str) -> list[Engine]:
    """Stock where it exists, then B = 64, 1, 16 with both merges, the most telling first."""
    merges = (("a2a", ""), ("ag_rs", "-agrs"))
    found = [
        replace(DCP2, name=f"{short}-b{b}{suffix}", backend=backend, block=b, comm=comm)
        for comm, suffix in merges
        for b in (64, 1, 16)
    ]
    return [replace(DCP2, name="fi-stock", backend=backend), *found] if backend == "flashinfer" else found


def answers() -> Stage:
    references = [
        replace(DCP1, name=f"{short}-dcp1", backend=backend, max_tokens=400_000) for short, backend in BACKENDS
    ]
    others = [(replace(e, max_tokens=400_000), f"{s}-dcp1") for s, backend in BACKENDS for e in layouts(s, backend)]
    others.sort(key=lambda pair: ("agrs" in pair[0].name, "b64" not in pair[0].name))
    what = "tokens and logprobs of every layout against DCP1"
    return Answers("answers", what, 900, at_once=2, references=references, others=others, lengths=LENGTHS)


def audit() -> Stage:
    small = replace(DCP1, max_tokens=65_536, context=40_000, chunked=4096)
    references = [replace(small, name=f"{short}-audit-dcp1", backend=backend) for short, backend in BACKENDS]
    others = [
        (replace(small, name=f"{short}-audit-b64", backend=backend, dcp=2, block=64), f"{short}-audit-dcp1")
        for short, backend in BACKENDS
    ]
    return Answers(
        "audit", "KV rows of DCP2 at block 64", 150, at_once=4, references=references, others=others,
        lengths=AUDIT_LENGTHS, audit=True,
    )  # fmt: skip


def speed() -> Stage:
    timed = [replace(DCP2, name=f"{short}-b{b}", backend=name, block=b) for short, name in BACKENDS for b in (64, 1)]
    timed += [replace(DCP1, name=f"{short}-dcp1", backend=name) for short, name in BACKENDS]
    return Speed("speed", "block 64 over 1, Triton over FlashInfer, DCP2 over DCP1", 800, timed=timed, cells=CELLS)


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
    ]
    what = "block 64 against stock token round-robin with its pack buffer"
    return PrefillDecode("pd", what, 300, pairs=pairs, against="stock", lengths=(1000, 8192, 32_768, 131_072))


def soak() -> Stage:
    return Soak("soak", "mixed lengths, prefix reuse and aborts", 700, engine=replace(DCP2, name="tri-b64", block=64))


REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan("Engines over NCCL on two GPUs", 2, V2_LITE, [answers(), audit(), speed(), pd(), soak()], replaced=REPLACED)

app = command(PLAN)

if __name__ == "__main__":
    app()
