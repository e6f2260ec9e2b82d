"""DcpLayout against the simulation, against SGLang's own formulas, and against rules that are wrong on purpose."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from brute_force import BLOCKS, SIZES, between, deal, edge_lengths
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp.layout import DcpLayout

CELLS = [(p, b) for p in SIZES for b in BLOCKS]
KINDS = {
    "numpy int32": lambda x: np.asarray(x, np.int32),
    "numpy int64": lambda x: np.asarray(x, np.int64),
    "torch int32": lambda x: torch.tensor(np.asarray(x), dtype=torch.int32),
    "torch int64": lambda x: torch.tensor(np.asarray(x), dtype=torch.int64),
}


def disagreements(layout: DcpLayout) -> set[str]:
    """Names of the quantities in which ``layout`` differs from the simulation."""
    ranks, block = layout.dcp_size, layout.block_size
    n = 2 * layout.cycle + block + 2
    dealt = deal(n, ranks, block)
    t = np.arange(n)
    wrong = set()
    if not np.array_equal(layout.owner(t), dealt.owner):
        wrong.add("owner")
    if not np.array_equal(layout.local_index(t), dealt.row):
        wrong.add("local_index")
    if not np.array_equal(layout.perm(t), [r * ranks + o for r, o in zip(dealt.row, dealt.owner, strict=True)]):
        wrong.add("perm")
    for rank, held in enumerate(dealt.held):
        if not np.array_equal(layout.position(np.arange(len(held)), rank), held):
            wrong.add("position")
        if not np.array_equal(layout.local_len(t, rank), np.searchsorted(held, t)):
            wrong.add("local_len")
        for start in edge_lengths(ranks, block):
            for length in (0, 1, block, layout.cycle):
                if start + length > n:
                    continue
                mine = between(dealt, rank, start, length)
                if layout.interval_len(start, length, rank) != len(mine):
                    wrong.add("interval_len")
                runs = layout.owned_intervals(start, length, rank)
                tokens = [int(p) + k for p, c in zip(runs.position, runs.length, strict=True) for k in range(c)]
                rows = [int(j) + k for j, c in zip(runs.row, runs.length, strict=True) for k in range(c)]
                if tokens != mine or rows != [int(dealt.row[p]) for p in mine]:
                    wrong.add("owned_intervals")
    return wrong


@pytest.mark.parametrize(("ranks", "block"), CELLS)
def test_every_quantity_is_what_dealing_one_by_one_gives(ranks, block):
    assert disagreements(DcpLayout(ranks, block)) == set()


# -- controls: each wrong rule must be noticed -------------------------------------------------------------------


@dataclass(frozen=True)
class NextRank(DcpLayout):
    def owner(self, position):
        return (super().owner(position) + 1) % self.dcp_size


@dataclass(frozen=True)
class NextRow(DcpLayout):
    def local_index(self, position):
        return super().local_index(position) + 1


@dataclass(frozen=True)
class SwappedBlocks(DcpLayout):
    """Rows right, but a rank's blocks 0 and 1 have changed places."""

    def position(self, row, rank):
        block = row // self.block_size
        swapped = np.where(block < 2, 1 - block, block)
        return super().position(swapped * self.block_size + row % self.block_size, rank)


@dataclass(frozen=True)
class EvenLengths(DcpLayout):
    """Ranks share a length as evenly as token round-robin does."""

    def local_len(self, length, rank):
        return (length + self.dcp_size - 1 - rank) // self.dcp_size


@pytest.mark.parametrize(
    ("wrong_rule", "noticed"),
    [
        (NextRank, {"owner", "perm"}),
        (NextRow, {"local_index", "perm"}),
        (SwappedBlocks, {"position", "owned_intervals"}),
        (EvenLengths, {"local_len", "interval_len", "owned_intervals"}),
    ],
)
@pytest.mark.parametrize(("ranks", "block"), [(2, 2), (4, 16), (8, 64)])
def test_a_wrong_rule_is_noticed(wrong_rule, noticed, ranks, block):
    assert disagreements(wrong_rule(ranks, block)) == noticed


