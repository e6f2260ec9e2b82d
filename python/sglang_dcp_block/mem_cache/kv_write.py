"""Write new rows into this rank's KV pool: one kernel that selects owned tokens and scatters them."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.kernels import local_index, owner, rotation_constants
from sglang_dcp_block.dcp.layout import DcpLayout


@triton.jit
def _write_mla_kv_kernel(
    kv_ptr,
    loc_ptr,
    nope_ptr,
    rope_ptr,
    skip,
    kv_stride,
    nope_stride,
    rope_stride,
    NOPE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    NOPE_TILE: tl.constexpr,
    ROPE_TILE: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    V: tl.constexpr = 0,
    USE_GDC: tl.constexpr = False,
):
    # The token index times a source stride, and a row times the pool's stride, both exceed 2**31 in large pools.
    token = tl.program_id(0).to(tl.int64)
    if USE_GDC:
        tl.extra.cuda.gdc_wait()
    loc = tl.load(loc_ptr + token).to(tl.int64)
    # Division rounds toward zero, so a negative id has to go before the rule is asked.
    written = (loc >= 0) & (loc != skip)
    if written & (owner(tl.maximum(loc, 0), P, B, V) == RANK):
        row_ptr = kv_ptr + local_index(loc, P, B) * kv_stride
        nope = tl.arange(0, NOPE_TILE)
        nope_mask = nope < NOPE_DIM
        nope_row = tl.load(nope_ptr + token * nope_stride + nope, mask=nope_mask)
        if ROPE_DIM > 0:
            rope = tl.arange(0, ROPE_TILE)
            rope_mask = rope < ROPE_DIM
            rope_row = tl.load(rope_ptr + token * rope_stride + rope, mask=rope_mask)
            tl.store(row_ptr + NOPE_DIM + rope, rope_row, mask=rope_mask)
        tl.store(row_ptr + nope, nope_row, mask=nope_mask)
    if USE_GDC:
        tl.extra.cuda.gdc_launch_dependents()


@lru_cache(maxsize=1)
def _dependent_launch() -> dict[str, bool]:
    """Launch options that let the next kernel start before this one has drained, where the GPU has that."""
    from sglang.kernels.jit.utils import is_arch_support_pdl

    return {"USE_GDC": True, "launch_pdl": True} if is_arch_support_pdl() else {}


def _check_rows_of_tokens(name: str, x: torch.Tensor, tokens: int) -> None:
    middle = x.shape[1:-1]
    if x.dim() not in (2, 3) or x.shape[0] < tokens or any(d != 1 for d in middle) or x.stride(-1) != 1:
        raise ValueError(
            f"{name} must be ({tokens}, D) or ({tokens}, 1, D) with last stride 1, "
            f"got shape {tuple(x.shape)}, stride {x.stride()}"
        )


def check_pool_rows(rows: int, layout: DcpLayout) -> None:
    """Refuse a pool in which a widened slot below rows * P could lie in a row past the end.

    Rows 0 .. rows - 1 of all ranks are exactly the slots 0 .. rows * P - 1 if B divides ``rows``; SGLang checks slots
    against rows * P, so that check holds under the block rule as well.

    Raises:
        ValueError: B doesn't divide rows.
    """
    needed = layout.plain.local_len(rows * layout.dcp_size, 0)  # rank 0 holds the most
    if needed > rows:
        raise ValueError(
            f"a KV pool of {rows} rows must be a multiple of dcp_block_size={layout.block_size}: "
            f"its slots would take {needed} rows on rank 0"
        )


def write_mla_kv(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    k_nope: torch.Tensor,
    k_rope: torch.Tensor | None,
    layout: DcpLayout,
    rank: int,
    *,
    reserved_skip_index: int = 0,
) -> None:
    """Scatter new rows: ``kv_buffer[local_index(loc[i])] = k_nope[i] ++ k_rope[i]`` for the tokens this rank owns.

    Tokens of other ranks are not even loaded. A negative slot and ``reserved_skip_index`` (slot 0 takes the writes of
    CUDA-graph padding) are skipped. Two tokens with the same slot race.

    Args:
        kv_buffer: (rows, 1, D) or (rows, D) of the pool's store dtype, fp8 pools as uint8; D >= Dn + Dr.
        loc: (n,) int32 or int64, widened slot ids.
        k_nope: (n, 1, Dn) or (n, Dn), same dtype as kv_buffer, any token stride.
        k_rope: (n, 1, Dr) or (n, Dr), likewise; None or Dr = 0 writes k_nope alone.
        reserved_skip_index: the widened slot that is never written; -1 for none.

    Raises:
        ValueError: a shape, stride or dtype doesn't fit, or the pool's rows are no multiple of B.
    """
    tokens = loc.numel()
    if tokens == 0:
        return
    layout.check_rank(rank)
    check_pool_rows(kv_buffer.shape[0], layout)
    _check_rows_of_tokens("kv_buffer", kv_buffer, 0)
    _check_rows_of_tokens("k_nope", k_nope, tokens)
    if k_rope is not None and k_rope.shape[-1] == 0:
        k_rope = None
    if k_rope is not None:
        _check_rows_of_tokens("k_rope", k_rope, tokens)
    if loc.dim() != 1 or (tokens > 1 and loc.stride(0) != 1):
        raise ValueError(f"loc must be a contiguous vector, got shape {tuple(loc.shape)}, stride {loc.stride()}")
    nope_dim, rope_dim = k_nope.shape[-1], 0 if k_rope is None else k_rope.shape[-1]
    if nope_dim + rope_dim > kv_buffer.shape[-1]:
        raise ValueError(f"a row of {nope_dim} + {rope_dim} elements must fit a pool row of {kv_buffer.shape[-1]}")
    if any(x is not None and x.dtype != kv_buffer.dtype for x in (k_nope, k_rope)):
        raise ValueError(
            f"k_nope and k_rope must have the pool's dtype {kv_buffer.dtype}, "
            f"got {k_nope.dtype} and {None if k_rope is None else k_rope.dtype}"
        )
    _write_mla_kv_kernel[(tokens,)](
        kv_buffer,
        loc,
        k_nope,
        k_rope,
        reserved_skip_index,
        kv_buffer.stride(0),
        k_nope.stride(0),
        0 if k_rope is None else k_rope.stride(0),
        NOPE_DIM=nope_dim,
        ROPE_DIM=rope_dim,
        NOPE_TILE=triton.next_power_of_2(nope_dim),
        ROPE_TILE=triton.next_power_of_2(max(rope_dim, 1)),
        RANK=rank,
        P=layout.dcp_size,
        B=layout.block_size,
        **rotation_constants(layout),
        **(_dependent_launch() if kv_buffer.is_cuda else {}),
    )


def write_rows(buffer: torch.Tensor, loc: torch.Tensor, rows: torch.Tensor, layout: DcpLayout, rank: int) -> None:
    """``buffer[local_index(loc[i])] = rows[i]`` for the tokens this rank owns: keys, or values, of all heads.

    As :func:`write_mla_kv` with rows in one piece.

    Args:
        buffer: (pool rows, D) and rows: (n, D) of one dtype. loc: (n,) int32 or int64, widened slot ids.
    """
    write_mla_kv(buffer, loc, rows, None, layout, rank)
