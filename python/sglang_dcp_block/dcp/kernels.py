"""The rule inside Triton kernels, and the kernels that pick out one rank's rows.

The device functions are twins of :class:`sglang_dcp_block.dcp.layout.DcpLayout` and are tested against it. Their
arguments must be >= 0, because Triton's ``//`` and ``%`` round toward zero. P, B and the rank are ``constexpr``:
they never change in a process, and a constant divisor costs a multiplication instead of a division.

Nothing here reads a value back from the GPU: grids depend on shapes only, so a CUDA graph may hold these launches.
With ``TRITON_INTERPRET=1`` in the environment at import the same code runs on CPU tensors.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.layout import DcpLayout

# One program moves this many indices per step. A request of 128K tokens over 8 ranks is 16 steps, each with its own
# program; longer ones loop, so that a batch of short requests doesn't pay for thousands of empty programs.
_TILE = 1024
_MAX_SPLITS = 32

# -- the rule, on the device -------------------------------------------------------------------------------------


@triton.jit
def owner(t, P: tl.constexpr, B: tl.constexpr):
    """Rank that holds position (or widened slot) t."""
    return (t // B) % P


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


def _splits(positions: int, layout: DcpLayout) -> int:
    """Programs per request for requests of at most ``positions`` tokens. Rank 0 holds the most."""
    return max(1, min(_MAX_SPLITS, triton.cdiv(layout.local_len(positions, 0), _TILE)))


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
    layout.local_len(0, rank)  # refuses a rank outside the group
    if req_to_token.dim() != 2 or req_to_token.stride(1) != 1:
        raise ValueError(
            f"req_to_token must be a matrix with last stride 1, got shape {tuple(req_to_token.shape)}, "
            f"stride {req_to_token.stride()}"
        )
    _check_vectors(n, req_pool_indices=req_pool_indices, local_lens=local_lens, indptr=indptr, starts=starts)
    _check_vectors(0, out=out)
    splits = _splits(req_to_token.shape[1], layout)
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
    layout.local_len(0, rank)  # refuses a rank outside the group
    _check_vectors(n, stream_indptr=stream_indptr, local_lens=local_lens, indptr=indptr, starts=starts)
    _check_vectors(0, stream=stream, out=out)
    splits = _splits(stream.numel(), layout)
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
