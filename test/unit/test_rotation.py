"""What docs/rotation.md claims of a rotated start: even ranks, and where the rule breaks.

Rows are counted slot by slot on SGLang's own allocator. test_rotated_layout.py has the rule itself.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest

from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import rotation as rot  # noqa: E402

COMMITTED = json.loads((ROOT / "benchmark/results/rotation.json").read_text())
SMALL = rot.Load("small", requests=60, median=40, answer=20, steps=50, every=10)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(("ranks", "block"), [(2, 16), (4, 4), (8, 16)])
def test_rows_of_the_last_page_s_shift_are_those_of_every_slot(ranks, block, shared):
    """A request's rows on a rank need its length and one page id, with or without a prefix of shared pages."""
    layout, page_size = DcpLayout(ranks, block).rotated(16), 16
    running = rot.Running(layout, page_size, replace(SMALL, shared_pages=shared), seed=1)
    seen = 0
    for lengths, _, last in rot.samples(running):
        counted = np.zeros(ranks, np.int64)
        for i, n in enumerate(lengths.tolist()):
            counted += np.bincount(layout.owner(running.table[i, :n].numpy()), minlength=ranks)
        assert counted.tolist() == rot.rows_per_rank(layout, lengths, last).tolist()
        wrong = rot.rows_per_rank(layout, lengths, last + layout.page_slots)
        assert counted.tolist() != wrong.tolist(), "control: another page"
        seen += 1
    assert seen == 2


def test_the_allocator_hands_out_no_slot_twice():
    """The counts mean something only if requests don't share slots, before and after requests have left."""
    running = rot.Running(DcpLayout(4, 16), 16, SMALL, seed=2)
    for lengths, _, _ in rot.samples(running):
        slots = np.concatenate([running.table[i, :n].numpy() for i, n in enumerate(lengths.tolist())])
        assert len(np.unique(slots)) == lengths.sum()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_last_pages_at_equal_distances_start_everywhere(ranks):
    """In an unused pool, but for steps of 2P pages; ``id % P`` alone fails at steps that share a factor with P."""
    layout, ends = DcpLayout(ranks, 16).rotated(16), np.arange(1, 4097)
    uneven = {}
    for one in (layout, rot.ByIdAlone(**vars(layout))):
        counts = {k: np.bincount(one.shift(k * ends), minlength=ranks) for k in range(1, 6 * ranks + 1)}
        uneven[type(one)] = [k for k, count in counts.items() if count.max() > 1.01 * count.mean()]
    assert uneven[RotatedLayout] == [2 * ranks, 4 * ranks, 6 * ranks]
    assert uneven[rot.ByIdAlone] == list(range(2, 6 * ranks + 1, 2))


def test_copies_of_a_page_don_t_stay_on_their_rank():
    """Rank-to-rank transfers, retraction and host tiers put a page's rows into another page: mostly on another rank."""
    layout = DcpLayout(8, 16).rotated(16)
    owners = [layout.owner(np.arange(p * layout.page_slots, (p + 1) * layout.page_slots)) for p in range(64)]
    stays = [np.array_equal(before, after) for before, after in product(owners, owners)]
    assert sum(stays) == len(stays) // 8


def lines(load: str, rule: str) -> list[dict]:
    return [x for x in COMMITTED["lines"] if x["load"] == load and x["rule"] == rule]


def test_committed_skew():
    """Rotated, the fullest of 8 ranks is within 7% of the mean; not rotated, B=64 is 40% and B=256 280% above it."""
    for load in ("short prompts", "short prompts after a shared one"):
        rotated = lines(load, "each page, mixed")
        assert len(rotated) == 9 and all(x["worst"] < 1.07 for x in rotated)
    plain = {(x["dcp_size"], x["block_size"]): x["max_over_mean"] for x in lines("short prompts", "none")}
    assert plain[8, 64] > 1.4 and plain[8, 256] > 3.8 and plain[8, 16] < 1.12
    assert all(x["worst"] < 1.002 for x in COMMITTED["lines"] if "unused" in x["load"] and "mixed" in x["rule"])
    assert any(x["worst"] >= 1.2 for x in COMMITTED["lines"] if "unused" in x["load"] and x["rule"] == "each page")
    after = {rule: lines("short prompts after a shared one", rule) for rule in ("none", "first page")}
    assert [x["worst"] for x in after["none"]] == [x["worst"] for x in after["first page"]]


def test_committed_skew_keeps_the_bound():
    """Hoeffding, if shifts don't depend on lengths: B sqrt(n ln(100 P) / 2) rows above the mean in 1 case of 100."""
    for x in lines("short prompts", "each page, mixed") + lines("short prompts after a shared one", "each page, mixed"):
        mean = sum(x["rows"]) / x["dcp_size"]
        bound = x["block_size"] * sqrt(1000 * log(100 * x["dcp_size"]) / 2)
        assert (x["worst"] - 1) * mean < bound
    x = lines("short prompts", "none")[-1]
    mean = sum(x["rows"]) / x["dcp_size"]
    assert (x["worst"] - 1) * mean > x["block_size"] * sqrt(1000 * log(100 * x["dcp_size"]) / 2), "control: no rotation"


def test_committed_lines_are_this_code_s():
    load = rot.loads(8)[2]
    fresh = rot.measure(8, (16, 64), 64, load, COMMITTED["seed"])
    committed = [
        x for x in COMMITTED["lines"] if x["load"] == load.name and x["dcp_size"] == 8 and x["page_size"] == 64
    ]
    assert fresh == committed
