"""What a scheduler's KV pool really holds: an audit trail, switched on by ``SGLANG_DCP_BLOCK_AUDIT=FOLDER``.

Equal tokens are a weak oracle: attention doesn't care which rank holds a row, and a stale right row hides a missing
one. So, in every scheduler process, while the variable is set:

- pages that nobody owns hold NaN: all of them at the start and after a cache flush, each one when it is freed;
- when a request gives its KV back (finished, retracted or aborted), its pages are copied to FOLDER before that;
- ``engine.collective_rpc("dcp_block_audit", name=...)`` copies the whole pool, the free pages, the slots that the radix
  cache keeps, the slots that a host cache has brought back so far, and the hooks' call counts.

Nothing here knows the layout: pages are copied whole, and a virtual page is the same rows on every rank under any
layout. :mod:`sglang_dcp_block.testing.audit` decides, offline, which token belongs in which row.

Files, per scheduler: ``rank<tp>/request-<n>.npz`` (:class:`RequestRecord`'s fields) and ``rank<tp>/pool-<name>.npz``
(:class:`PoolRecord`'s).
"""

from __future__ import annotations

import functools
import json
import math
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

_scheduler: Any = None
_folder: Path = Path()
_sequences: list[list[int]] = []
_slots_from_host = 0


def install(folder: str) -> None:
    """Wrap the few SGLang functions through which KV is allocated, freed and given back. Called once per process."""
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache import common
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    global _folder
    _folder = Path(folder)
    _wrap(Scheduler, "__init__", after=_remember_scheduler)
    Scheduler.dcp_block_audit = _dump_pool  # found by name: SGLang's RPC is getattr(scheduler, method)
    for allocator in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator):
        _wrap(allocator, "clear", after=_poison_all)
    _wrap(PagedTokenToKVPoolAllocator, "_release_page_ids", after=lambda self, *ids: _poison(self, torch.cat(ids)))
    _wrap(TokenToKVPoolAllocator, "free", after=_poison_tokens)
    _wrap(common, "release_kv_cache", before=_record_request)
    _wrap(HiCacheController, "start_loading", before=_count_loads)


def _wrap(owner: Any, name: str, before: Callable | None = None, after: Callable | None = None) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args, **kwargs)
        return result

    setattr(owner, name, wrapper)
    for module in list(sys.modules.values()):  # copies made by `from X import name`
        if getattr(module, "__dict__", {}).get(name) is original:
            setattr(module, name, wrapper)


def _buffers(allocator: Any) -> list[torch.Tensor]:
    """(rows, heads, width) of each layer: the latent KV of MLA, or all layers' keys and then their values."""
    pool = allocator._kvcache
    return pool.kv_buffer if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


# -- poison ----------------------------------------------------------------------------------------------------------


def _rows_per_page(allocator: Any) -> int:
    """Rows of this rank in one page of ``allocator``: its pages span all DCP ranks."""
    from sglang.srt.runtime_context import get_parallel

    return allocator.page_size // get_parallel().attn_dcp_size


def _page_rows(allocator: Any, pages: torch.Tensor) -> torch.Tensor:
    """(n,) page ids -> (n * rows per page,) rows of this rank."""
    per_page = _rows_per_page(allocator)
    return (pages.long()[:, None] * per_page + torch.arange(per_page, device=pages.device)).reshape(-1)


def _fill(buffer: torch.Tensor, rows: torch.Tensor | slice) -> None:
    buffer[rows] = math.nan if buffer.is_floating_point() else 0xFF  # 0xFF is NaN in FP8, whose pools are uint8


def _poison(allocator: Any, pages: torch.Tensor) -> None:
    rows = _page_rows(allocator, pages)
    for buffer in _buffers(allocator):
        _fill(buffer, rows)


def _poison_all(allocator: Any) -> None:
    for buffer in _buffers(allocator):
        _fill(buffer, slice(None))


def _poison_tokens(allocator: Any, free_index: torch.Tensor) -> None:
    if allocator.free_group is None and free_index.numel():  # inside a group, the group's end frees again
        _poison(allocator, free_index)


# -- records ---------------------------------------------------------------------------------------------------------


def _remember_scheduler(scheduler: Any, *_: Any, **__: Any) -> None:
    global _scheduler
    _scheduler = scheduler
    _rank_folder().mkdir(parents=True, exist_ok=True)


def _rank_folder() -> Path:
    from sglang.srt.runtime_context import get_parallel

    return _folder / f"rank{get_parallel().tp_rank}"


def _identity(allocator: Any) -> dict[str, Any]:
    from sglang.srt.runtime_context import get_parallel

    return {
        "dcp_size": get_parallel().attn_dcp_size,
        "dcp_rank": get_parallel().attn_dcp_rank,
        "page_slots": allocator.page_size,
        "page_rows": _rows_per_page(allocator),
    }


def _copy_rows(allocator: Any, rows: torch.Tensor | slice) -> np.ndarray:
    # uint8 pools hold FP8; float32 keeps each of its values apart.
    dtype = allocator._kvcache.dtype
    return np.stack([b[rows].view(dtype).flatten(1).float().cpu().numpy() for b in _buffers(allocator)])


def _record_request(req: Any, tree_cache: Any, **_: Any) -> None:
    if not req.kv.holds_kv or _scheduler is None:
        return
    length = req.owned_kv_len()
    tokens = [*req.origin_input_ids, *req.output_ids][:length]
    slots = tree_cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length].long()
    allocator = tree_cache.token_to_kv_pool_allocator
    pages = torch.unique(slots // allocator.page_size)
    np.savez(
        _rank_folder() / f"request-{len(_sequences):05d}.npz",
        rid=req.rid,
        finished=req.finished(),
        tokens=np.array(tokens, np.int64),
        slots=slots.cpu().numpy(),
        pages=pages.cpu().numpy(),
        rows=_copy_rows(allocator, _page_rows(allocator, pages)),
        **_identity(allocator),
    )
    _sequences.append(tokens)


def _count_loads(controller: Any) -> None:
    global _slots_from_host
    _slots_from_host += sum(len(load.device_indices) for load in controller.load_queue)


def _dump_pool(scheduler: Any, name: str) -> None:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    cached: dict[tuple[int, ...], list[int]] = {}
    for tokens in _sequences:
        match = tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        length = match.device_prefix_len
        if length:
            cached[tuple(tokens[:length])] = tree.path_device_indices(match.last_device_node).tolist()
    hooks = sys.modules.get("sglang_dcp_block.hooks")
    np.savez(
        _rank_folder() / f"pool-{name}.npz",
        rows=_copy_rows(allocator, slice(None)),
        free_pages=allocator.get_all_free_pages().cpu().numpy(),
        cached=json.dumps([[list(tokens), slots] for tokens, slots in cached.items()]),
        call_counts=json.dumps(dict(getattr(hooks, "call_counts", {}))),
        slots_from_host=_slots_from_host,
        **_identity(allocator),
    )