# -- the same answers for every kind of argument -------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "block"), [(1, 1), (3, 2), (8, 64)])
def test_arrays_and_tensors_keep_their_kind(kind, ranks, block):
    layout, make = DcpLayout(ranks, block), KINDS[kind]
    x = list(range(2 * layout.cycle + 1))
    rank = ranks - 1
    for f in (
        layout.owner,
        layout.local_index,
        layout.perm,
        lambda v: layout.position(v, rank),
        lambda v: layout.local_len(v, rank),
        lambda v: layout.interval_len(v, v, rank),
    ):
        got = f(make(x))
        assert type(got) is type(make(x)) and got.dtype == make(x).dtype
        assert got.tolist() == [f(v) for v in x]
        assert all(type(f(v)) is int for v in x[:3])


def test_no_value_is_read_from_a_tensor():
    """Meta tensors have no values, so a read would raise: on a GPU it would make the host wait."""
    layout, t = DcpLayout(4, 16), torch.empty(5, dtype=torch.int32, device="meta")
    for got in (layout.owner(t), layout.local_index(t), layout.perm(t), layout.position(t, 3), layout.local_len(t, 3)):
        assert got.shape == t.shape and got.dtype == t.dtype


def test_local_len_in_place_keeps_the_address():
    lengths = torch.tensor([0, 1, 64, 65, 511, 512, 513], dtype=torch.int32)
    address, before = lengths.data_ptr(), lengths.tolist()
    layout = DcpLayout(8, 64)
    assert layout.local_len_(lengths, 1) is lengths and lengths.data_ptr() == address
    assert lengths.tolist() == [len(between(deal(600, 8, 64), 1, 0, n)) for n in before]


# -- properties ----------------------------------------------------------------------------------------------------

cells = st.tuples(st.integers(1, 9), st.integers(1, 130))


@given(cells, st.integers(0, 2**40))
def test_position_undoes_local_index(cell, t):
    layout = DcpLayout(*cell)
    assert layout.position(layout.local_index(t), layout.owner(t)) == t


@given(cells, st.integers(0, 2**31), st.integers(0, 2**31))
def test_ranks_share_an_interval_without_rest_and_differ_by_at_most_one_block(cell, start, length):
    layout = DcpLayout(*cell)
    shares = [layout.interval_len(start, length, r) for r in range(layout.dcp_size)]
    assert sum(shares) == length and min(shares) >= 0
    from_zero = [layout.local_len(length, r) for r in range(layout.dcp_size)]
    assert from_zero == sorted(from_zero, reverse=True) and from_zero[0] - from_zero[-1] <= layout.block_size


@given(cells, st.integers(0, 300), st.integers(0, 700))
def test_owned_intervals_cut_anywhere(cell, start, length):
    layout = DcpLayout(*cell)
    dealt = deal(1000, *cell)
    for rank in range(layout.dcp_size):
        runs = layout.owned_intervals(start, length, rank)
        tokens = [int(p) + k for p, c in zip(runs.position, runs.length, strict=True) for k in range(c)]
        assert tokens == between(dealt, rank, start, length)
        assert all(c >= 1 and (c <= layout.block_size or layout.dcp_size == 1) for c in runs.length)


