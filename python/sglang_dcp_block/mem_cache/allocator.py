"""SGLang's page allocator with the virtual pages of a block layout."""

from __future__ import annotations

from typing import Any


def take_any_page_size(allocator: Any) -> None:
    """Let ``PagedTokenToKVPoolAllocator`` allocate pages that are no power of two (B 48 with pages of 64: 192 * P).

    Its Triton kernels span a page with ``tl.arange``, which takes powers of two only; the first prefill would stop the
    scheduler. SGLang has the same allocation in torch, a few small launches per step instead of one.
    """
    page = allocator.page_size
    if page & (page - 1):
        allocator.use_triton_kernels = False
