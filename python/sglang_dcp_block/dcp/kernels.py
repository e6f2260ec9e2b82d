"""The rule inside Triton kernels, and the kernels that pick out one rank's rows.

The device functions are twins of the methods of :mod:`sglang_dcp_block.dcp.layout` and are tested against them. Their
arguments must be >= 0, because Triton's ``//`` and ``%`` round toward zero. P, B and the rank are ``constexpr``:
they never change in a process, and a constant divisor costs a multiplication instead of a division.

Nothing here reads a value back from the GPU: grids depend on shapes only, so a CUDA graph may hold these launches.
With ``TRITON_INTERPRET=1`` in the environment at import the same code runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout

# One program moves this many indices per step. A request of 128K tokens over 8 ranks is 16 steps, each with its own
# program; longer ones loop, so that a batch of short requests doesn't pay for thousands of empty programs.
_TILE = 1024
_MAX_SPLITS = 32

# -- the rule, on the device -------------------------------------------------------------------------------------


@triton.jit
def shift(page, P: tl.constexpr):
    """Rank at which a virtual page begins under rotation."""
    return (page + page // P) % P


@triton.jit
def turn(rank, slot, P: tl.constexpr, V: tl.constexpr):
    """Rank whose part of the slot's page ``rank`` would hold without rotation. V: slots of a virtual page."""
    return (rank + P - shift(slot // V, P)) % P


@triton.jit
def owner(t, P: tl.constexpr, B: tl.constexpr, V: tl.constexpr = 0):
    """Rank that holds position (or widened slot) t; under rotation (V > 0, the slots of a virtual page) slot t."""
    block = t // B
    if V > 0:
        block += shift(t // V, P)
    return block % P


@triton.jit
def local_index(t, P: tl.constexpr, B: tl.constexpr):
    """Row of t on its owner."""
    return (t // (P * B)) * B + t % B


@triton.jit
def position(row, rank, P: tl.constexpr, B: tl.constexpr):
    """Position that lies in a row of a rank: the inverse of local_index."""
    return ((row // B) * P + rank) * B + row % B


@triton.jit
def perm(t, P: tl.constexpr, B: tl.constexpr):
    """Token round-robin id of the same rank and row."""
    return local_index(t, P, B) * P + owner(t, P, B)


@triton.jit
def local_len(n, rank, P: tl.constexpr, B: tl.constexpr):
    """Tokens of [0, n) on a rank."""
    rest = n % (P * B) - rank * B
    return (n // (P * B)) * B + tl.minimum(tl.maximum(rest, 0), B)


def rotation_constants(layout: DcpLayout) -> dict[str, int]:
    """Constants that a kernel with :func:`owner` takes beside P and B."""
    return {"V": layout.page_slots} if isinstance(layout, RotatedLayout) else {}


# -- index kernels -----------------------------------------------------------------------------------------------


@triton.jit
def _rows_from_table_kernel(
    table_ptr,
    table_stride,
    req_ptr,
    len_ptr,
    indptr_ptr,
    start_ptr,
    out_ptr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    length = tl.load(len_ptr + request).to(tl.int32)
    out_begin = tl.load(indptr_ptr + request).to(tl.int64)
    # 4,096 requests of 1M tokens exceed 2**31 elements.
    row_begin = tl.load(req_ptr + request).to(tl.int64) * table_stride
    first = 0
    if start_ptr is not None:
        first = local_len(tl.load(start_ptr + request).to(tl.int32), RANK, P, B)
    for tile in range(tl.program_id(1) * TILE, length, SPLITS * TILE):
        j = tile + tl.arange(0, TILE)
        mask = j < length
        slot = tl.load(table_ptr + row_begin + position(first + j, RANK, P, B), mask=mask, other=0)
        tl.store(out_ptr + out_begin + j, local_index(slot, P, B), mask=mask)


@triton.jit
def _slots_from_stream_kernel(
    stream_ptr,
    stream_indptr_ptr,
    len_ptr,
    indptr_ptr,
    start_ptr,
    out_ptr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    length = tl.load(len_ptr + request).to(tl.int32)
    out_begin = tl.load(indptr_ptr + request).to(tl.int64)
    # Address of the request's position 0, which lies before the stream's first element of a chunk.
    position_zero = tl.load(stream_indptr_ptr + request).to(tl.int64)
    first = 0
    if start_ptr is not None:
        start = tl.load(start_ptr + request).to(tl.int32)
        first = local_len(start, RANK, P, B)
        position_zero -= start
    for tile in range(tl.program_id(1) * TILE, length, SPLITS * TILE):
        j = tile + tl.arange(0, TILE)
        mask = j < length
        slot = tl.load(stream_ptr + position_zero + position(first + j, RANK, P, B), mask=mask, other=0)
        tl.store(out_ptr + out_begin + j, slot, mask=mask)


@triton.jit
def _rotated_lens_kernel(
    table_ptr,
    table_stride,
    req_ptr,
    len_ptr,
    out_ptr,
    n,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    TILE: tl.constexpr,
):
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    length = tl.load(len_ptr + i, mask=i < n, other=0)
    row_begin = tl.load(req_ptr + i, mask=i < n, other=0).to(tl.int64) * table_stride
    # An empty request has no last slot, and what its row of the table holds is anything.
    last_slot = tl.load(table_ptr + row_begin + length - 1, mask=length > 0, other=0)
    tl.store(out_ptr + i, local_len(length, turn(RANK, last_slot, P, V), P, B), mask=i < n)


@triton.jit
def _gather_order_kernel(
    table_ptr,
    table_stride,
    req_ptr,
    len_ptr,
    indptr_ptr,
    out_indptr_ptr,
    out_ptr,
    rows_per_rank,
    P: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    length = tl.load(len_ptr + request).to(tl.int32)
    row = tl.load(indptr_ptr + request).to(tl.int64)
    out_begin = tl.load(out_indptr_ptr + request).to(tl.int64)
    row_begin = tl.load(req_ptr + request).to(tl.int64) * table_stride
    for tile in range(tl.program_id(1) * TILE, length, SPLITS * TILE):
        t = tile + tl.arange(0, TILE)
        mask = t < length
        slot = tl.load(table_ptr + row_begin + t, mask=mask, other=0)
        index = owner(slot, P, B, V).to(tl.int64) * rows_per_rank + row + local_index(t, P, B)
        tl.store(out_ptr + out_begin + t, index, mask=mask)


def _check_vectors(count: int, **vectors: torch.Tensor | None) -> None:
    for name, vector in vectors.items():
        if vector is None:
            continue
        if vector.dim() != 1 or (vector.numel() > 1 and vector.stride(0) != 1):
            raise ValueError(
                f"{name} must be a contiguous vector, got shape {tuple(vector.shape)}, stride {vector.stride()}"
            )
        if vector.numel() < count:
            raise ValueError(f"{name} must have at least {count} elements, got {vector.numel()}")


def _check_table(req_to_token: torch.Tensor) -> None:
    if req_to_token.dim() != 2 or req_to_token.stride(1) != 1:
        raise ValueError(
            f"req_to_token must be a matrix with last stride 1, got shape {tuple(req_to_token.shape)}, "
            f"stride {req_to_token.stride()}"
        )


def _splits(elements: int) -> int:
    """Programs per request for requests of at most so many elements."""
    return max(1, min(_MAX_SPLITS, triton.cdiv(elements, _TILE)))


def shard_rows_from_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    local_lens: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    starts: torch.Tensor | None = None,
) -> None:
    """Write the physical rows of this rank's tokens of every request, in order of position.

    The j-th token of ``rank`` at or after ``starts[i]`` has position p = position(local_len(starts[i]) + j), and
    ``out[indptr[i] + j] = local_index(req_to_token[req_pool_indices[i], p])``.

    Args:
        req_to_token: (R, T) int32 or int64, widened slot ids by request row and position; last stride 1.
        req_pool_indices: (n,) int32 or int64, request rows.
        local_lens: (n,) int32 or int64, tokens of this rank to write: ``layout.interval_len(start, length, rank)``.
        indptr: (n,) or (n + 1,) int32 or int64, where a request's rows begin in ``out``.
        out: int32 or int64 vector; elements outside the written runs are left alone.
        starts: (n,) int32 or int64, global first positions; None is 0 for all.

    Raises:
        ValueError: a tensor's shape or stride doesn't fit (values on the device are not read).
    """
    n = req_pool_indices.numel()
    if n == 0:
        return
    layout.local_len(0, rank)  # refuses a rank outside the group, and rotation
    _check_table(req_to_token)
    _check_vectors(n, req_pool_indices=req_pool_indices, local_lens=local_lens, indptr=indptr, starts=starts)
    _check_vectors(0, out=out)
    splits = _splits(layout.local_len(req_to_token.shape[1], 0))  # rank 0 holds the most
    _rows_from_table_kernel[(n, splits)](
        req_to_token,
        req_to_token.stride(0),
        req_pool_indices,
        local_lens,
        indptr,
        starts,
        out,
        RANK=rank,
        P=layout.dcp_size,
        B=layout.block_size,
        SPLITS=splits,
        TILE=_TILE,
    )


def shard_slots_from_stream(
    stream: torch.Tensor,
    stream_indptr: torch.Tensor,
    local_lens: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
    layout: DcpLayout,
    rank: int,
    starts: torch.Tensor | None = None,
) -> None:
    """Write this rank's share of a packed stream of widened slot ids, still widened, in order of position.

    The j-th token of ``rank`` at or after ``starts[i]`` has position p = position(local_len(starts[i]) + j), and
    ``out[indptr[i] + j] = stream[stream_indptr[i] + p - starts[i]]``.

    Args:
        stream: (total,) int32 or int64, the slot ids of [starts[i], starts[i] + length) of request 0, 1, ...
        stream_indptr: (n,) or (n + 1,) int32 or int64, where a request begins in ``stream``.
        local_lens: (n,) int32 or int64, tokens of this rank to write: ``layout.interval_len(start, length, rank)``.
        indptr: (n,) or (n + 1,) int32 or int64, where a request's slots begin in ``out``.
        out: int32 or int64 vector that doesn't overlap ``stream``; elements outside the written runs are left alone.
        starts: (n,) int32 or int64, global first positions, anywhere in a block or cycle; None is 0 for all.

    Raises:
        ValueError: a tensor's shape or stride doesn't fit (values on the device are not read).
    """
    n = local_lens.numel()
    if n == 0:
        return
    layout.local_len(0, rank)  # refuses a rank outside the group, and rotation
    _check_vectors(n, stream_indptr=stream_indptr, local_lens=local_lens, indptr=indptr, starts=starts)
    _check_vectors(0, stream=stream, out=out)
    splits = _splits(layout.local_len(stream.numel(), 0))  # rank 0 holds the most
    _slots_from_stream_kernel[(n, splits)](
        stream,
        stream_indptr,
        local_lens,
        indptr,
        starts,
        out,
        RANK=rank,
        P=layout.dcp_size,
        B=layout.block_size,
        SPLITS=splits,
        TILE=_TILE,
    )


# -- under rotation ----------------------------------------------------------------------------------------------------
# A row has one number and one place in the pool on every rank (``layout.plain``, rank 0 names them all); whose rows
# the last ones are is in the slots.


def rotated_local_lens(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    layout: RotatedLayout,
    rank: int,
) -> torch.Tensor:
    """Tokens of [0, lens[i]) on ``rank``, (n,) in the dtype of ``lens``: by the page of each request's last slot.

    Args:
        req_to_token: (R, T) int32 or int64, widened slot ids by request row and position; last stride 1.
        req_pool_indices: (n,) int32 or int64, request rows. lens: (n,) int32 or int64, 0 <= lens[i] <= T.

    Raises:
        ValueError: a tensor's shape or stride doesn't fit (values on the device are not read).
    """
    layout.check_rank(rank)
    _check_table(req_to_token)
    n = lens.numel()
    _check_vectors(n, req_pool_indices=req_pool_indices, lens=lens)
    out = torch.empty_like(lens)
    if n:
        _rotated_lens_kernel[(triton.cdiv(n, _TILE),)](
            req_to_token,
            req_to_token.stride(0),
            req_pool_indices,
            lens,
            out,
            n,
            RANK=rank,
            P=layout.dcp_size,
            B=layout.block_size,
            V=layout.page_slots,
            TILE=_TILE,
        )
    return out


def rotated_gather_order(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    indptr: torch.Tensor,
    rows_per_rank: int,
    tokens: int,
    layout: RotatedLayout,
) -> torch.Tensor:
    """Where every token of [0, lens[i]), request after request, lies in what all ranks have gathered.

    Each rank sent ``rows_per_rank`` rows: for request i the rows 0 .. ``layout.plain.local_len(lens[i], 0)`` - 1 from
    ``indptr[i]`` on, its own or not.

    Args:
        req_to_token, req_pool_indices, lens: as for :func:`rotated_local_lens`.
        indptr: (n,) or (n + 1,) int32 or int64.
        tokens: sum of ``lens``.

    Returns:
        (tokens,) int64 into the (P * rows_per_rank) gathered rows.

    Raises:
        ValueError: a tensor's shape or stride doesn't fit (values on the device are not read).
    """
    _check_table(req_to_token)
    n = lens.numel()
    _check_vectors(n, req_pool_indices=req_pool_indices, lens=lens, indptr=indptr)
    out = torch.empty(tokens, dtype=torch.int64, device=lens.device)
    if tokens:
        splits = _splits(req_to_token.shape[1])
        _gather_order_kernel[(n, splits)](
            req_to_token,
            req_to_token.stride(0),
            req_pool_indices,
            lens,
            indptr,
            torch.cumsum(lens, dim=0) - lens,
            out,
            rows_per_rank,
            P=layout.dcp_size,
            B=layout.block_size,
            V=layout.page_slots,
            SPLITS=splits,
            TILE=_TILE,
        )
    return out
