"""A rank that holds no token of a request must add nothing to the merge: out = 0, lse = -inf.

With P = 8 and B = 64 every request of at most 448 tokens leaves a rank empty, and CUDA-graph padding rows do so
always. Attention kernels leave such rows undefined (0 / 0, or whatever an earlier step left there), and the merge
multiplies by a weight of 0, which doesn't remove a NaN.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp_block.dcp.kernels import local_len
from sglang_dcp_block.dcp.layout import DcpLayout

_HEAD_TILE = 16
# All zero bits are 0.0 in every float format, so the kernel needn't know which one it clears.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def _guard_empty_shards_kernel(
    out_ptr,
    lse_ptr,
    len_ptr,
    heads,
    out_stride_n,
    out_stride_h,
    out_stride_d,
    lse_stride_n,
    lse_stride_h,
    len_stride,
    DIM: tl.constexpr,
    DIM_TILE: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    RANK: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    if local_len(tl.load(len_ptr + request * len_stride), RANK, P, B) == 0:
        head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)
        head_mask = head < heads
        dim = tl.arange(0, DIM_TILE)
        out_ptrs = out_ptr + request * out_stride_n + head[:, None] * out_stride_h + dim[None, :] * out_stride_d
        zero = tl.zeros((HEAD_TILE, DIM_TILE), out_ptr.dtype.element_ty)
        tl.store(out_ptrs, zero, mask=head_mask[:, None] & (dim[None, :] < DIM))
        minus_inf = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
        tl.store(lse_ptr + request * lse_stride_n + head * lse_stride_h, minus_inf, mask=head_mask)


def guard_empty_shards(
    out: torch.Tensor, lse: torch.Tensor, seq_lens: torch.Tensor, layout: DcpLayout, rank: int
) -> None:
    """In place: ``out[i] = 0`` and ``lse[i] = -inf`` where this rank holds no token of request i.

    Other rows are not touched. One launch whose grid depends on shapes only; ``seq_lens`` is read on the device, so
    a CUDA graph that holds the launch follows the lengths of each replay. Either base of the logarithm will do.

    Args:
        out: (n, H, D), any float dtype, any strides.
        lse: (n, H) float32, any strides.
        seq_lens: (n,) int32 or int64, global lengths >= 0 on the same device.

    Raises:
        ValueError: shapes or the dtype of lse don't fit.
    """
    if out.dim() != 3 or lse.shape != out.shape[:2] or seq_lens.shape != out.shape[:1]:
        raise ValueError(
            "out must be (n, H, D), lse (n, H) and seq_lens (n,), "
            f"got {tuple(out.shape)}, {tuple(lse.shape)} and {tuple(seq_lens.shape)}"
        )
    if lse.dtype != torch.float32:
        raise ValueError(f"lse must be float32, got {lse.dtype}")
    n, heads, dim = out.shape
    if out.numel() == 0:
        return
    layout.local_len(0, rank)  # refuses a rank outside the group
    bits = out.view(_BITS[out.element_size()])
    _guard_empty_shards_kernel[(n, triton.cdiv(heads, _HEAD_TILE))](
        bits,
        lse,
        seq_lens,
        heads,
        *bits.stride(),
        *lse.stride(),
        seq_lens.stride(0),
        DIM=dim,
        DIM_TILE=triton.next_power_of_2(dim),
        HEAD_TILE=_HEAD_TILE,
        RANK=rank,
        P=layout.dcp_size,
        B=layout.block_size,
    )
