"""Where a prefill server without DCP puts the pages of a request: those of one decode rank side by side.

A segment (:mod:`plan`) is a run of rows that is contiguous on both sides. What one decode rank owns of a chunk adjoins
there as far as decode's pages do. Here SGLang takes free pages in order of position, so blocks of one rank lie P apart
and each is a segment of its own. Any free page may take any part of a request, so they are taken in order of the rank
first and of the position second, and a rank's blocks adjoin as far as the free pages do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.common import BACKENDS, PeerDcpSize, pd_row
from sglang_dcp_block.hooks import Hook

_expected: DcpLayout | None = None


def expect(peer: PeerDcpSize) -> None:
    """Place the pages of later requests for the layout of ``peer``, the decode server that registered last.

    Where its pages are rotated, as if it took pages 0, 1, 2, ... for each request: its ids aren't known yet.
    """
    global _expected
    _expected = None if peer.geometry is None else peer.geometry.layout


def whole_pages(layout: DcpLayout, page_size: int) -> bool:
    """Whether each page of ``page_size`` rows belongs to one rank: otherwise no order of pages joins blocks."""
    return layout.dcp_size > 1 and layout.block_size % page_size == 0


def page_order(layout: DcpLayout, page_size: int, prefix_lens: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Which free page each new page of a batch takes.

    Args:
        layout: of decode, for which :func:`whole_pages` holds.
        page_size: rows of a page here.
        prefix_lens, seq_lens: (batch,) int, tokens of each request before and after; a page that a prefix has begun is
            no new one.

    Returns:
        (n,) int64, a permutation of 0..n-1: the new pages, request after request and by position, as indices into the
        free pages. Each request takes the same free pages as it does without this.
    """
    first = -(-prefix_lens // page_size)
    counts = -(-seq_lens // page_size) - first
    request = np.repeat(np.arange(counts.size), counts)
    nth = np.arange(request.size) - np.repeat(np.cumsum(counts) - counts, counts)
    by_rank = np.lexsort((layout.owner((first[request] + nth) * page_size), request))
    order = np.empty_like(by_rank)
    order[by_rank] = np.arange(by_rank.size)
    return order


def alloc_extend(
    original: Callable[..., Any],
    allocator: Any,
    prefix_lens: Any,
    prefix_lens_cpu: Any,
    seq_lens: Any,
    seq_lens_cpu: Any,
    last_loc: Any,
    extend_num_tokens: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """SGLang takes the first of ``allocator.free_pages``; here they come in :func:`page_order` before it does."""
    layout, page_size = _expected, allocator.page_size
    if layout is not None and whole_pages(layout, page_size):
        import torch

        # SGLang's own bound and step: done here, it is not done again below, where it would undo the order.
        if extend_num_tokens // page_size + len(prefix_lens) + 1 > len(allocator.free_pages):
            allocator.merge_and_sort_free()
        order = torch.from_numpy(page_order(layout, page_size, prefix_lens_cpu.numpy(), seq_lens_cpu.numpy()))
        free, n = allocator.free_pages, order.numel()
        if n <= len(free):
            order = order.to(free.device, non_blocking=True)
            allocator.free_pages = torch.cat((free[:n][order], free[n:]))
    return original(
        allocator,
        prefix_lens,
        prefix_lens_cpu,
        seq_lens,
        seq_lens_cpu,
        last_loc,
        extend_num_tokens,
        *args,
        **kwargs,
    )


# -- the rows --------------------------------------------------------------------------------------------------------

#: When these rows are installed; entries of plugin.SCOPES. A function takes a plugin.Setup.
PLACEMENT_SCOPES: dict[str, str | Callable[[Any], bool]] = {
    "pd_pages": lambda s: (
        s.disaggregation_mode == "prefill" and s.transfer_backend in BACKENDS and s.layout.dcp_size == 1
    ),
}

PLACEMENT_HOOKS: tuple[Hook, ...] = (
    pd_row(
        "sglang.srt.mem_cache.allocator.paged:PagedTokenToKVPoolAllocator.alloc_extend",
        "placement:alloc_extend",
        "39efa5ccc4a8939e",
        "pd_pages",
        "every block is a segment of its own, however its neighbours lie",
        "test/pd/test_placement.py",
    ),
)
