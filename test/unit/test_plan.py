"""The transfer plan between every pair of layouts against a simulation of both servers, and SGLang's plan at B = 1.

The simulation knows nothing of segments or of the layout's formulas: tokens are dealt out to ranks like cards, a rank's
rows are counted off into pages, the prefill side writes each position's number into its place, and the decode side
says, place by place, which position must arrive there.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import count, product
from typing import NamedTuple

import numpy as np
import pytest
from brute_force import deal, first_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.plan import Segments, Side, addresses, plan_pair

EMPTY = -1  # a row that no token may reach
RANKS, BLOCKS, PAGES = (1, 2, 4, 8), (1, 8, 16, 64, 128, 192), (1, 16, 64)
LONGEST = 9000  # positions that are simulated


class Server(NamedTuple):
    dcp_size: int
    block_size: int
    page_size: int
    rotate: bool = False

    @property
    def layout(self) -> DcpLayout:
        layout = DcpLayout(self.dcp_size, self.block_size)
        return layout.rotated(self.page_size) if self.rotate else layout


class Case(NamedTuple):
    """One send: positions [start, start + length) of a request whose first pages the decode side has already."""

    src: Server
    dst: Server
    prefix_pages: int  # virtual pages of the decode side
    skip: int  # tokens between the prefix and this send
    length: int
    seed: int = 0


# -- the simulation ------------------------------------------------------------------------------------------------


class Places(NamedTuple):
    """By position: owner, the owner's virtual page (counted from 0) and the row in it. And rows of a page."""

    owner: np.ndarray
    page: np.ndarray
    offset: np.ndarray
    rows_per_page: int


@lru_cache(maxsize=256)
def places(server: Server) -> Places:
    """With every page beginning at rank 0."""
    dealt = deal(LONGEST, server.dcp_size, server.block_size)
    rows_per_page = next(n for n in count(1) if n % server.page_size == 0 and n % server.block_size == 0)
    pages = LONGEST // rows_per_page + 1
    page_of_row = np.repeat(np.arange(pages), rows_per_page)
    offset_of_row = np.tile(np.arange(rows_per_page), pages)
    return Places(dealt.owner, page_of_row[dealt.row], offset_of_row[dealt.row], rows_per_page)


class Buffers(NamedTuple):
    """What lies on both servers: the entry at [rank, row] is the position stored there, EMPTY elsewhere."""

    src: Side  # of rank 0
    dst: Side
    start: int
    length: int
    source: np.ndarray
    expected: np.ndarray


