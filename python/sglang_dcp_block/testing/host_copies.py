"""Torch stand-ins for the compiled kernels that copy KV rows between an MLA device pool and its host pool.

They take what ``sgl_kernel.kvcacheio`` takes and check what the kernels silently trust: both sides name equally many
rows, and a copy by pages gets whole pages of consecutive rows.

A GPU loads a layer's rows while earlier layers compute, and a reader has to wait for its layer. So does a reader here:
:func:`deferred` keeps a load back until :func:`wait` is called for its layer. A PD decode server asks whether a load is
done instead: :func:`done_when_asked_again`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

_submitted: list[Callable[[], None]] = []


def deferred(load: Callable[..., None]) -> Callable[..., None]:
    """``MLATokenToKVPoolHost.load_to_device_per_layer``, to happen when its layer is waited for."""

    @functools.wraps(load)
    def submit(*args: Any, **kwargs: Any) -> None:
        _submitted.append(functools.partial(load, *args, **kwargs))

    return submit


def complete(event: Any, layer_index: int) -> None:
    """``LayerLoadingEvent.complete``: what was submitted so far belongs to this layer."""
    if not hasattr(event, "loads"):
        event.loads = {}
    event.loads.setdefault(layer_index, []).extend(_submitted)
    _submitted.clear()


def wait(event: Any, layer_index: int) -> None:
    """``LayerLoadingEvent.wait``: the loads of a stream happen in order, this layer's last."""
    for layer in [n for n in getattr(event, "loads", {}) if n <= layer_index]:
        for load in event.loads.pop(layer):
            load()


def done_when_asked_again(original: Callable[..., bool]) -> Callable[..., bool]:
    """``UnifiedRadixCache.is_load_back_event_done``: no at the first question about a load, yes at the next."""

    @functools.wraps(original)
    def is_done(tree: Any, consumer_index: int) -> bool:
        if consumer_index >= 0 and tree.cache_controller is not None:
            event = tree.cache_controller.layer_done_counter.events[consumer_index]
            pending = getattr(event, "loads", {})
            if pending and not getattr(event, "asked", False):
                event.asked = True
                return False
            event.asked = False
            wait(event, max(pending, default=0))
        return original(tree, consumer_index)

    return is_done


def send_astray(while_true: Callable[[], bool] = lambda: True) -> None:
    """A fault: the pages of one load change places. Call before SGLang's loads are replaced by :func:`deferred`."""
    global deferred
    right = deferred

    def astray(load: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(load)
        def changed(pool: Any, device_pool: Any, host_indices: torch.Tensor, *rest: Any, **more: Any) -> None:
            indices = host_indices.roll(pool.logical_page_size) if while_true() else host_indices
            load(pool, device_pool, indices, *rest, **more)

        return right(changed)

    deferred = astray


def _whole_pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    pages = indices.reshape(-1, page_size)
    if not torch.equal(pages, pages[:, :1] + torch.arange(page_size)) or (pages[:, 0] % page_size).any():
        raise ValueError(f"not whole pages of {page_size} consecutive rows: {indices.tolist()}")
    return pages[:, 0] // page_size


def _rows_at(pointers: torch.Tensor, indices: torch.Tensor, item_size: int) -> list[torch.Tensor]:
    """Each layer's rows from its address on, (rows, item_size) uint8, as many as ``indices`` asks for."""
    rows = int(indices.max()) + 1
    memory = ctypes.c_uint8 * (rows * item_size)
    addresses = pointers.view(torch.int64).tolist()
    return [torch.frombuffer(memory.from_address(a), dtype=torch.uint8).view(rows, item_size) for a in addresses]


def transfer_kv_direct(
    src_layers: list[torch.Tensor],
    dst_layers: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Layer by layer, pool to pool, both (rows, 1, D)."""
    _whole_pages(src_indices, page_size), _whole_pages(dst_indices, page_size)
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Host pages (pages, layers, page_size, 1, D) to a device layer (rows, 1, D)."""
    (src,), (dst,) = src_ptrs, dst_ptrs
    _whole_pages(dst_indices, page_size)
    dst[dst_indices] = src[_whole_pages(src_indices, page_size), layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: list[torch.Tensor],
    dst_ptrs: list[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    (dst,) = dst_ptrs
    _whole_pages(src_indices, page_size)
    for layer, src in enumerate(src_ptrs):
        dst[_whole_pages(dst_indices, page_size), layer] = src[src_indices].unflatten(0, (-1, page_size))


def transfer_kv_per_layer_mla(
    src: torch.Tensor, dst: torch.Tensor, src_indices: torch.Tensor, dst_indices: torch.Tensor, item_size: int
) -> None:
    dst[dst_indices] = src[src_indices]


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    """Host rows (rows, layers, 1, D) to a device layer (rows, 1, D)."""
    dst[dst_indices] = src[src_indices, layer_id]


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    """src_layers, dst_layers: (num_layers,) uint64 addresses of packed rows of ``item_size`` bytes."""
    sources = _rows_at(src_layers, src_indices, item_size)
    for src, dst in zip(sources, _rows_at(dst_layers, dst_indices, item_size), strict=True):
        dst[dst_indices] = src[src_indices]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for layer, src in enumerate(_rows_at(src_layers, src_indices, item_size)):
        dst[dst_indices, layer] = src[src_indices].view(dst.dtype).unflatten(1, dst.shape[2:])
