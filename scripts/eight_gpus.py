"""``--tp-size 8 --dcp-size 8 --dcp-block-size 64``: answers, capacity, audit, speed, and P->D, on eight GPUs.

    python scripts/eight_gpus.py --dry-run
    python scripts/eight_gpus.py --stage answers --budget 540 --out results --prefix h200x8

A random model with DeepSeek-V3's attention (128 heads, kv_lora 512, rope 64) in few layers; DCP1, DCP8 at B = 1 and at
B = 64, on Triton and FlashInfer, CUDA graphs on. ``--rehearse`` runs the same stages with 2 ranks on the CPU test bed.
"""

from __future__ import annotations

from dataclasses import replace

from gpu_run import TIMED, V3, Engine, Pair
from gpu_stages import Answers, Plan, PrefillDecode, Speed, Stage, command

from sglang_dcp_block.dcp.layout import DcpLayout

P, B = 8, 64
LENGTHS = (1, B - 1, B, B + 1, P * B - 1, P * B, P * B + 1, 8192, 32_768, 131_072)
AUDIT_LENGTHS = (1, B - 1, B, B + 1, P * B - 1, P * B, P * B + 1, 3000, 9000)
CELLS = [(batch, context) for context in (131_072, 8192, 32_768) for batch in (1, 8, 64)]
BACKENDS = (("tri", "triton"), ("fi", "flashinfer"))

#: As many KV rows as fit: max_total_num_tokens of DCP8 over DCP1 is one of the results.
DCP1 = Engine("", tp=P)


def layouts(base: Engine) -> list[tuple[Engine, str]]:
    return [
        (replace(base, name=f"{short}-dcp8-b{b}", backend=name, dcp=P, block=b), f"{short}-dcp1")
        for b in (B, 1)
        for short, name in BACKENDS
    ]


def answers() -> Stage:
    references = [replace(DCP1, name=f"{short}-dcp1", backend=name) for short, name in BACKENDS]
    what = "tokens and logprobs of DCP8 against DCP1, and the pools' capacity"
    return Answers("answers", what, 540, references=references, others=layouts(DCP1), lengths=LENGTHS)


def audit() -> Stage:
    small = replace(DCP1, max_tokens=32_768, context=40_000, chunked=4096)
    references = [replace(small, name="tri-dcp1", backend="triton", page=P * small.page)]
    others = [(replace(small, name="tri-dcp8-b64", dcp=P, block=B), "tri-dcp1")]
    return Answers(
        "audit",
        "KV rows of DCP8 at block 64",
        200,
        references=references,
        others=others,
        lengths=AUDIT_LENGTHS,
        audit=True,
    )


def speed() -> Stage:
    rows = 16 * 131_072
    pool = rows + 65_536
    base = replace(DCP1, extra=TIMED)
    timed = [engine for engine, _ in layouts(replace(base, max_tokens=DcpLayout(P).local_len(pool, 0)))]
    timed += [replace(base, name=f"{short}-dcp1", backend=name, max_tokens=pool) for short, name in BACKENDS]
    pairs = [(f"{short}-dcp8-b{B}", f"{short}-{other}") for short, _ in BACKENDS for other in ("dcp8-b1", "dcp1")]
    pairs.append((f"tri-dcp8-b{B}", f"fi-dcp8-b{B}"))
    return Speed(
        "speed", "block 64 over 1, Triton over FlashInfer, DCP8 over DCP1", 450, sizes=replace(V3, layers=12),
        weights=False, timed=timed, cells=CELLS, rows=rows, pairs=pairs,
    )  # fmt: skip


def pd() -> Stage:
    prefill = Engine("", tp=4, backend="flashinfer", max_tokens=400_000, chunked=16_384, mem_fraction=0.5)
    decode = replace(prefill, dcp=4, base_gpu=4)
    pairs = [
        Pair("stock", replace(prefill, name="stock-prefill"), replace(decode, name="stock-decode")),
        Pair(
            "block64",
            replace(prefill, name="block64-prefill", block=1),
            replace(decode, name="block64-decode", block=B),
        ),
    ]
    what = "prefill on 4 GPUs, decode on 4 with dcp 4: block 64 against stock with its pack buffer"
    return PrefillDecode("pd", what, 300, pairs=pairs, against="stock", lengths=(1000, 8192, 32_768, 131_072))


REPLACED = "custom all-reduce and FlashInfer's all-reduce fusion are off, so NCCL carries every collective"
PLAN = Plan("tp 8, dcp 8 on eight GPUs", P, V3, [answers(), audit(), speed(), pd()], replaced=REPLACED)

app = command(PLAN)

if __name__ == "__main__":
    app()
