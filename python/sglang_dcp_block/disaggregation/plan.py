"""Which rows of the prefill server go to which rows of one decode rank: pure arithmetic, no transport, no SGLang.

A *row* is one token's KV in one layer's buffer. A prefill server without DCP stores position t of a request in row
``page * page_size + t % page_size`` of the page that holds it. A decode rank stores it, if it owns it at all, in a row
of a *virtual page*, which takes :meth:`DcpLayout.rows_per_virtual_page` rows on every rank. A *segment* is a run of
rows that is contiguous on both sides, so one copy per layer moves it.

Positions count from the request's first token, never from a chunk or from the part that decode had cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout


class Segments(NamedTuple):
    """Copies for one destination rank, in order of position.

    src_row, dst_row: (n,) int64, first row of each run in a source and destination layer buffer. n_rows: (n,) int64,
    rows in the run, >= 1. No two neighbours could be one run.
    """

    src_row: np.ndarray
    dst_row: np.ndarray
    n_rows: np.ndarray

    @property
    def total_rows(self) -> int:
        """Tokens this rank receives."""
        return int(self.n_rows.sum())


def plan_segments(
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
    *,
    page_size: int,
    layout: DcpLayout,
    rank: int,
    start: int,
    length: int,
    decode_prefix_len: int = 0,
) -> Segments:
    """Segments that bring the tokens [start, start + length) that ``rank`` owns from a DCP1 prefill to that rank.

    Args:
        src_pages: page ids on the prefill side, the first one holding position ``start``.
        dst_pages: virtual page ids on the decode side, the first one holding position ``decode_prefix_len``.
        page_size: rows per page on the prefill side (and tokens of a physical page on the decode side).
        layout, rank: layout of the decode side and the rank in it.
        start: position in the request of the first token to send.
        length: tokens to send; only these are touched, so a last page may be partial.
        decode_prefix_len: tokens the decode side has already: a whole number of virtual pages, at most ``start``.

    Raises:
        ValueError: the numbers don't fit together (the message names both sides).
    """
    rows_per_page = layout.rows_per_virtual_page(page_size)
    _check_prefix(decode_prefix_len, start, layout.virtual_page_size(page_size))
    src_pages, dst_pages = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
    first_page = start // page_size
    _check_pages("source", src_pages, -(-(start + length) // page_size) - first_page if length else 0)

    position, row, n_rows = layout.owned_intervals(start, length, rank)
    row = row - layout.local_len(decode_prefix_len, rank)  # dst_pages begin after the cached prefix
    if n_rows.size:
        _check_pages("destination", dst_pages, (int(row[-1] + n_rows[-1]) - 1) // rows_per_page + 1)
    position, row, n_rows = _cut_at_multiples(position, row, n_rows, page_size)
    src_row = src_pages[position // page_size - first_page] * page_size + position % page_size
    dst_row = dst_pages[row // rows_per_page] * rows_per_page + row % rows_per_page
    return _merge(src_row, dst_row, n_rows)


def plan_same_layout(
    src_pages: np.ndarray,
    dst_pages: np.ndarray,
    *,
    page_size: int,
    layout: DcpLayout,
    rank: int,
    start: int,
    length: int,
    decode_prefix_len: int = 0,
) -> Segments:
    """Segments from prefill ``rank`` to decode ``rank`` when both sides have ``layout``: virtual pages as they are.

    Both page lists hold virtual page ids, the source's first one holding position ``start``. The other arguments and
    the errors are those of :func:`plan_segments`.
    """
    rows_per_page, virtual_page = layout.rows_per_virtual_page(page_size), layout.virtual_page_size(page_size)
    _check_prefix(decode_prefix_len, start, virtual_page)
    src_pages, dst_pages = np.asarray(src_pages, np.int64), np.asarray(dst_pages, np.int64)
    # A rank's rows of consecutive positions are consecutive: one run, cut where a virtual page ends.
    first_row = layout.local_len(start, rank)
    count = layout.interval_len(start, length, rank)
    runs = np.full(int(count > 0), first_row, np.int64)
    row, _, n_rows = _cut_at_multiples(runs, runs, np.full_like(runs, count), rows_per_page)
    src_page, dst_page = row // rows_per_page - start // virtual_page, row // rows_per_page
    dst_page = dst_page - decode_prefix_len // virtual_page
    if row.size:
        _check_pages("source", src_pages, int(src_page[-1]) + 1)
        _check_pages("destination", dst_pages, int(dst_page[-1]) + 1)
    offset = row % rows_per_page
    return _merge(src_pages[src_page] * rows_per_page + offset, dst_pages[dst_page] * rows_per_page + offset, n_rows)


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


def _check_prefix(prefix_len: int, start: int, virtual_page: int) -> None:
    if prefix_len % virtual_page:
        raise ValueError(f"decode_prefix_len must be a multiple of {virtual_page} (a virtual page), got {prefix_len}")
    if start < prefix_len:
        raise ValueError(f"start must be at least decode_prefix_len={prefix_len}, got {start}")


def _check_pages(side: str, pages: np.ndarray, needed: int) -> None:
    if pages.size < needed:
        raise ValueError(f"the {side} side gave {pages.size} pages where the tokens to send need {needed}")


def _cut_at_multiples(
    position: np.ndarray, row: np.ndarray, n_rows: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut runs wherever ``position`` crosses a multiple of ``size``."""
    if not position.size:
        return position, row, n_rows
    first, last = position // size, (position + n_rows - 1) // size
    parts = last - first + 1
    if (parts == 1).all():
        return position, row, n_rows
    run = np.repeat(np.arange(parts.size), parts)
    # Number of each piece within its run: 0, 1, ..., parts - 1.
    nth = np.arange(run.size) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = np.maximum(position[run], (first[run] + nth) * size)
    end = np.minimum(position[run] + n_rows[run], (first[run] + nth + 1) * size)
    return begin, row[run] + (begin - position[run]), end - begin


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
