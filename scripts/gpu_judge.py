"""Judging of GPU runs: greedy answers against a reference, KV rows, and times of engines that ran in turns.

Nothing is compared by equal ids: in bfloat16 one and the same engine parts from itself when the shape of the batch
changes. A first difference is judged by the gap between the two best tokens there and by the logprob distance before
it, against what the reference engine differs from itself by in the same run. Needs no GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

#: How much more than the reference's own noise another layout may differ by: its partial results are rounded once more.
NOISE_FACTOR = 2.0
#: What float32 arithmetic may always differ by, for rehearsals in float32; bfloat16 noise is 500 times as much.
FLOAT32_NOISE = 1e-4
#: Largest difference of one KV element (the rows have unit variance) that bfloat16 noise explains: 0.07 is the largest
#: seen on GPUs. With FP8's step on top, much more would hide a row of half the size; another token's row is 4 to 6 off.
AUDIT_TOLERANCE = 0.25

Answer = dict[str, Any]  #: prompt, cached: tokens; ids; logprobs of these ids; gaps: top-2 logprob gaps


class Parting(NamedTuple):
    """How two greedy answers to one prompt compare.

    at: first differing token, None if none. gap: top-2 logprob gap there, of the first engine. before: largest
    logprob distance before it. tokens: compared.
    """

    prompt: int
    cached: int | None
    at: int | None
    gap: float
    before: float
    tokens: int


def part(a: Answer, b: Answer) -> Parting:
    """b may be shorter than a: an aborted answer is compared as far as it goes."""
    size = min(len(a["ids"]), len(b["ids"]))
    at = next((i for i in range(size) if a["ids"][i] != b["ids"][i]), None)
    end = size if at is None else at
    distances = [abs(x - y) for x, y in zip(a["logprobs"][:end], b["logprobs"][:end], strict=True)]
    bad = [d for d in distances if not d <= 1e30]  # NaN
    before = float("inf") if bad else max(distances, default=0.0)
    return Parting(a["prompt"], b.get("cached"), at, 0.0 if at is None else a["gaps"][at], before, end)


def compare(reference: Sequence[Answer], other: Sequence[Answer]) -> list[Parting]:
    return [part(a, b) for a, b in zip(reference, other, strict=True)]


class Noise(NamedTuple):
    """What a reference differs from itself by: logprob distance before a parting, and top-2 gap at one."""

    before: float
    gap: float

    def limit(self) -> float:
        return NOISE_FACTOR * max(self.before, self.gap, FLOAT32_NOISE)


def noise_of(partings: Sequence[Parting]) -> Noise:
    return Noise(
        max((p.before for p in partings), default=0.0), max((p.gap for p in partings if p.at is not None), default=0.0)
    )


class Verdict(NamedTuple):
    """wrong: prompts whose difference exceeds the noise, in words. equal: answers equal to the last token."""

    wrong: list[str]
    equal: int
    asked: int
    worst_before: float
    worst_gap: float


def judge(partings: Sequence[Parting], noise: Noise) -> Verdict:
    limit, wrong = noise.limit(), []
    for p in partings:
        if not p.before <= limit:
            wrong.append(f"prompt of {p.prompt}: logprobs {p.before:.3f} apart before token {p.at}, limit {limit:.3f}")
        elif p.at is not None and p.gap > limit:
            wrong.append(f"prompt of {p.prompt}: another token at {p.at} over a gap of {p.gap:.3f}, limit {limit:.3f}")
    observed = noise_of(partings)
    return Verdict(wrong, sum(p.at is None for p in partings), len(partings), observed.before, observed.gap)


def audit(
    reference: Path, records: Path, dcp_size: int, block: int, rotated_page: int = 0, fp8: bool = False
) -> dict[str, Any]:
    """Does every KV row lie where the layout says? And the control: would another layout be noticed?

    rotated_page: rows of a page where blocks are rotated; the control is then the layout without rotation, otherwise
    another block size. fp8: a value may be one FP8 step further off.
    """
    from sglang_dcp_block.dcp.layout import DcpLayout
    from sglang_dcp_block.testing.audit import Reference, audit_requests, load_requests, one_fp8_step

    layout, other = DcpLayout(dcp_size, block), DcpLayout(dcp_size, 2 if block == 1 else block // 2)
    if rotated_page:
        layout, other = layout.rotated(rotated_page), layout
    tolerance = (lambda values: AUDIT_TOLERANCE + one_fp8_step(values)) if fp8 else AUDIT_TOLERANCE
    known, found = Reference(load_requests(reference)), load_requests(records)
    report, control = (audit_requests(each, found, known, tolerance) for each in (layout, other))
    return {
        "ok": report.compared > 0 and not report.mismatches and not report.written,
        "compared": report.compared, "mismatches": report.mismatches, "max_abs_diff": report.max_abs_diff,
        "unowned": report.unowned, "written": report.written, "uncovered": report.uncovered,
        "complaints": report.complaints, "control_noticed": bool(control.mismatches or control.written),
    }  # fmt: skip


def judge_soak(
    bank: Sequence[Answer], together: Sequence[Answer], checked: Sequence[dict[str, Any]], counts: dict[str, int]
) -> dict[str, Any]:
    """bank, together: the reference's answers in small batches and in one. checked: what the soaked engine answered,
    with ``number`` in the bank and ``aborted``.

    The control gives each answer to the next prompt of the bank: all of them must be called wrong.
    """
    noise = noise_of(compare(bank, together))
    partings = [part(bank[row["number"]], row) for row in checked]
    verdict = judge(partings, noise)
    swapped = [part(bank[(row["number"] + 1) % len(bank)], row) for row in checked]
    return counts | {
        "noise": noise._asdict() | {"limit": noise.limit()},
        "checked": len(partings),
        "checked_tokens": sum(p.tokens for p in partings),
        "checked_aborted": sum(bool(row.get("aborted")) for row in checked),
        "checked_with_cached_prefix": sum(bool(p.cached) for p in partings),
        "wrong": verdict.wrong,
        "equal": verdict.equal,
        "worst_before": verdict.worst_before,
        "worst_gap": verdict.worst_gap,
        "control_noticed": len(judge(swapped, noise).wrong),
    }


# -- times -------------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    batch: int
    context: int


def speed_rows(timed: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Per cell and engine: median time per output token (ms) with quartiles over all rounds, and tokens per second.

    timed: engine -> its rounds, each with batch, context, round and samples_ms.
    """
    rows = []
    for cell in _cells(timed):
        for engine, rounds in timed.items():
            samples = sorted(s for r in _of(rounds, cell) for s in r["samples_ms"])
            if not samples:
                continue
            median = statistics.median(samples)
            rows.append({
                "batch": cell.batch, "context": cell.context, "engine": engine, "tpot_ms": median,
                "low_ms": samples[len(samples) // 4], "high_ms": samples[(3 * len(samples)) // 4],
                "samples": len(samples), "tokens_per_second": cell.batch / median * 1e3,
            })  # fmt: skip
    return rows


def speed_ratios(timed: dict[str, list[dict[str, Any]]], pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Time of one engine over another's, round by round: the median ratio, the smallest and the largest."""
    found = []
    for over, under in pairs:
        for cell in _cells(timed):
            a, b = (
                {r["round"]: statistics.median(r["samples_ms"]) for r in _of(timed.get(n, []), cell)}
                for n in (over, under)
            )
            ratios = sorted(a[r] / b[r] for r in a.keys() & b.keys())
            if ratios:
                found.append({
                    "over": over, "under": under, "batch": cell.batch, "context": cell.context,
                    "ratio": statistics.median(ratios), "low": ratios[0], "high": ratios[-1], "rounds": len(ratios),
                })  # fmt: skip
    return found


def _cells(timed: dict[str, list[dict[str, Any]]]) -> list[Cell]:
    found = {Cell(r["batch"], r["context"]) for rounds in timed.values() for r in rounds}
    return sorted(found, key=lambda cell: (cell.context, cell.batch))


def _of(rounds: Sequence[dict[str, Any]], cell: Cell) -> list[dict[str, Any]]:
    return [r for r in rounds if (r["batch"], r["context"]) == cell]
