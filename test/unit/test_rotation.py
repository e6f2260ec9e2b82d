"""What docs/rotation.md claims of a rotated start: a pure rule of the slot, even ranks, and where it breaks.

Owners are dealt out block after block like cards, from the page's first rank on; rows are counted slot by slot on
SGLang's own allocator.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from math import log, sqrt
from pathlib import Path

import numpy as np
import pytest

from sglang_dcp_block.dcp.layout import DcpLayout

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import rotation as rot  # noqa: E402

COMMITTED = json.loads((ROOT / "benchmark/results/rotation.json").read_text())
SHAPES = [(p, b, s) for p, b, s in product((2, 4, 8), (1, 4, 16), (16,))]
SMALL = rot.Load("small", requests=60, median=40, answer=20, steps=50, every=10)


def dealt(ranks: int, block: int, tokens: int, first: int) -> list[int]:
    """Ranks of a page's tokens, block after block from rank ``first``."""
    found, turn = [], first
    while len(found) < tokens:
        found += [turn] * block
        turn = 0 if turn + 1 == ranks else turn + 1
    return found


@pytest.mark.parametrize(("ranks", "block", "page_size"), SHAPES)
def test_each_page_is_dealt_out_from_its_own_rank(ranks, block, page_size):
    layout = DcpLayout(ranks, block)
    size = layout.virtual_page_size(page_size)
    for page in (0, 1, ranks - 1, ranks, 5 * ranks + 3):
        slots = np.arange(page * size, (page + 1) * size)
        owners = rot.rotated_owner(layout, page_size, slots)
        first = int(rot.mixed_shift(layout, np.array([page]))[0])
        assert owners.tolist() == dealt(ranks, block, size, first)
        # Rows are those without rotation, and no two slots share one.
        places = set(zip(owners.tolist(), layout.local_index(slots).tolist(), strict=True))
        rows = range(page * page_size, (page + 1) * page_size)
        assert places == set(product(range(ranks), rows))
        assert (owners.tolist() == layout.owner(slots).tolist()) == (first == 0), "control: it does rotate"


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize(("ranks", "block"), [(2, 16), (4, 4), (8, 16)])
def test_rows_of_the_last_page_s_shift_are_those_of_every_slot(ranks, block, shared):
    """A request's rows on a rank need its length and one page id, with or without a prefix of shared pages."""
    layout, page_size = DcpLayout(ranks, block), 16
    running = rot.Running(layout, page_size, replace(SMALL, shared_pages=shared), seed=1)
    seen = 0
    for lengths, _, last in rot.samples(running):
        counted = np.zeros(ranks, np.int64)
        for i, n in enumerate(lengths.tolist()):
            owners = rot.rotated_owner(layout, page_size, running.table[i, :n].numpy())
            counted += np.bincount(owners, minlength=ranks)
        assert counted.tolist() == rot.rows_per_rank(layout, lengths, rot.mixed_shift(layout, last)).tolist()
        wrong = rot.rows_per_rank(layout, lengths, rot.mixed_shift(layout, last) + 1)
        assert counted.tolist() != wrong.tolist(), "control: another shift"
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
    layout, ends = DcpLayout(ranks, 16), np.arange(1, 4097)
    uneven = {}
    for shift in (rot.mixed_shift, rot.page_shift):
        counts = {k: np.bincount(shift(layout, k * ends), minlength=ranks) for k in range(1, 6 * ranks + 1)}
        uneven[shift] = [k for k, count in counts.items() if count.max() > 1.01 * count.mean()]
    assert uneven[rot.mixed_shift] == [2 * ranks, 4 * ranks, 6 * ranks]
    assert uneven[rot.page_shift] == list(range(2, 6 * ranks + 1, 2))


def test_copies_of_a_page_don_t_stay_on_their_rank():
    """Rank-to-rank transfers, retraction and host tiers put a page's rows into another page: mostly on another rank."""
    layout, page_size = DcpLayout(8, 16), 16
    size = layout.virtual_page_size(page_size)
    stays = 0
    for source, target in product(range(64), range(64)):
        before, after = (
            int(rot.rotated_owner(layout, page_size, np.array([page * size]))[0]) for page in (source, target)
        )
        shifts = [int(rot.mixed_shift(layout, np.array([page]))[0]) for page in (source, target)]
        assert layout.owner((before + 8 - shifts[0] + shifts[1]) * layout.block_size) == after
        stays += before == after
    assert stays == 64 * 64 // 8


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
