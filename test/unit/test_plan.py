"""The transfer plan against a token-by-token simulation of both servers, and against SGLang's own plan at B = 1.

The simulation knows nothing of segments: the prefill side writes each position's number into its slot, the decode side
allocates virtual pages and says, slot by slot, on which rank and row a position must arrive. Every owner, row and
cycle below comes from walking positions one at a time, not from the layout's closed formulas.
"""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.plan import Segments, addresses, plan_same_layout, plan_segments

EMPTY = -1  # a row that no token may reach


class Case(NamedTuple):
    """One send: positions [start, start + length) of a request whose first ``prefix`` tokens decode has already."""

    dcp_size: int
    block_size: int
    page_size: int
    prefix_pages: int  # virtual pages
    skip: int  # tokens between the prefix and this send
    length: int
    seed: int = 0

    @property
    def layout(self) -> DcpLayout:
        return DcpLayout(self.dcp_size, self.block_size)

    @property
    def prefix(self) -> int:
        return self.prefix_pages * self.layout.virtual_page_size(self.page_size)

    @property
    def start(self) -> int:
        return self.prefix + self.skip


def walk_owners(layout: DcpLayout, n: int) -> tuple[list[int], list[int]]:
    """Rank and row of positions 0 .. n-1, dealt out block after block like cards."""
    rank, row, dealt = [], [], [0] * layout.dcp_size
    turn = left = 0
    for _ in range(n):
        if left == layout.block_size:
            turn, left = (turn + 1) % len(dealt), 0
        rank.append(turn)
        row.append(dealt[turn])
        dealt[turn] += 1
        left += 1
    return rank, row


class Servers(NamedTuple):
    """Buffers of both sides: the entry at a row is the position stored there, EMPTY elsewhere."""

    src_pages: np.ndarray
    dst_pages: np.ndarray
    source: np.ndarray  # (rows,)
    expected: np.ndarray  # (ranks, rows): what the decode side must hold after the send