@pytest.mark.parametrize(("ranks", "block"), CELLS)
def test_perm_is_a_bijection_inside_each_cycle_and_token_round_robin_reads_it_right(ranks, block):
    layout = DcpLayout(ranks, block)
    dealt = deal(3 * layout.cycle, ranks, block)
    image = layout.perm(np.arange(3 * layout.cycle)).reshape(3, layout.cycle)
    for k in range(3):
        assert sorted(image[k]) == list(range(k * layout.cycle, (k + 1) * layout.cycle))
    assert np.array_equal(image.ravel() % ranks, dealt.owner)
    assert np.array_equal(image.ravel() // ranks, dealt.row)


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize(("ranks", "block"), [(2, 1), (3, 2), (2, 16), (8, 64), (4, 128)])
def test_slots_of_any_virtual_page_obey_the_rule_of_positions(ranks, block, page_size):
    """A request on scattered virtual pages: the owner by slot is the owner by position, and no two share a row."""
    layout = DcpLayout(ranks, block)
    size = layout.virtual_page_size(page_size)
    assert size % layout.cycle == 0 and size % page_size == 0
    assert layout.rows_per_virtual_page(page_size) * ranks == size
    position = np.arange(3 * size)
    slot = np.repeat([5, 1, 4], size) * size + np.tile(np.arange(size), 3)
    assert np.array_equal(slot % size, position % size)
    dealt = deal(6 * size, ranks, block)
    assert np.array_equal(dealt.owner[slot], dealt.owner[position])
    assert np.array_equal(layout.owner(slot), dealt.owner[position])
    assert np.array_equal(layout.local_index(slot), dealt.row[slot])
    for rank in range(ranks):
        rows = layout.local_index(slot[dealt.owner[position] == rank])
        assert sorted(rows) == sorted(
            page * layout.rows_per_virtual_page(page_size) + k
            for page in (1, 4, 5)
            for k in range(layout.rows_per_virtual_page(page_size))
        )


def test_a_page_that_is_no_whole_number_of_cycles_breaks_the_rule():
    """Control for the test above: with pages of P * page_size slots only and B = 2 * page_size, owners differ."""
    size, dealt = 2 * 16, deal(400, 2, 32)
    slot = np.repeat([5, 1, 4], size) * size + np.tile(np.arange(size), 3)
    assert not np.array_equal(dealt.owner[slot], dealt.owner[np.arange(3 * size)])


# -- SGLang's own formulas -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "block"), [c for c in CELLS if c[0] > 1])
def test_sglang_formulas_agree(ranks, block):
    """B = 1 is SGLang's default; B > 1 is the interleave_size it uses for whole pages on other devices."""
    from sglang.srt.layers.dcp.layout import get_dcp_lens, localize_dcp_indices

    interleave = {} if block == 1 else {"interleave_size": block}
    layout = DcpLayout(ranks, block)
    t = torch.arange(2 * layout.cycle + block + 2)
    for rank in range(ranks):
        assert torch.equal(layout.local_len(t, rank), get_dcp_lens(t, ranks, rank, **interleave))
        start = t + 3
        assert torch.equal(layout.interval_len(start, t, rank), get_dcp_lens(t, ranks, rank, start=start, **interleave))
        theirs = localize_dcp_indices(t, ranks, rank, **interleave)
        ours = torch.where(layout.owner(t) == rank, layout.local_index(t), -1)
        assert torch.equal(ours, theirs)
        if block > 1:
            assert not torch.equal(ours, localize_dcp_indices(t, ranks, rank))


# -- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", True, None])
def test_sizes_must_be_positive_integers(bad):
    for sizes, name in (((bad, 1), "dcp_size"), ((1, bad), "block_size")):
        with pytest.raises(ValueError) as error:
            DcpLayout(*sizes)
        assert name in str(error.value) and repr(bad) in str(error.value)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda x: x.owner(-1), "position", "-1"),
        (lambda x: x.owner(1.5), "position", "1.5"),
        (lambda x: x.local_index(-7), "position", "-7"),
        (lambda x: x.position(-1, 0), "row", "-1"),
        (lambda x: x.position(0, 4), "rank", "4"),
        (lambda x: x.position(0, -2), "rank", "-2"),
        (lambda x: x.perm(-3), "position", "-3"),
        (lambda x: x.local_len(-5, 0), "length", "-5"),
        (lambda x: x.local_len(5, 9), "rank", "9"),
        (lambda x: x.interval_len(-1, 5, 0), "start", "-1"),
        (lambda x: x.interval_len(1, -5, 0), "length", "-5"),
        (lambda x: x.owned_intervals(-2, 5, 0), "start", "-2"),
        (lambda x: x.owned_intervals(2, 5, 4), "rank", "4"),
        (lambda x: x.rows_per_virtual_page(0), "page_size", "0"),
        (lambda x: x.virtual_page_size(-64), "page_size", "-64"),
    ],
)
def test_refusals_name_the_argument_and_its_value(call, name, value):
    with pytest.raises(ValueError) as error:
        call(DcpLayout(4, 16))
    assert name in str(error.value) and value in str(error.value)
