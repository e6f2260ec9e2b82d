"""Does every KV row lie where the layout says, and nowhere else? The judge of what the probe recorded.

    python -m sglang_dcp_block.testing.audit REFERENCE_AUDIT AUDIT --block-size 64

The reference is a DCP1 engine's records: the KV row of a position depends on the tokens up to it, so rows are looked up
by token prefix. For each record of a DCP-P engine and each of its ranks, under a :class:`DcpLayout`:

- an owned position's row, found through the request's slot, equals the reference's row of that position;
- every other row of the record's pages still holds NaN, that is, it was never written since its page was handed out;
- in a whole-pool record, free pages hold NaN and every page in use belongs to a cached sequence. Page 0 is exempt:
  SGLang lets padded batch entries write there.

Float32 rows of two engines differ by rounding (another batch shape, another reduction order over ranks): ``tolerance``
is absolute; a wrong row differs by about 1. FP8 rows are equal, or :func:`one_fp8_step` apart where that rounding
crosses a border of FP8's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout

TOLERANCE = 1e-3
#: Absolute, or the largest difference allowed for each value of the reference.
Tolerance = float | Callable[[np.ndarray], np.ndarray]
_KEPT_COMPLAINTS = 8


def one_fp8_step(values: np.ndarray) -> np.ndarray:
    """From float8_e4m3fn values to their upper neighbours (3 bits of fraction, 2^-9 at zero), or a little more.

    Lower neighbours are as far, those of powers of two half as far.
    """
    return np.maximum(np.abs(values) / 8, 2.0**-9)


class RequestRecord(NamedTuple):
    """One request on one scheduler, as it gave its KV back. tokens, slots: (n,) by position. pages: (m,) ascending.

    rows: (layers, m * page_rows, row width) float32. page_slots: slots of a virtual page; page_rows: its rows per rank.
    """

    rid: str
    finished: bool
    tokens: np.ndarray
    slots: np.ndarray
    pages: np.ndarray
    rows: np.ndarray
    dcp_size: int
    dcp_rank: int
    page_slots: int
    page_rows: int


class PoolRecord(NamedTuple):
    """One scheduler's whole pool. rows: (layers, pool rows, row width). cached: (tokens, slots) of the radix cache.

    slots_from_host: how many a host cache has brought back since the start.
    """

    rows: np.ndarray
    free_pages: np.ndarray
    cached: list[tuple[list[int], list[int]]]
    call_counts: dict[str, int]
    dcp_size: int
    dcp_rank: int
    page_slots: int
    page_rows: int
    slots_from_host: int = 0


def load_requests(audit: Path, ranks: Sequence[int] | None = None) -> list[RequestRecord]:
    """All request records below ``audit``, in order of time within a rank. ranks: TP ranks, every one by default."""
    return [RequestRecord(**_load(path)) for path in _files(audit, "request-*.npz", ranks)]


def load_pools(audit: Path, name: str = "*", ranks: Sequence[int] | None = None) -> list[PoolRecord]:
    """The pool records called ``name`` (the round's number as two digits), one per rank; all of them by default."""
    records = []
    for path in _files(audit, f"pool-{name}.npz", ranks):
        fields = _load(path)
        for key in ("cached", "call_counts"):
            fields[key] = json.loads(fields[key])
        records.append(PoolRecord(**fields))
    return records


def _files(audit: Path, pattern: str, ranks: Sequence[int] | None) -> list[Path]:
    folders = ["rank*"] if ranks is None else [f"rank{rank}" for rank in ranks]
    paths = sorted(path for folder in folders for path in audit.glob(f"{folder}/{pattern}"))
    if not paths:
        raise FileNotFoundError(f"no {pattern} below {audit}: was the engine started with the audit on?")
    return paths


def _load(path: Path) -> dict[str, Any]:
    with np.load(path) as archive:
        return {key: archive[key] if archive[key].ndim else archive[key].item() for key in archive}


class Reference:
    """KV rows by token prefix, from the records of an engine without DCP.

    columns: of its rows those that the judged ranks hold. Without DCP a row has all KV heads of a grouped-query model,
    and one DCP group holds some of them.

    Raises:
        ValueError: a record comes from a DCP engine or holds an unwritten row.
    """

    def __init__(self, records: Iterable[RequestRecord], columns: slice = slice(None)) -> None:
        self._known: list[tuple[np.ndarray, np.ndarray]] = []
        for record in records:
            if record.dcp_size != 1:
                raise ValueError(f"the reference must be a DCP1 engine, request {record.rid} has {record.dcp_size}")
            rows = record.rows[:, _stored_index(record, record.slots, record.slots), columns]
            if np.isnan(rows).any():
                raise ValueError(f"the reference itself read or kept unwritten KV rows in request {record.rid}")
            self._known.append((record.tokens, rows))

    def rows(self, tokens: np.ndarray) -> np.ndarray:
        """(layers, n, width): of the longest prefix of ``tokens`` that the reference computed, n tokens."""
        best, length = self._known[0][1], -1
        for known, rows in self._known:
            size = min(len(known), len(tokens))
            differs = np.flatnonzero(known[:size] != tokens[:size])
            common = int(differs[0]) if len(differs) else size
            if common > length:
                best, length = rows, common
        return best[:, :length]


@dataclass
class Report:
    """compared: rows set against the reference. mismatches: of them, wrong or NaN. unowned: rows that must be NaN.

    written: of them, not NaN. uncovered: owned rows without a reference (its tokens parted before). complaints: the
    first few findings in words.
    """

    compared: int = 0
    mismatches: int = 0
    max_abs_diff: float = 0.0
    unowned: int = 0
    written: int = 0
    uncovered: int = 0
    complaints: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.compared > 0 and not (self.mismatches or self.written or self.uncovered or self.complaints)

    def complain(self, message: str) -> None:
        if len(self.complaints) < _KEPT_COMPLAINTS:
            self.complaints.append(message)

    def __str__(self) -> str:
        head = (
            f"{self.compared} rows compared, {self.mismatches} wrong, largest difference {self.max_abs_diff:.2e}; "
            f"{self.unowned} rows must be unwritten, {self.written} are not; {self.uncovered} without a reference"
        )
        return "\n  ".join([head, *self.complaints])


def audit_requests(
    layout: DcpLayout, records: Sequence[RequestRecord], reference: Reference, tolerance: Tolerance = TOLERANCE
) -> Report:
    """Judge request records of one DCP engine, all ranks together.

    Raises:
        ValueError: the engine's dcp_size isn't the layout's, or a rank left no record.
    """
    report = Report()
    _check_ranks(layout, records)
    for record in records:
        name = f"request {record.rid[:8]}"
        index = _stored_index(record, record.slots, layout.local_index(record.slots))
        used = _compare(report, layout, record, name, record.tokens, record.slots, index, reference, tolerance)
        unowned = np.ones(record.rows.shape[1], bool)
        unowned[used] = False
        _expect_unwritten(report, record, name, unowned)
    return report


def audit_pools(
    layout: DcpLayout, records: Sequence[PoolRecord], reference: Reference, tolerance: Tolerance = TOLERANCE
) -> Report:
    """Judge whole-pool records of one idle DCP engine, all ranks together. Raises as :func:`audit_requests`."""
    report = Report()
    _check_ranks(layout, records)
    for record in records:
        in_use = np.ones(record.rows.shape[1] // record.page_rows, bool)
        in_use[record.free_pages] = False
        in_use[0] = False
        unowned = np.ones(record.rows.shape[1], bool)
        unowned[: record.page_rows] = False
        for tokens, slot_list in record.cached:
            name, slots = f"cached sequence of {len(tokens)} tokens", np.array(slot_list)
            index = layout.local_index(slots)
            used = _compare(report, layout, record, name, np.array(tokens), slots, index, reference, tolerance)
            unowned[used] = False
            in_use[slots // record.page_slots] = False
        _expect_unwritten(report, record, "the pool", unowned)
        if in_use.any():
            report.complain(f"rank {record.dcp_rank}: pages in use by nobody: {np.flatnonzero(in_use)[:8].tolist()}")
    return report


def _check_ranks(layout: DcpLayout, records: Sequence[RequestRecord | PoolRecord]) -> None:
    sizes, ranks = {r.dcp_size for r in records}, {r.dcp_rank for r in records}
    if sizes != {layout.dcp_size}:
        raise ValueError(f"the records have dcp_size {sorted(sizes)}, the layout has {layout.dcp_size}")
    if ranks != set(range(layout.dcp_size)):
        raise ValueError(f"records of ranks {sorted(ranks)} of {layout.dcp_size}: some rank left none")


def _stored_index(record: RequestRecord, slots: np.ndarray, pool_rows: np.ndarray) -> np.ndarray:
    """Index into ``record.rows`` of pool rows: the record holds the pages in ``pages`` one after another."""
    page = slots // record.page_slots
    return np.searchsorted(record.pages, page) * record.page_rows + (pool_rows - page * record.page_rows)


def _compare(
    report: Report,
    layout: DcpLayout,
    record: RequestRecord | PoolRecord,
    name: str,
    tokens: np.ndarray,
    slots: np.ndarray,
    index: np.ndarray,
    reference: Reference,
    tolerance: Tolerance,
) -> np.ndarray:
    """Compare the rows that ``record``'s rank owns; returns their indices into ``record.rows``."""
    owned = np.flatnonzero(layout.owner(slots) == record.dcp_rank)
    if not np.array_equal(slots % record.page_slots, np.arange(len(slots)) % record.page_slots):
        report.complain(f"{name}: its slots don't run through their virtual pages in order")
    if len(owned) and not (index[owned].min() >= 0 and index[owned].max() < record.rows.shape[1]):
        report.complain(f"{name}: the layout's rows leave its pages of {record.page_rows} rows")
        report.mismatches += len(owned)
        return owned[:0]
    expected = reference.rows(tokens)
    known = owned[owned < expected.shape[1]]
    gap = np.abs(record.rows[:, index[known]] - expected[:, known])
    allowed = tolerance(expected[:, known]) if callable(tolerance) else tolerance
    wrong = ~(gap <= allowed).all(axis=(0, 2))  # NaN is wrong
    difference = gap.max(axis=(0, 2), initial=0.0)
    report.compared += len(known)
    report.uncovered += len(owned) - len(known)
    report.mismatches += int(wrong.sum())
    report.max_abs_diff = max(report.max_abs_diff, float(np.nanmax(difference, initial=0.0)))
    for position in known[wrong][:2]:
        row = record.rows[:, index[position]]
        state = "was never written" if np.isnan(row).any() else f"differs by {difference[known == position][0]:.2g}"
        report.complain(f"{name}, rank {record.dcp_rank}: the row of position {position} {state}")
    return index[owned]


def _expect_unwritten(report: Report, record: RequestRecord | PoolRecord, name: str, unowned: np.ndarray) -> None:
    rows = np.flatnonzero(unowned)
    written = rows[~np.isnan(record.rows[:, rows]).all(axis=(0, 2))]
    report.unowned += len(rows)
    report.written += len(written)
    if len(written):
        report.complain(f"{name}, rank {record.dcp_rank}: rows written though unowned: {written[:8].tolist()}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Judge the KV rows recorded by an engine against a DCP1 engine's.")
    parser.add_argument("reference", type=Path)
    parser.add_argument("audit", type=Path)
    parser.add_argument("--block-size", type=int, default=1)
    parser.add_argument("--rotate", action="store_true", help="the engine ran with --dcp-rotate")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    options = parser.parse_args(arguments)
    reference, requests = Reference(load_requests(options.reference)), load_requests(options.audit)
    layout = DcpLayout(requests[0].dcp_size, options.block_size)
    if options.rotate:
        layout = layout.rotated(requests[0].page_rows)
    reports = {
        "requests": audit_requests(layout, requests, reference, options.tolerance),
        "pools": audit_pools(layout, load_pools(options.audit), reference, options.tolerance),
    }
    for name, report in reports.items():
        print(f"{name}: {'ok' if report.ok else 'WRONG'}: {report}")
    return 0 if all(report.ok for report in reports.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