def stored(server: Server, begin: int, end: int, first_page: int, spare: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Random page ids from ``first_page`` on, and (ranks, rows) with positions [begin, end) in them."""
    at = places(server)
    span = np.arange(begin, end)
    n_pages = int(at.page[end - 1]) - first_page + 1 if end > begin else 0
    ids = rng.permutation(n_pages + spare)[:n_pages]
    rows = np.full((server.dcp_size, (n_pages + spare) * at.rows_per_page), EMPTY)
    if span.size:
        page, owner = ids[at.page[span] - first_page], at.owner[span]
        if server.rotate:
            first = np.array(first_ranks(n_pages + spare, server.dcp_size))
            owner = np.array(2 * list(range(server.dcp_size)))[owner + first[page]]
        rows[owner, page * at.rows_per_page + at.offset[span]] = span
    return ids, rows


def simulate(case: Case) -> Buffers:
    rng, src, dst = np.random.default_rng(case.seed), places(case.src), places(case.dst)
    prefix = int(np.searchsorted(dst.page, case.prefix_pages))  # pages of a request fill in order of position
    start = prefix + case.skip
    end = start + case.length
    first_page = int(src.page[start])
    first = int(np.searchsorted(src.page, first_page))
    # The source's pages hold earlier tokens too, which must stay where they are.
    src_pages, source = stored(case.src, first if case.length else start, end, first_page, 2, rng)
    dst_pages, expected = stored(case.dst, start, end, case.prefix_pages, 3, rng)
    return Buffers(
        Side(case.src.layout, 0, case.src.page_size, src_pages, first),
        Side(case.dst.layout, 0, case.dst.page_size, dst_pages, prefix),
        start,
        case.length,
        source,
        expected,
    )


class Send(NamedTuple):
    """What one rank sends to another."""

    sender: int
    receiver: int
    segments: Segments


def plans(b: Buffers, plan: Callable[..., Segments] = plan_pair) -> list[Send]:
    return [
        Send(s, r, plan(b.src._replace(rank=s), b.dst._replace(rank=r), b.start, b.length))
        for s, r in product(range(b.src.layout.dcp_size), range(b.dst.layout.dcp_size))
    ]


def expand(segments: Segments) -> tuple[np.ndarray, np.ndarray]:
    """Source and destination row of every token."""
    within = np.arange(segments.total_rows) - np.repeat(np.cumsum(segments.n_rows) - segments.n_rows, segments.n_rows)
    return np.repeat(segments.src_row, segments.n_rows) + within, np.repeat(segments.dst_row, segments.n_rows) + within


def delivered(b: Buffers, sends: Iterable[Send]) -> np.ndarray:
    """The decode side after all sends; a row that is written twice, or a copy out of bounds, is an error."""
    out, writes = np.full_like(b.expected, EMPTY), np.zeros(b.expected.shape, int)
    for sender, receiver, segments in sends:
        assert (segments.n_rows >= 1).all()
        src, dst = expand(segments)
        assert not src.size or (src.min() >= 0 and src.max() < b.source.shape[1])
        assert not dst.size or (dst.min() >= 0 and dst.max() < out.shape[1])
        out[receiver, dst] = b.source[sender, src]
        writes[receiver] += np.bincount(dst, minlength=out.shape[1])
    assert writes.max(initial=0) <= 1, "a row is sent twice"
    return out


def audit(b: Buffers, sends: list[Send]) -> None:
    np.testing.assert_array_equal(delivered(b, sends), b.expected)
    assert sum(send.segments.total_rows for send in sends) == b.length


# -- every pair ----------------------------------------------------------------------------------------------------


def cases_of(src_ranks: int, dst_ranks: int, each: int) -> Iterable[Case]:
    """``each`` sends for all block and page sizes on both sides, starting and ending anywhere in a block or cycle."""
    rng = np.random.default_rng([src_ranks, dst_ranks, each])
    for b1, b2, p1, p2 in product(BLOCKS, BLOCKS, PAGES, PAGES):
        src, dst = Server(src_ranks, b1, p1), Server(dst_ranks, b2, p2)
        longest = 2 * max(src.layout.cycle, dst.layout.cycle) + 80
        for _ in range(each):
            yield Case(src, dst, *(int(rng.integers(0, high)) for high in (2, longest // 2, longest, 1000)))


@pytest.mark.parametrize("src_ranks,dst_ranks", list(product(RANKS, RANKS)))
def test_every_pair_of_layouts(src_ranks, dst_ranks):
    seen = 0
    for case in cases_of(src_ranks, dst_ranks, 1):
        b = simulate(case)
        audit(b, plans(b))
        seen += 1
    assert seen == (len(BLOCKS) * len(PAGES)) ** 2


@pytest.mark.slow
@pytest.mark.parametrize("src_ranks,dst_ranks", list(product(RANKS, RANKS)))
def test_every_pair_of_layouts_from_many_starts(src_ranks, dst_ranks):
    for case in cases_of(src_ranks, dst_ranks, 12):
        b = simulate(case)
        audit(b, plans(b))


def lengths(layout: DcpLayout) -> list[int]:
    b, c = layout.block_size, layout.cycle
    return sorted({n for n in (0, 1, 2, b - 1, b, b + 1, c - 1, c, c + 1, 2 * c + b + 3, 3 * c + 1) if n >= 0})


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("block_size", BLOCKS)
def test_every_border_of_a_length(block_size, page_size):
    """From one rank, from the same layout, and from another number of ranks."""
    dst = Server(4, block_size, page_size)
    for src in (Server(1, 1, page_size), dst, Server(2, block_size, 16), Server(8, 16, page_size)):
        for n, length in enumerate(lengths(dst.layout)):
            for skip in (0, page_size, 3 * page_size + 5):
                b = simulate(Case(src, dst, n % 2, skip, length, seed=n))
                audit(b, plans(b))


servers = st.builds(
    Server, st.integers(1, 8), st.integers(1, 40), st.sampled_from([1, 2, 3, 8, 16]), st.sampled_from([False, True])
)
cases = st.builds(
    Case,
    src=servers,
    dst=servers,
    prefix_pages=st.integers(0, 2),
    skip=st.integers(0, 100),
    length=st.integers(0, 300),
    seed=st.integers(0, 9),
)


@given(cases)
@settings(max_examples=150, deadline=None)
def test_any_two_layouts_start_and_length(case):
    b = simulate(case)
    audit(b, plans(b))


@given(cases)
@settings(max_examples=100, deadline=None)
def test_segments_are_as_long_as_they_can_be(case):
    for _, _, (src, dst, n) in plans(simulate(case)):
        follows = (src[1:] == src[:-1] + n[:-1]) & (dst[1:] == dst[:-1] + n[:-1])
        assert not follows.any()


@given(cases, st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_chunks_sent_one_after_another_equal_one_send(case, chunk):
    b = simulate(case)
    sends: list[Send] = []
    width = b.src.layout.virtual_page_size(b.src.page_size)
    for begin in range(b.start, b.start + b.length, chunk):
        skipped = (begin - b.src.first) // width  # a later chunk comes with its own pages
        src = b.src._replace(pages=b.src.pages[skipped:], first=b.src.first + skipped * width)
        sends += plans(b._replace(src=src, start=begin, length=min(chunk, b.start + b.length - begin)))
    audit(b, sends)


@pytest.mark.parametrize("page_size,block_size", [(64, 64), (64, 16), (16, 64), (64, 1), (64, 192)])
def test_the_same_layout_moves_virtual_pages_as_they_are(page_size, block_size):
    server = Server(4, block_size, page_size)
    b = simulate(Case(server, server, 0, 0, 3 * server.layout.virtual_page_size(page_size), seed=4))
    for sender, receiver, segments in plans(b):
        if sender != receiver:
            assert not segments.total_rows, "rank to rank: the others have nothing for it"
            continue
        rows = places(server).rows_per_page
        assert expand(segments)[0].tolist() == [p * rows + i for p in b.src.pages for i in range(rows)]
        assert expand(segments)[1].tolist() == [p * rows + i for p in b.dst.pages for i in range(rows)]
        assert segments.n_rows.size <= 3


# -- against SGLang's plan ---------------------------------------------------------------------------------------


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
    start = prefix + page_offset * page_size
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
        ours = plan_pair(
            Side(DcpLayout(1), 0, page_size, src, start),
            Side(DcpLayout(dcp_size), rank, page_size, dst, prefix),
            start,
            length,
        )
        src_rows, dst_rows = expand(ours)
        np.testing.assert_array_equal(src_rows, stock.target_src_token_indices)
        np.testing.assert_array_equal(dst_rows, stock.target_dst_token_indices)


# -- controls: each of these mistakes must be visible to the audit above ------------------------------------------


def _flipped(side: Side) -> Side:
    return side._replace(rank=side.layout.dcp_size - 1 - side.rank)


def _swapped_order(p: Segments) -> Segments:
    return p._replace(src_row=p.src_row[::-1], n_rows=p.n_rows[::-1])


def _at_rank_0(side: Side) -> Side:
    return side._replace(layout=side.layout.plain)


MISTAKES: dict[str, Callable[[Side, Side, int, int], Segments]] = {
    "receiver flip": lambda src, dst, *span: plan_pair(src, _flipped(dst), *span),
    "sender flip": lambda src, dst, *span: plan_pair(_flipped(src), dst, *span),
    "receiver's block size at the sender": lambda src, dst, *span: plan_pair(
        src._replace(layout=DcpLayout(src.layout.dcp_size, dst.layout.block_size), first=0), dst, *span
    ),
    "sender's block size at the receiver": lambda src, dst, *span: plan_pair(
        src, dst._replace(layout=DcpLayout(dst.layout.dcp_size, src.layout.block_size), first=0), *span
    ),
    "owners counted from the chunk": lambda src, dst, start, n: plan_pair(
        src._replace(first=0), dst._replace(first=0), 0, n
    ),
    "destination off by one": lambda *a: (p := plan_pair(*a))._replace(dst_row=p.dst_row + 1),
    "block order": lambda *a: _swapped_order(plan_pair(*a)),
    "last segment dropped": lambda *a: Segments(*(x[:-1] for x in plan_pair(*a))),
    "a sender without a plan": lambda src, dst, *span: plan_pair(src, dst, *((0, 0) if src.rank == 1 else span)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(
    "src,dst",
    [
        (Server(2, 16, 64), Server(2, 64, 64)),
        (Server(2, 64, 16), Server(4, 16, 64)),
        (Server(4, 16, 16), Server(2, 1, 64)),
        (Server(2, 1, 1), Server(8, 8, 16)),
    ],
)
def test_control_a_wrong_plan_is_seen(src, dst, mistake):
    # Whole cycles of both sides: a flipped owner changes no count, only who holds what.
    cycle = src.layout.cycle * dst.layout.cycle
    b = simulate(Case(src, dst, 1, 5 * 16, min(2 * cycle, 4096), seed=1))
    audit(b, plans(b))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        audit(b, plans(b, MISTAKES[mistake]))


@pytest.mark.parametrize("side", ["source", "destination", "both"])
def test_control_a_side_without_its_rotation_is_seen(side):
    b = simulate(Case(Server(2, 16, 64, rotate=True), Server(4, 16, 64, rotate=True), 1, 80, 2000, seed=1))
    audit(b, plans(b))
    changed = b._replace(
        src=_at_rank_0(b.src) if side != "destination" else b.src,
        dst=_at_rank_0(b.dst) if side != "source" else b.dst,
    )
    with pytest.raises(AssertionError):
        audit(b, plans(changed))


@pytest.mark.parametrize("dst", [Server(1, 1, 64), Server(2, 64, 64), Server(8, 16, 64)])
def test_control_a_second_copy_of_a_sender_is_seen(dst):
    b = simulate(Case(Server(2, 16, 64), dst, 0, 0, 500))
    sends = plans(b)
    with pytest.raises(AssertionError, match="sent twice"):
        audit(b, sends + [send for send in sends if send.sender == 1])


# -- counts, addresses, errors ------------------------------------------------------------------------------------


def test_segment_counts_of_a_long_prompt():
    tokens, layers, page_size = 32 * 1024, 61, 64
    rng = np.random.default_rng(0)
    counts = {}
    for block_size in (1, 64):
        layout = DcpLayout(8, block_size)
        src = Side(DcpLayout(1), 0, page_size, rng.permutation(tokens // page_size))
        dst = Side(layout, 0, page_size, rng.permutation(tokens // layout.virtual_page_size(page_size)))
        counts[block_size] = [plan_pair(src, dst._replace(rank=r), 0, tokens).n_rows.size for r in range(8)]
    assert [n * layers for n in counts[1]] == [249_856] * 8
    assert [n * layers for n in counts[64]] == [3_904] * 8


def test_one_rank_merges_pages_that_lie_in_order():
    src, dst = (Side(DcpLayout(1, 64), 0, 64, pages) for pages in (np.arange(5, 9), np.arange(2, 6)))
    assert [x.tolist() for x in plan_pair(src, dst, 0, 200)] == [[320], [128], [200]]


def test_a_rank_that_owns_nothing_gets_an_empty_plan():
    src = Side(DcpLayout(1), 0, 64, np.array([3]))
    for rank in range(1, 8):
        p = plan_pair(src, Side(DcpLayout(8, 64), rank, 64, np.array([1])), 0, 64)
        assert p.n_rows.size == 0 and p.total_rows == 0


def test_ranks_without_a_common_block_exchange_nothing():
    """DCP 2 in blocks of 64 to DCP 4 in blocks of 32: a rank's blocks are two neighbours' blocks there."""
    src, dst = Server(2, 64, 64), Server(4, 32, 64)
    b = simulate(Case(src, dst, 0, 0, 1024))
    pairs = {(sender, receiver) for sender, receiver, p in plans(b) if p.total_rows}
    assert pairs == {(0, 0), (0, 1), (1, 2), (1, 3)}


@given(cases, st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_addresses_cover_exactly_the_rows(case, layers):
    rng = np.random.default_rng(case.seed)
    width = rng.integers(1, 9, layers).tolist()
    src_base, dst_base = (
        rng.integers(1 << 40, 1 << 47, layers).tolist(),
        rng.integers(1 << 40, 1 << 47, layers).tolist(),
    )
    for _, _, p in plans(simulate(case)):
        src, dst, n = (x.tolist() for x in addresses(p, src_base, dst_base, width))
        want = [
            (src_base[i] + s * width[i], dst_base[i] + d * width[i], k * width[i])
            for i in range(layers)
            for s, d, k in zip(*(x.tolist() for x in p), strict=True)
        ]
        assert list(zip(src, dst, n, strict=True)) == want


@pytest.mark.parametrize(
    "src,dst,span,words",
    [
        ({}, dict(first=64), (128, 64), "destination side's first position must be a multiple of 128"),
        (dict(first=32), {}, (128, 64), "source side's first position must be a multiple of 64"),
        ({}, dict(first=128), (64, 64), "at least the destination side's first position 128"),
        (dict(first=128), {}, (64, 64), "at least the source side's first position 128"),
        (dict(pages=np.arange(2)), {}, (0, 256), "source side gave 2 pages where the tokens to send need 4"),
        ({}, dict(pages=np.arange(1)), (0, 256), "destination side gave 1 pages where the tokens to send need 2"),
        ({}, dict(rank=2), (0, 256), "rank must be below dcp_size=2"),
        (dict(layout=DcpLayout(2, 16), rank=2), {}, (0, 256), "rank must be below dcp_size=2"),
        ({}, {}, (0, -1), "length must be at least 0"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(src, dst, span, words):
    src = Side(DcpLayout(1), 0, 64, np.arange(4))._replace(**src)
    dst = Side(DcpLayout(2, 64), 0, 64, np.arange(2))._replace(**dst)
    with pytest.raises(ValueError, match=words):
        plan_pair(src, dst, *span)


def test_layers_must_pair_up():
    p = Segments(*(np.array([1]),) * 3)
    with pytest.raises(ValueError, match="same layers"):
        addresses(p, [0, 1], [0], [4])
