"""What a transfer of KV costs: segments from plan.py, seconds per segment and byte fitted to committed measurements.

Imported by simulate.py. ``fit`` finds two costs from measured sends (benchmark/transfer.py on CPUs, the two-GPU run),
``validate`` predicts the points that it was not fitted on, and ``links`` gives the transports that a simulation uses.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.placement import page_order, whole_pages
from sglang_dcp_block.disaggregation.plan import Segments, Side, plan_pair

RESULTS = Path(__file__).parent / "results"
ROW_BYTES = 1152
LAYERS = 61
PAGE = 64
#: Mooncake's RDMA transport cuts a segment into work requests of 64 KiB; a rest of up to 16 KiB joins the last one.
SLICE_BYTES, SLICE_REST = 65_536, 16_384


# -- what is sent ------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """How KV reaches a decode rank. packed: token round-robin through a pack buffer (block_size 1)."""

    name: str
    block_size: int
    packed: bool = False

    @property
    def page_size(self) -> int:
        return max(PAGE, self.block_size)


WAYS = (
    Way("token", 1),
    Way("packed", 1, packed=True),
    *(Way(f"block {b}", b) for b in (16, 64, 256, 1024)),
)


class Share(NamedTuple):
    """One rank's part of a chunk, in one layer. descriptors: RDMA work requests."""

    rows: int
    segments: int
    descriptors: int


def descriptors_of(segments: Segments) -> int:
    """RDMA work requests of one layer's segments."""
    whole, rest = np.divmod(segments.n_rows * ROW_BYTES, SLICE_BYTES)
    return int(np.maximum(whole + (rest > SLICE_REST), 1).sum())


def segments_of(
    way: Way, page_size: int, ranks: int, rank: int, start: int, length: int, src: np.ndarray, dst: np.ndarray
) -> Segments:
    """The plan of one send. src, dst: page ids. A packed send starts from the pack buffer, in the rank's own order."""
    layout = DcpLayout(ranks, way.block_size)
    source = Side(layout, rank, page_size, src) if way.packed else Side(DcpLayout(1), 0, page_size, src)
    return plan_pair(source, Side(layout, rank, page_size, dst), start, length)


