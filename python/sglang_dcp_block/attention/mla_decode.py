"""MLA decode over one rank's rows: a Triton kernel for the many query heads that a DCP rank has.

SGLang's decode kernel reads the latent KV once for every 16 heads and launches a program for every split that the
longest context could need. A DCP rank holds the heads of its whole group (128 in DeepSeek-V3) over few rows: most of
those programs are empty, and the others are bound by rereading. Here a program takes up to 64 heads, and the grid has
one row per piece of work:

- the rows of all requests are cut into about as many pieces as the GPU has room for, in proportion to their lengths;
- a request of one piece is finished at once; the pieces of others are joined by a second kernel (flash-decoding);
- a request without rows on this rank gives out = 0 and lse = -inf.

Which piece a program has is computed from the lengths on the device, and the grid from shapes alone, so a CUDA graph
may hold both launches.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

_LOG2E = 1.4426950408889634
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


class _Shape(NamedTuple):
    """Tile of one program. resident: how many of them a multiprocessor holds."""

    heads: int
    rows: int
    warps: int
    stages: int
    resident: int


#: By query heads: measured on an H200 at 576-wide bfloat16 rows (benchmark/decode.py).
_SHAPES = (
    (16, _Shape(16, 32, 4, 3, 2)),
    (32, _Shape(32, 32, 4, 3, 2)),
    (1 << 30, _Shape(64, 64, 8, 3, 1)),
)


@triton.jit
def _pieces(kv_indptr, requests, target, REQUESTS: tl.constexpr, ROWS: tl.constexpr):
    """Per request: rows, rows of one piece, and pieces: about ``target`` in all, in proportion to the rows."""
    i = tl.arange(0, REQUESTS)
    inside = i < requests
    begin = tl.load(kv_indptr + i, mask=inside, other=0)
    rows = tl.load(kv_indptr + i + 1, mask=inside, other=0) - begin
    total = tl.maximum(tl.sum(rows.to(tl.int64), 0), 1)
    share = ((rows.to(tl.int64) * target + total // 2) // total).to(tl.int32)
    size = tl.cdiv(tl.cdiv(rows, tl.maximum(share, 1)), ROWS) * ROWS
    return rows, size, tl.where(rows > 0, tl.cdiv(rows, tl.maximum(size, 1)), 0)


@triton.jit
def _pick(values, request, REQUESTS: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, REQUESTS) == request, values, 0), 0)


@triton.jit
def _attend_kernel(
    q_nope,
    q_rope,
    kv,
    kv_indptr,
    kv_indices,
    partial_out,
    partial_lse,
    out,
    lse,
    scale_log2e,
    requests,
    target,
    heads,
    stride_qn,
    stride_qh,
    stride_rn,
    stride_rh,
    stride_kv,
    stride_on,
    stride_oh,
    stride_ln,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    item = tl.program_id(1)
    rows, size, pieces = _pieces(kv_indptr, requests, target, REQUESTS, ROWS)
    upto = tl.cumsum(pieces, 0)
    request = tl.sum((upto <= item).to(tl.int32), 0)
    if request < requests:
        mine = _pick(pieces, request, REQUESTS)
        piece = item - (_pick(upto, request, REQUESTS) - mine)
        step = _pick(size, request, REQUESTS)
        first = tl.load(kv_indptr + request)
        low = piece * step
        high = tl.minimum(low + step, _pick(rows, request, REQUESTS))

        head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        real = head < heads
        d, r = tl.arange(0, DIM), tl.arange(0, ROPE)
        n = request.to(tl.int64)
        nope_ptrs = q_nope + n * stride_qn + head[:, None] * stride_qh + d[None, :]
        rope_ptrs = q_rope + n * stride_rn + head[:, None] * stride_rh + r[None, :]
        nope = tl.load(nope_ptrs, mask=real[:, None], other=0.0)
        rope = tl.load(rope_ptrs, mask=real[:, None], other=0.0)

        peak = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
        for start in tl.range(low, high, ROWS, num_stages=STAGES):
            j = start + tl.arange(0, ROWS)
            inside = j < high
            row = tl.load(kv_indices + first + j, mask=inside, other=0).to(tl.int64)
            latent = tl.load(kv + row[:, None] * stride_kv + d[None, :], mask=inside[:, None], other=0.0)
            key = tl.load(kv + row[:, None] * stride_kv + DIM + r[None, :], mask=inside[:, None], other=0.0)
            score = tl.dot(nope, tl.trans(latent).to(nope.dtype))
            score = tl.dot(rope, tl.trans(key).to(rope.dtype), score)
            score = tl.where(inside[None, :], score * scale_log2e, -float("inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            shrink = tl.exp2(peak - new_peak)
            weight = tl.exp2(score - new_peak[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None]
            acc = tl.dot(weight.to(nope.dtype), latent.to(nope.dtype), acc)
            peak = new_peak
        acc = acc / total[:, None]
        joined = (peak + tl.log2(total)) * _LN2
        if mine == 1:
            out_ptrs = out + n * stride_on + head[:, None] * stride_oh + d[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=real[:, None])
            tl.store(lse + n * stride_ln + head, joined, mask=real)
        else:
            slot = item.to(tl.int64) * heads + head
            tl.store(partial_out + slot[:, None] * DIM + d[None, :], acc, mask=real[:, None])
            tl.store(partial_lse + slot, joined, mask=real)


@triton.jit
def _join_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    kv_indptr,
    requests,
    target,
    heads,
    stride_on,
    stride_oh,
    stride_ln,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
):
    request = tl.program_id(0)
    _, _, pieces = _pieces(kv_indptr, requests, target, REQUESTS, ROWS)
    mine = _pick(pieces, request, REQUESTS)
    if mine != 1:
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        real = head < heads
        d = tl.arange(0, DIM)
        first = _pick(tl.cumsum(pieces, 0), request, REQUESTS) - mine
        first_slot = first.to(tl.int64) * heads + head
        peak = tl.full([HEADS], -float("inf"), tl.float32)
        for piece in range(mine):
            peak = tl.maximum(peak, tl.load(partial_lse + first_slot + piece * heads, mask=real, other=0.0))
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
        for piece in tl.range(mine, num_stages=4):
            slot = first_slot + piece * heads
            weight = tl.exp(tl.load(partial_lse + slot, mask=real, other=0.0) - peak)
            part = tl.load(partial_out + slot[:, None] * DIM + d[None, :], mask=real[:, None], other=0.0)
            acc += part * weight[:, None]
            total += weight
        # mine == 0: no row of this request lies here.
        acc = tl.where(mine > 0, acc / tl.where(mine > 0, total, 1.0)[:, None], 0.0)
        joined = tl.where(mine > 0, peak + tl.log(tl.where(mine > 0, total, 1.0)), -float("inf"))
        n = request.to(tl.int64)
        out_ptrs = out + n * stride_on + head[:, None] * stride_oh + d[None, :]
        tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=real[:, None])
        tl.store(lse + n * stride_ln + head, joined, mask=real)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _shape(heads: int) -> _Shape:
    return next(shape for limit, shape in _SHAPES if heads <= limit)


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    scale: float,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attention of one query token per request over the rows of ``kv`` that ``kv_indices`` names.

    Args:
        q_nope: (n, H, D) and q_rope: (n, H, R), any strides over n and H, last stride 1. D and R powers of two.
        kv: (rows, 1, D + R) or (rows, D + R), last stride 1; the first D elements are key and value, the rest key only.
        kv_indptr: (n + 1,) int32 and kv_indices: int; rows of request i at kv_indptr[i] .. kv_indptr[i + 1].
        scale: of the scores, before the softmax.
        partial_out: float32 (..., S, D), contiguous, and partial_lse: float32 (..., S), contiguous: scratch of at least
            n * H * S * D and n * H * S elements with S >= 2; S bounds the pieces one request is cut into.
        out: (n, H, D), last stride 1. lse: (n, H) float32, contiguous in H: natural logarithm. Both are overwritten.

    Raises:
        ValueError: a scratch tensor is too small or not contiguous.
    """
    n, heads, dim = out.shape
    if n == 0:
        return
    splits = partial_out.shape[-2]
    shape = _shape(heads)
    tiles = triton.cdiv(heads, shape.heads)
    target = max(1, min(splits, _multiprocessors(out.device) * shape.resident // tiles))
    items = target if n == 1 else n + target
    for name, scratch, width in (("partial_out", partial_out, dim), ("partial_lse", partial_lse, 1)):
        if not scratch.is_contiguous() or scratch.numel() < items * heads * width:
            raise ValueError(
                f"{name} must be contiguous with at least {items * heads * width} elements, "
                f"got shape {tuple(scratch.shape)}, stride {scratch.stride()}"
            )
    requests = triton.next_power_of_2(n)
    _attend_kernel[(tiles, items)](
        q_nope,
        q_rope,
        kv,
        kv_indptr,
        kv_indices,
        partial_out,
        partial_lse,
        out,
        lse,
        scale * _LOG2E,
        n,
        target,
        heads,
        q_nope.stride(0),
        q_nope.stride(1),
        q_rope.stride(0),
        q_rope.stride(1),
        kv.stride(0),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        DIM=dim,
        ROPE=q_rope.shape[-1],
        HEADS=shape.heads,
        ROWS=shape.rows,
        STAGES=shape.stages,
        REQUESTS=requests,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    # One head per program while that fills the GPU late, several once there are plenty.
    join_heads = 1 if n * heads <= 2048 else 4
    _join_kernel[(n, triton.cdiv(heads, join_heads))](
        partial_out,
        partial_lse,
        out,
        lse,
        kv_indptr,
        n,
        target,
        heads,
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        DIM=dim,
        HEADS=join_heads,
        ROWS=shape.rows,
        REQUESTS=requests,
        num_warps=4,
    )