def simulate(case: Case) -> Servers:
    layout, ps, rng = case.layout, case.page_size, np.random.default_rng(case.seed)
    end = case.start + case.length
    rows_per_page = layout.rows_per_virtual_page(ps)
    first_page, last_page = case.start // ps, -(-end // ps)
    src_pages = rng.permutation(last_page - first_page + 3)[: last_page - first_page]
    source = np.full((last_page - first_page + 3) * ps, EMPTY)
    for t in range(case.start, end):
        source[src_pages[t // ps - first_page] * ps + t % ps] = t

    width = layout.virtual_page_size(ps)
    n_pages = max(0, -(-(end - case.prefix) // width))
    dst_pages = rng.permutation(n_pages + 3)[:n_pages]
    expected = np.full((layout.dcp_size, (n_pages + 3) * rows_per_page), EMPTY)
    rank, row = walk_owners(layout, end)
    prefix_rows = [rank[: case.prefix].count(r) for r in range(layout.dcp_size)]
    for t in range(case.start, end):
        page, offset = divmod(row[t] - prefix_rows[rank[t]], rows_per_page)
        expected[rank[t], dst_pages[page] * rows_per_page + offset] = t
    return Servers(src_pages, dst_pages, source, expected)


def deliver(segments: Segments, source: np.ndarray, rows: int) -> np.ndarray:
    """One rank's buffer after the copies; a row that two copies write, or a copy out of bounds, is an error."""
    out = np.full(rows, EMPTY)
    for src, dst, n in zip(*segments, strict=True):
        assert n >= 1 and src >= 0 and dst >= 0 and src + n <= source.size and dst + n <= rows
        assert (out[dst : dst + n] == EMPTY).all(), "two segments write one row"
        out[dst : dst + n] = source[src : src + n]
    return out


def plan(case: Case, servers: Servers, rank: int, layout: DcpLayout | None = None) -> Segments:
    return plan_segments(
        servers.src_pages,
        servers.dst_pages,
        page_size=case.page_size,
        layout=layout or case.layout,
        rank=rank,
        start=case.start,
        length=case.length,
        decode_prefix_len=case.prefix,
    )


def received(case: Case, servers: Servers, plans: list[Segments]) -> np.ndarray:
    return np.stack([deliver(p, servers.source, servers.expected.shape[1]) for p in plans])


def lengths(layout: DcpLayout) -> list[int]:
    b, c = layout.block_size, layout.cycle
    return sorted({n for n in (0, 1, 2, b - 1, b, b + 1, c - 1, c, c + 1, 2 * c + b + 3, 3 * c + 1) if n >= 0})


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("block_size", [1, 8, 16, 64, 128, 192])
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
def test_every_row_arrives_where_the_simulation_says(dcp_size, block_size, page_size):
    for n, length in enumerate(lengths(DcpLayout(dcp_size, block_size))):
        for skip in (0, page_size, 3 * page_size + 5):
            case = Case(dcp_size, block_size, page_size, n % 2, skip, length, seed=n)
            servers = simulate(case)
            plans = [plan(case, servers, r) for r in range(dcp_size)]
            np.testing.assert_array_equal(received(case, servers, plans), servers.expected)
            assert sum(p.total_rows for p in plans) == length


cases = st.builds(
    Case,
    dcp_size=st.integers(1, 8),
    block_size=st.integers(1, 40),
    page_size=st.sampled_from([1, 2, 3, 8, 16]),
    prefix_pages=st.integers(0, 2),
    skip=st.integers(0, 50),
    length=st.integers(0, 200),
    seed=st.integers(0, 9),
)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_any_layout_start_and_length(case):
    servers = simulate(case)
    plans = [plan(case, servers, r) for r in range(case.dcp_size)]
    np.testing.assert_array_equal(received(case, servers, plans), servers.expected)


@given(cases)
@settings(max_examples=100, deadline=None)
def test_segments_are_as_long_as_they_can_be(case):
    servers = simulate(case)
    for r in range(case.dcp_size):
        src, dst, n = plan(case, servers, r)
        follows = (src[1:] == src[:-1] + n[:-1]) & (dst[1:] == dst[:-1] + n[:-1])
        assert not follows.any()


@given(cases, st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_chunks_sent_one_after_another_equal_one_send(case, chunk):
    servers, ps = simulate(case), case.page_size
    out = np.full_like(servers.expected, EMPTY)
    for begin in range(case.start, case.start + case.length, chunk):
        n = min(chunk, case.start + case.length - begin)
        for r in range(case.dcp_size):
            part = plan_segments(
                servers.src_pages[begin // ps - case.start // ps :],
                servers.dst_pages,
                page_size=ps,
                layout=case.layout,
                rank=r,
                start=begin,
                length=n,
                decode_prefix_len=case.prefix,
            )
            got = deliver(part, servers.source, out.shape[1])
            out[r] = np.where(got == EMPTY, out[r], got)
    np.testing.assert_array_equal(out, servers.expected)


@given(cases)
@settings(max_examples=80, deadline=None)
def test_same_layout_moves_virtual_pages_verbatim(case):
    layout, ps, rng = case.layout, case.page_size, np.random.default_rng(case.seed)
    end, width, rows_per_page = case.start + case.length, layout.virtual_page_size(ps), layout.rows_per_virtual_page(ps)
    src_pages = rng.permutation(-(-end // width) + 2)
    dst_pages = rng.permutation(-(-end // width) + 2)
    rank, row = walk_owners(layout, end)
    for r in range(case.dcp_size):
        source = np.full(src_pages.size * rows_per_page, EMPTY)
        want = np.full(dst_pages.size * rows_per_page, EMPTY)
        prefix_rows = rank[: case.prefix].count(r)
        for t in range(case.start, end):
            if rank[t] == r:
                page, offset = divmod(row[t], rows_per_page)
                source[src_pages[page - case.start // width] * rows_per_page + offset] = t
                page, offset = divmod(row[t] - prefix_rows, rows_per_page)
                want[dst_pages[page] * rows_per_page + offset] = t
        segments = plan_same_layout(
            src_pages,
            dst_pages,
            page_size=ps,
            layout=layout,
            rank=r,
            start=case.start,
            length=case.length,
            decode_prefix_len=case.prefix,
        )
        np.testing.assert_array_equal(deliver(segments, source, want.size), want)


# -- against SGLang's plan ---------------------------------------------------------------------------------------


def expand(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination row of every token."""
    within = np.arange(segments.total_rows) - np.repeat(np.cumsum(segments.n_rows) - segments.n_rows, segments.n_rows)
    return np.repeat(segments.src_row, segments.n_rows) + within, np.repeat(segments.dst_row, segments.n_rows) + within


@given(
    dcp_size=st.integers(1, 8),
    page_size=st.sampled_from([1, 2, 16, 64]),
    page_offset=st.integers(0, 5),
    prefix_pages=st.integers(0, 3),
    length=st.integers(0, 300),
    seed=st.integers(0, 9),
)
@settings(max_examples=200, deadline=None)
def test_block_size_1_is_sglangs_plan(dcp_size, page_size, page_offset, prefix_pages, length, seed):
    from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan

    rng = np.random.default_rng(seed)
    src = rng.permutation(-(-length // page_size) + 2).astype(np.int32)
    dst = rng.permutation((page_offset * page_size + length) // (page_size * dcp_size) + 2).astype(np.int32)
    prefix = prefix_pages * page_size * dcp_size
    for rank in range(dcp_size):
        stock = build_dcp_token_transfer_plan(
            src,
            dst,
            physical_page_size=page_size,
            dcp_size=dcp_size,
            dcp_rank=rank,
            src_page_offset=page_offset,
            decode_prefix_len=prefix,
            num_kv_tokens=length,
        )
        ours = plan_segments(
            src,
            dst,
            page_size=page_size,
            layout=DcpLayout(dcp_size),
            rank=rank,
            start=prefix + page_offset * page_size,
            length=length,
            decode_prefix_len=prefix,
        )
        src_rows, dst_rows = expand(ours)
        np.testing.assert_array_equal(src_rows, stock.target_src_token_indices)
        np.testing.assert_array_equal(dst_rows, stock.target_dst_token_indices)


# -- controls: each of these mistakes must be visible to the comparison above -----------------------------------


def swap_block_order(p: Segments) -> Segments:
    return Segments(p.src_row[::-1], p.dst_row, p.n_rows[::-1])


def drop_last(p: Segments) -> Segments:
    return Segments(p.src_row[:-1], p.dst_row[:-1], p.n_rows[:-1])


def shift_destination(p: Segments) -> Segments:
    return Segments(p.src_row, p.dst_row + 1, p.n_rows)


@pytest.mark.parametrize("block_size,page_size", [(1, 16), (16, 16), (64, 64), (16, 64), (128, 64)])
@pytest.mark.parametrize("mistake", ["owner flip", "destination off by one", "block order", "last chunk", "chunk zero"])
def test_control_a_wrong_plan_is_seen(mistake, block_size, page_size):
    # An even number of cycles: a flipped owner then changes no count, only who holds what.
    case = Case(2, block_size, page_size, 1, page_size, 4 * 2 * block_size)
    servers = simulate(case)
    plans = [plan(case, servers, r) for r in range(2)]
    np.testing.assert_array_equal(received(case, servers, plans), servers.expected)
    if mistake == "owner flip":
        plans = plans[::-1]
    elif mistake == "destination off by one":
        plans = [shift_destination(p) for p in plans]
    elif mistake == "block order":
        plans = [swap_block_order(p) for p in plans]
    elif mistake == "last chunk":
        plans = [drop_last(p) for p in plans]
    else:  # owners counted from the chunk's own zero instead of the request's first token
        case = case._replace(skip=block_size)
        servers = simulate(case)
        plans = [plan(case, servers, 1 - r) for r in range(2)]
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(received(case, servers, plans), servers.expected)


# -- counts, addresses, errors ------------------------------------------------------------------------------------


def test_segment_counts_of_a_long_prompt():
    tokens, layers, page_size = 32 * 1024, 61, 64
    rng = np.random.default_rng(0)
    counts = {}
    for block_size in (1, 64):
        layout = DcpLayout(8, block_size)
        src = rng.permutation(tokens // page_size)
        dst = rng.permutation(tokens // layout.virtual_page_size(page_size))
        counts[block_size] = [
            plan_segments(src, dst, page_size=page_size, layout=layout, rank=r, start=0, length=tokens).n_rows.size
            for r in range(8)
        ]
    assert [n * layers for n in counts[1]] == [249_856] * 8
    assert [n * layers for n in counts[64]] == [3_904] * 8


def test_one_rank_merges_pages_that_lie_in_order():
    layout = DcpLayout(1, 64)
    p = plan_segments(np.arange(5, 9), np.arange(2, 6), page_size=64, layout=layout, rank=0, start=0, length=200)
    assert [x.tolist() for x in p] == [[320], [128], [200]]


def test_a_rank_that_owns_nothing_gets_an_empty_plan():
    layout = DcpLayout(8, 64)
    for rank in range(1, 8):
        p = plan_segments(np.array([3]), np.array([1]), page_size=64, layout=layout, rank=rank, start=0, length=64)
        assert p.n_rows.size == 0 and p.total_rows == 0


@given(cases, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_addresses_cover_exactly_the_rows(case, layers):
    servers = simulate(case)
    rng = np.random.default_rng(case.seed)
    width = rng.integers(1, 9, layers).tolist()
    src_base, dst_base = (
        rng.integers(1 << 40, 1 << 47, layers).tolist(),
        rng.integers(1 << 40, 1 << 47, layers).tolist(),
    )
    for r in range(case.dcp_size):
        p = plan(case, servers, r)
        src, dst, n = (x.tolist() for x in addresses(p, src_base, dst_base, width))
        want = [
            (src_base[i] + s * width[i], dst_base[i] + d * width[i], k * width[i])
            for i in range(layers)
            for s, d, k in zip(*(x.tolist() for x in p), strict=True)
        ]
        assert list(zip(src, dst, n, strict=True)) == want


@pytest.mark.parametrize(
    "change,words",
    [
        (dict(decode_prefix_len=64), "multiple of 128"),
        (dict(decode_prefix_len=128, start=64), "at least decode_prefix_len=128"),
        (dict(src_pages=np.arange(2)), "source side gave 2 pages where the tokens to send need 4"),
        (dict(dst_pages=np.arange(1)), "destination side gave 1 pages where the tokens to send need 2"),
        (dict(rank=2), "rank must be below dcp_size=2"),
        (dict(length=-1), "length must be at least 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change, words):
    call = dict(src_pages=np.arange(4), dst_pages=np.arange(2), rank=0, start=0, length=256, decode_prefix_len=0)
    call |= change
    src, dst = call.pop("src_pages"), call.pop("dst_pages")
    with pytest.raises(ValueError, match=words):
        plan_segments(src, dst, page_size=64, layout=DcpLayout(2, 64), **call)


def test_layers_must_pair_up():
    p = Segments(*(np.array([1]),) * 3)
    with pytest.raises(ValueError, match="same layers"):
        addresses(p, [0, 1], [0], [4])
