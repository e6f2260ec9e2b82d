"""Which rows of one prefill rank go to which rows of one decode rank: pure arithmetic, no transport, no SGLang.

A *row* is one token's KV in one layer's buffer. Both servers deal a request's tokens to their ranks by a
:class:`DcpLayout` (one rank holds everything at ``dcp_size`` 1), and keep them in *virtual pages*, of which each takes
:meth:`DcpLayout.rows_per_virtual_page` rows on every rank. What one rank sends to another is the intersection of what
both own. A *segment* is a run of rows that is contiguous on both sides, so one copy per layer moves it.

Positions count from the request's first token, never from a chunk or from the part that decode had cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout


class Segments(NamedTuple):
    """Copies from one rank to another, in order of position.

    src_row, dst_row: (n,) int64, first row of each run in a source and destination layer buffer. n_rows: (n,) int64,
    rows in the run, >= 1. No two neighbours could be one run.
    """

    src_row: np.ndarray
    dst_row: np.ndarray
    n_rows: np.ndarray

    @property
    def total_rows(self) -> int:
        """Tokens that this pair of ranks moves."""
        return int(self.n_rows.sum())


class Side(NamedTuple):
    """One rank of a server, and where a request lies there.

    layout, rank: of the server's DCP and the rank in it. page_size: rows of a physical page. pages: (n,) int, ids of
    virtual pages, the same on every rank of a server. first: position of the first token in ``pages[0]``, a whole
    number of virtual pages (a chunk's begin at the source, the cached prefix at the destination).
    """

    layout: DcpLayout
    rank: int
    page_size: int
    pages: np.ndarray
    first: int = 0


def plan_pair(src: Side, dst: Side, start: int, length: int) -> Segments:
    """Segments that bring the tokens of [start, start + length) that both ranks own from ``src`` to ``dst``.

    The layouts need nothing in common. Over all ranks of ``src``, each token that ``dst`` owns is in one plan.

    Args:
        start: position in the request of the first token to send.
        length: tokens to send, over all ranks; only these are touched, so a last page may be partial.

    Raises:
        ValueError: the numbers don't fit together (the message names the side).
    """
    _check_side("source", src, start, length)
    _check_side("destination", dst, start, length)
    position, n_rows = _owned_by_both(src, dst, start, length)
    position, n_rows = _cut_at_pages(src, position, n_rows)
    position, n_rows = _cut_at_pages(dst, position, n_rows)
    return _merge(_rows(src, position), _rows(dst, position), n_rows)


def _check_side(name: str, side: Side, start: int, length: int) -> None:
    virtual_page = side.layout.virtual_page_size(side.page_size)
    if side.first % virtual_page:
        raise ValueError(
            f"the {name} side's first position must be a multiple of {virtual_page} (a virtual page), got {side.first}"
        )
    if start < side.first:
        raise ValueError(f"start must be at least the {name} side's first position {side.first}, got {start}")
    needed = (start + length - 1) // virtual_page - side.first // virtual_page + 1 if length else 0
    if len(side.pages) < needed:
        raise ValueError(f"the {name} side gave {len(side.pages)} pages where the tokens to send need {needed}")


def _owned_by_both(src: Side, dst: Side, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """First position and length of every run inside [start, start + length) that lies in one run on each side."""
    theirs, _, n_theirs = dst.layout.owned_in_pages(start, length, dst.rank, dst.pages, dst.first)
    if src.layout.dcp_size == 1:  # all of it is one run there
        return theirs, n_theirs
    ours, _, n_ours = src.layout.owned_in_pages(start, length, src.rank, src.pages, src.first)
    if (src.layout, src.rank) == (dst.layout, dst.rank) and not src.layout.is_rotated:
        return ours, n_ours
    # For each of their runs, the range of our runs that overlap it: both lists are sorted and disjoint.
    low = np.searchsorted(ours + n_ours, theirs, "right")
    parts = np.searchsorted(ours, theirs + n_theirs, "left") - low
    run, nth = _spread(parts)
    mine = low[run] + nth
    begin = np.maximum(ours[mine], theirs[run])
    return begin, np.minimum(ours[mine] + n_ours[mine], theirs[run] + n_theirs[run]) - begin


def _cut_at_pages(side: Side, position: np.ndarray, n_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cut runs wherever they cross a page. Blocks never do; only the single run of one rank is longer than a block."""
    if side.layout.dcp_size > 1 or not position.size:
        return position, n_rows
    size = side.layout.virtual_page_size(side.page_size)
    first, last = position // size, (position + n_rows - 1) // size
    if (first == last).all():
        return position, n_rows
    run, nth = _spread(last - first + 1)
    begin = np.maximum(position[run], (first[run] + nth) * size)
    return begin, np.minimum(position[run] + n_rows[run], (first[run] + nth + 1) * size) - begin


def _spread(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For pieces of runs, ``parts[i]`` of run i: each piece's run, and its number 0, 1, ... in that run."""
    run = np.repeat(np.arange(parts.size), parts)
    return run, np.arange(run.size) - np.repeat(np.cumsum(parts) - parts, parts)


def _rows(side: Side, position: np.ndarray) -> np.ndarray:
    """Rows of ``position`` (owned by the side's rank) in a layer buffer."""
    rows_per_page = side.layout.rows_per_virtual_page(side.page_size)
    row = position if side.layout.dcp_size == 1 else side.layout.local_index(position)
    row = row - side.layout.local_index(side.first)
    page = row // rows_per_page
    return (np.asarray(side.pages, np.int64)[page] - page) * rows_per_page + row


def addresses(
    segments: Segments, src_bases: Sequence[int], dst_bases: Sequence[int], row_bytes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Byte addresses and lengths of ``segments`` in every layer, layer after layer.

    Args:
        src_bases, dst_bases: address of row 0 of each layer's buffer on the two sides.
        row_bytes: bytes of one row in each layer.

    Returns:
        Source addresses, destination addresses, lengths in bytes: uint64, each (layers * segments,).

    Raises:
        ValueError: the three lists differ in length.
    """
    if not len(src_bases) == len(dst_bases) == len(row_bytes):
        raise ValueError(
            f"source, destination and row sizes must name the same layers, got {len(src_bases)}, {len(dst_bases)} "
            f"and {len(row_bytes)}"
        )
    width = np.asarray(row_bytes, np.uint64)[:, None]
    src = np.asarray(src_bases, np.uint64)[:, None] + segments.src_row.astype(np.uint64) * width
    dst = np.asarray(dst_bases, np.uint64)[:, None] + segments.dst_row.astype(np.uint64) * width
    return src.ravel(), dst.ravel(), (segments.n_rows.astype(np.uint64) * width).ravel()


def _merge(src_row: np.ndarray, dst_row: np.ndarray, n_rows: np.ndarray) -> Segments:
    """Join neighbours that are contiguous on both sides."""
    if not n_rows.size:
        return Segments(src_row, dst_row, n_rows)
    # src and dst advance together inside a run: a run goes on where both next rows follow.
    heads = np.empty(n_rows.size, bool)
    heads[0] = True
    np.not_equal(src_row[1:] - src_row[:-1], n_rows[:-1], out=heads[1:])
    heads[1:] |= (dst_row[1:] - dst_row[:-1]) != n_rows[:-1]
    head = np.flatnonzero(heads)
    if head.size == n_rows.size:
        return Segments(src_row, dst_row, n_rows)
    return Segments(src_row[head], dst_row[head], np.add.reduceat(n_rows, head))
