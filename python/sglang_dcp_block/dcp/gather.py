"""Prefix gather for extend: every rank's rows of a batch's cached prefixes, put back into the order of the requests.

Prefixes (or chunks of them) start anywhere: mid-block, mid-cycle. Each rank holds its rows of request 0, then of
request 1, and so on. All ranks send one buffer of the same size (the largest rank's), so one all-gather moves the
whole batch, and one index_select undoes the round-robin and drops the padding at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from sglang_dcp_block.dcp.layout import DcpLayout

# A long prefix is gathered in chunks, and every layer walks over the same chunks: keep all chunks of a batch.
_ORDERS_KEPT = 16


class GatherOrder(NamedTuple):
    """max_rows: rows each rank sends. order: (sum of lengths,) int64 into the (P * max_rows) gathered rows."""

    max_rows: int
    order: np.ndarray


def _exclusive_cumsum(x: np.ndarray) -> np.ndarray:
    return np.cumsum(x, axis=-1) - x


@lru_cache(maxsize=_ORDERS_KEPT)
def gather_order(starts: tuple[int, ...], lens: tuple[int, ...], layout: DcpLayout) -> GatherOrder:
    """Where every token of [starts[i], starts[i] + lens[i]), request after request, lies in the gathered buffer.

    Rank r's part begins at row r * max_rows and holds its tokens in order of request, then of position. The array
    is cached: treat it as read-only.

    Raises:
        ValueError: starts and lens differ in count, or one is negative.
    """
    if len(starts) != len(lens):
        raise ValueError(f"starts and lens must have one element per request, got {len(starts)} and {len(lens)}")
    start, length = np.array(starts, np.int64), np.array(lens, np.int64)
    if (start < 0).any() or (length < 0).any():
        raise ValueError(f"starts and lens must be at least 0, got {starts} and {lens}")
    ranks = np.arange(layout.dcp_size)[:, None]
    rows = layout.interval_len(start, length, ranks)  # (P, n)
    max_rows = int(rows.sum(axis=1).max())

    request = np.repeat(np.arange(len(lens)), length)
    position = np.arange(request.size) + (start - _exclusive_cumsum(length))[request]
    rank = layout.owner(position)
    # Row of the request's first token in its rank's part, less the row that token has in the rank's whole request.
    shift = _exclusive_cumsum(rows) - layout.local_len(start, ranks)
    index = rank * max_rows + layout.local_index(position) + shift[rank, request]
    index.flags.writeable = False
    return GatherOrder(max_rows, index)


@lru_cache(maxsize=_ORDERS_KEPT)
def _device_index(starts: tuple[int, ...], lens: tuple[int, ...], layout: DcpLayout, device: torch.device):
    """The order as an index tensor on ``device``: made once per batch, read by every layer."""
    index = torch.from_numpy(gather_order(starts, lens, layout).order.copy())
    if device.type == "cuda":
        # From pageable memory the copy would make the host wait for the stream.
        index = index.pin_memory()
    return index.to(device, non_blocking=True)


def _ints(values: Iterable[int] | torch.Tensor) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu":
            raise ValueError(f"prefix starts and lengths must lie on the CPU, got a tensor on {values.device}")
        values = values.tolist()
    return tuple(int(v) for v in values)


def _bytes_if_fp8(x: torch.Tensor) -> torch.Tensor:
    # A gather copies bytes, and neither NCCL's wrappers nor index_select know every fp8 kind.
    return x.view(torch.uint8) if x.element_size() == 1 else x


def gather_prefix(
    kv_a: torch.Tensor,
    k_pe: torch.Tensor,
    prefix_starts_cpu: Iterable[int] | torch.Tensor,
    prefix_lens_cpu: Iterable[int] | torch.Tensor,
    layout: DcpLayout,
    rank: int,
    all_gather_into_tensor: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """Dense prefix of every request from the rows that lie on the ranks. Every rank of the group must call it.

    Args:
        kv_a: (rows, ..., Da), this rank's rows in order of request, then of position.
        k_pe: (rows, ..., Dp), same rows and dtype.
        prefix_starts_cpu: n global first positions (Python ints or a CPU tensor).
        prefix_lens_cpu: n lengths in tokens over all ranks.
        all_gather_into_tensor: f(output, input) with output (P * max_rows, ...), of the DCP group.

    Returns:
        (sum of lengths, ..., Da + Dp), in order of request, then of position, the same on every rank.

    Raises:
        ValueError: kv_a or k_pe doesn't hold the rows that the layout gives this rank, or their dtypes differ.
    """
    starts, lens = _ints(prefix_starts_cpu), _ints(prefix_lens_cpu)
    max_rows = gather_order(starts, lens, layout).max_rows if lens else 0
    expected = int(layout.interval_len(np.array(starts, np.int64), np.array(lens, np.int64), rank).sum())
    for name, rows in (("kv_a", kv_a), ("k_pe", k_pe)):
        if rows.shape[0] != expected:
            raise ValueError(
                f"{name} must hold the {expected} rows that {layout} gives rank {rank}, got {rows.shape[0]}"
            )
    index = _device_index(starts, lens, layout, kv_a.device)
    return gather_rows(kv_a, k_pe, max_rows, index, layout.dcp_size, all_gather_into_tensor)


def gather_rows(
    kv_a: torch.Tensor,
    k_pe: torch.Tensor,
    max_rows: int,
    index: torch.Tensor,
    dcp_size: int,
    all_gather_into_tensor: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """Rows of all ranks in the order of ``index``. Every rank of the group must call it.

    Args:
        kv_a: (rows, ..., Da), k_pe: (rows, ..., Dp), of one dtype, rows <= max_rows.
        max_rows: rows that each rank sends, the same on all.
        index: (n,) int64 into the (P * max_rows) gathered rows, rank after rank.

    Returns:
        (n, ..., Da + Dp).

    Raises:
        ValueError: the dtypes differ.
    """
    if kv_a.dtype != k_pe.dtype:
        raise ValueError(f"kv_a and k_pe must have the same dtype, got {kv_a.dtype} and {k_pe.dtype}")
    width_a, rows = kv_a.shape[-1], kv_a.shape[0]
    row_shape = (*kv_a.shape[1:-1], width_a + k_pe.shape[-1])
    if max_rows == 0:
        return kv_a.new_empty((0, *row_shape))
    kv_a, k_pe, dtype = _bytes_if_fp8(kv_a), _bytes_if_fp8(k_pe), kv_a.dtype
    mine = kv_a.new_empty((max_rows, *row_shape))
    mine[:rows, ..., :width_a] = kv_a
    mine[:rows, ..., width_a:] = k_pe
    gathered = kv_a.new_empty((dcp_size * max_rows, *row_shape))
    all_gather_into_tensor(gathered, mine)
    return gathered.index_select(0, index).view(dtype)