@cache
def _shares(way: Way, ranks: int, start: int, length: int, fresh: bool) -> tuple[Share, ...]:
    # Falling ids: no two pages adjoin, as in a pool long in use, so no two runs merge.
    rising = np.arange((start + length) // way.page_size + 1)
    pages = rising if fresh else rising[::-1]
    source = rising if way.packed else _placed(way, ranks, start, length) if fresh else pages
    found = [segments_of(way, way.page_size, ranks, rank, start, length, source, pages) for rank in range(ranks)]
    return tuple(Share(s.total_rows, s.n_rows.size, descriptors_of(s) if s.n_rows.size else 0) for s in found)


def _placed(way: Way, ranks: int, start: int, length: int) -> np.ndarray:
    """Prefill's pages from adjoining free ones, in the order of decode's ranks where that joins blocks."""
    layout, begun = DcpLayout(ranks, way.block_size), -(-start // way.page_size)
    if not whole_pages(layout, way.page_size):
        return np.arange((start + length) // way.page_size + 1)
    order = page_order(layout, way.page_size, np.array([start]), np.array([start + length]))
    return np.r_[np.arange(begun), begun + order]


def shares(way: Way, ranks: int, start: int, length: int, fresh: bool = False) -> tuple[Share, ...]:
    """Every rank's part of [start, start + length). A plan doesn't change when it moves by whole virtual pages.

    fresh: a request's pages adjoin on both sides, as in pools that nobody has used yet.
    """
    virtual = DcpLayout(ranks, way.block_size).virtual_page_size(way.page_size)
    return _shares(way, ranks, start % virtual, length, fresh)


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """Seconds of a send: descriptors * per_descriptor + bytes * per_byte, after planning and packing.

    sliced: descriptors are RDMA work requests, else segments. source: where the constants come from.
    """

    name: str
    per_descriptor: float
    per_byte: float
    sliced: bool
    pack_start: float
    pack_per_byte: float
    plan_per_segment: tuple[tuple[str, float], ...]
    source: str

    def descriptors(self, share: Share) -> int:
        return LAYERS * (share.descriptors if self.sliced else share.segments)

    def wire(self, share: Share) -> float:
        return share.rows * ROW_BYTES * LAYERS * self.per_byte

    def planning(self, way: Way, share: Share) -> float:
        kind = "block" if way.block_size > 1 else way.name
        return dict(self.plan_per_segment)[kind] * share.segments * LAYERS

    def local(self, way: Way, share: Share) -> float:
        """What the sender does before the first byte leaves: planning, and packing if the way packs."""
        packing = self.pack_start + share.rows * ROW_BYTES * LAYERS * self.pack_per_byte
        return self.planning(way, share) + (packing if way.packed else 0.0)

    def send(self, share: Share) -> float:
        return self.descriptors(share) * self.per_descriptor + self.wire(share)


class Point(NamedTuple):
    """A measured send: counts over all layers, seconds without planning, and seconds of packing in it."""

    group: str
    segments: float
    bytes: float
    seconds: float
    pack_seconds: float
    label: str


def fit(points: Iterable[Point]) -> tuple[float, float]:
    """Seconds per segment and per byte that minimise the relative error.

    Raises:
        ValueError: the points want a negative cost.
    """
    rows = [(p.segments, p.bytes, p.seconds - p.pack_seconds) for p in points]
    x = np.array([(s / t, b / t) for s, b, t in rows])
    cost = np.linalg.lstsq(x, np.ones(len(rows)), rcond=None)[0]
    if (cost <= 0).any():
        raise ValueError(f"the measurements want a negative cost: {cost}")
    return float(cost[0]), float(cost[1])


def fit_line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Start and slope of y over x, by relative error."""
    matrix = np.array([(1 / b, a / b) for a, b in zip(x, y, strict=True)])
    start, slope = np.linalg.lstsq(matrix, np.ones(len(x)), rcond=None)[0]
    return float(start), float(slope)


def predict(cost: tuple[float, float], point: Point) -> float:
    return cost[0] * point.segments + cost[1] * point.bytes + point.pack_seconds


def cpu_points(file: Path = RESULTS / "transfer_cpu.json") -> list[Point]:
    """benchmark/transfer.py's cells. Segments are planned anew with the page lists that it used."""
    points = []
    for row in json.loads(file.read_text())["rows"]:
        name = row["variant"]
        block = int(name.split()[1]) if name.startswith("block") else 1
        way, n, p = Way(name, block, name == "packed"), row["tokens"], row["dcp_size"]
        page_size = block if block > 1 else PAGE
        layout, rng = DcpLayout(p, block), np.random.default_rng(0)
        src = rng.permutation(-(-n // page_size))
        dst = rng.permutation(-(-n // layout.virtual_page_size(page_size)))
        found = segments_of(way, page_size, p, 0, 0, n, np.arange(src.size) if way.packed else src, dst)
        size = layout.local_len(n, 0) * row["layers"] * ROW_BYTES
        label = f"{n} tokens, P={p}, {row['layers']} layers"
        seconds = row["bytes"] / row["gbps"] / 1e9
        points.append(Point(name, found.n_rows.size * row["layers"], size, seconds, row["pack_s"], label))
    return points


def h200_points(file: Path = RESULTS / "h200x2_pd.json") -> list[Point]:
    """A two-GPU run: medians per prompt, both decode ranks. transfer_s holds no packing there."""
    points = []
    for pair, found in json.loads(file.read_text())["found"]["pairs"].items():
        costs = found["costs"]
        for prompt in sorted({c["prompt"] for c in costs}):
            mine = [c for c in costs if c["prompt"] == prompt]
            s, b, t = (statistics.median(c[k] for c in mine) for k in ("segments", "kv_bytes", "transfer_s"))
            name = "packed" if pair == "stock" else pair.replace("block", "block ")
            points.append(Point(name, s, b, t, 0.0, f"{prompt} tokens"))
    return points


#: Sends of the 128K prompt ran beside forwards of later chunks, which the fit leaves out and docs/scale.md discusses.
H200_FITTED = ("1000 tokens", "8192 tokens", "32768 tokens")


_KINDS = ("token", "packed", "block")


def planning_costs(file: Path = RESULTS / "transfer_cpu.json") -> tuple[tuple[str, float], ...]:
    """Measured seconds of planning per segment: median over the cells of 61 layers and 16,384 tokens or more."""
    rows = [r for r in json.loads(file.read_text())["rows"] if r["layers"] == 61 and r["tokens"] >= 16_384]
    kinds = {k: [r["plan_s"] / r["segments"] for r in rows if r["variant"].split()[0] == k] for k in _KINDS}
    return tuple((k, statistics.median(v)) for k, v in kinds.items())


def pack_costs(file: Path = RESULTS / "h200x2_pd.json") -> tuple[float, float]:
    """Seconds to start a pack, and per byte: the pack kernel of the two-GPU run, 8,192 tokens and more."""
    costs = [c for c in json.loads(file.read_text())["found"]["pairs"]["stock"]["costs"] if c["prompt"] >= 8192]
    calls = [c["batches"] for c in costs]
    return fit_line(
        [c["kv_bytes"] / n for c, n in zip(costs, calls, strict=True)],
        [c["pack_s"] / n for c, n in zip(costs, calls, strict=True)],
    )


def links() -> dict[str, Link]:
    """TCP as measured between two H200; 400 Gb/s RDMA with assumed costs of a work request, once without planning."""
    per_segment, per_byte = fit(p for p in h200_points() if p.label in H200_FITTED)
    pack_start, pack_per_byte = pack_costs()
    common = {"pack_start": pack_start, "pack_per_byte": pack_per_byte, "plan_per_segment": planning_costs()}
    found = [Link("tcp", per_segment, per_byte, False, source="fitted to h200x2_pd.json", **common)]
    source = "400 Gb/s ConnectX-7; the cost of a work request is assumed"
    for micros in (0.1, 1.0, 3.0):
        found.append(Link(f"rdma {micros:g} us", micros * 1e-6, 8 / 400e9, True, source=source, **common))
    free = tuple((kind, 0.0) for kind in _KINDS)
    found.append(replace(found[2], name="rdma 1 us, planning free", plan_per_segment=free))
    return {link.name: link for link in found}


def validate() -> dict[str, Any]:
    """Fit on some measured points, predict the others: predicted over measured seconds, by group."""
    cpu, h200 = cpu_points(), h200_points()
    fitted_on = ("token", "block 64")
    cost = fit(p for p in cpu if p.group in fitted_on)
    report: dict[str, Any] = {"cpu": {"fitted_on": fitted_on, "per_segment": cost[0], "per_byte": cost[1]}}
    report["cpu"]["predicted"] = {
        g: ratios([predict(cost, p) / p.seconds for p in cpu if p.group == g])
        for g in dict.fromkeys(p.group for p in cpu)
        if g not in fitted_on
    }
    ends = (H200_FITTED[0], H200_FITTED[-1])
    cost = fit(p for p in h200 if p.label in ends)
    report["h200"] = {"fitted_on": ends, "per_segment": cost[0], "per_byte": cost[1]}
    report["h200"]["predicted"] = {
        f"{p.group}, {p.label}": predict(cost, p) / p.seconds for p in h200 if p.label not in ends
    }
    # A later run with the costs that links() takes from the first: packed again, and blocks of 256, new to the fit.
    cost = fit(p for p in h200 if p.label in H200_FITTED)
    report["h200, later run"] = {"fitted_on": ("the earlier run",), "per_segment": cost[0], "per_byte": cost[1]}
    report["h200, later run"]["predicted"] = {
        f"{p.group}, {p.label}": predict(cost, p) / p.seconds for p in h200_points(RESULTS / "h200x2_blocks256_pd.json")
    }
    return report


def ratios(values: list[float]) -> dict[str, float]:
    within = float(np.mean([0.5 <= v <= 2 for v in values]))
    return {"median": statistics.median(values), "low": min(values), "high": max(values), "within_2x": within}
