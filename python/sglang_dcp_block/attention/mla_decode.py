"""MLA decode over one rank's rows, for the many query heads that a DCP rank has.

SGLang's decode kernel reads the latent KV once for every 16 heads and launches a program for every split that the
longest context could need. A DCP rank holds the heads of its whole group (128 in DeepSeek-V3) over few rows: most of
those programs are empty, and the others are bound by rereading. Here the work is planned once per step, on the device:

- the rows of all requests are cut into pieces that keep every multiprocessor equally busy (:func:`plan_pieces`);
- as many programs as the GPU holds take the pieces in turns, up to 64 heads at a time;
- a request of one piece is finished at once; the pieces of others are joined by a second kernel (flash-decoding);
- a request without rows on this rank gives out = 0 and lse = -inf.

Grids follow from shapes alone, so a CUDA graph may hold every launch. On Hopper, 16-bit KV goes through the kernel of
mla_decode_hopper.py; other KV and other GPUs through the one here.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_dcp_block.attention import mla_decode_hopper

_LOG2E = 1.4426950408889634
_LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

#: Pieces begin at multiples of this many rows of their request: at tiles of the Hopper kernel.
PIECE_ROWS = mla_decode_hopper.ROWS
#: Rounds of pieces per program that a plan may have.
_ROUNDS: tl.constexpr = tl.constexpr(4)
#: What the planner counts beside the rows, in tiles of PIECE_ROWS rows; measured on an H200. For each piece: queries
#: are loaded, results stored.
_PIECE_COST: tl.constexpr = tl.constexpr(1.5)
#: If any request is cut: the pieces' results are joined, ...
_JOIN_COST: tl.constexpr = tl.constexpr(2.5)
#: ... and for each of these pieces that a program has on average: its result is written in float32 and read again.
_PART_COST: tl.constexpr = tl.constexpr(2.75)


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
def _piece_tiles(tiles, workers, slots):
    """Tiles of the largest piece: of 32 ways to cut, the cheapest by the costs above, and the coarsest of equals."""
    way = tl.arange(0, 32)
    most = tl.max(tiles, 0)
    total = tl.maximum(tl.sum(tiles, 0), 1)
    # 1 .. 4 rounds of the programs, or a little less: requests of unequal lengths leave remainders. The last is no cut.
    wanted = tl.minimum(workers * (1 + way // 8), slots).to(tl.float32) * (1.0 - (way % 8).to(tl.float32) / 16)
    cuts = tl.maximum((wanted * most.to(tl.float32) / total.to(tl.float32) + 0.001).to(tl.int32), 1)
    cuts = tl.where(way == 31, 1, cuts)
    size = tl.maximum(tl.cdiv(most, cuts), 1)
    each = tl.cdiv(tiles[None, :], size[:, None])
    pieces = tl.sum(each, 1)
    parts = tl.sum(tl.where(each > 1, each, 0), 1)
    cost = tl.cdiv(pieces, workers).to(tl.float32) * (size.to(tl.float32) + _PIECE_COST)
    cost += tl.where(parts > 0, _JOIN_COST + _PART_COST * parts.to(tl.float32) / workers, 0.0)
    cost = tl.where((pieces <= slots) | (cuts == 1), cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), size, 0), 0)


@triton.jit
def _plan_kernel(
    kv_indptr,
    counts,
    joins,
    work,
    requests,
    workers,
    slots,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    PIECES: tl.constexpr,
):
    i = tl.arange(0, REQUESTS)
    inside = i < requests
    begin = tl.load(kv_indptr + i, mask=inside, other=0)
    rows = tl.load(kv_indptr + i + 1, mask=inside, other=0) - begin
    tiles = tl.cdiv(rows, ROWS)
    pieces = tl.cdiv(tiles, _piece_tiles(tiles, workers, slots))
    step = tl.cdiv(tiles, tl.maximum(pieces, 1)) * ROWS
    first = tl.cumsum(pieces, 0) - pieces
    parts = tl.where(pieces > 1, pieces, 0)
    slot = tl.cumsum(parts, 0) - parts
    joined = inside & (pieces != 1)
    tl.store(counts, tl.sum(pieces, 0))
    tl.store(counts + 1, tl.sum(joined.to(tl.int32), 0))
    join = joins + 4 * (tl.cumsum(joined.to(tl.int32), 0) - 1)
    tl.store(join, i, mask=joined)
    tl.store(join + 1, slot, mask=joined)
    tl.store(join + 2, pieces, mask=joined)
    for start in range(0, tl.max(pieces, 0), PIECES):
        piece = (start + tl.arange(0, PIECES))[None, :]
        real = piece < pieces[:, None]
        item = work + 4 * (first[:, None] + piece)
        low = begin[:, None] + piece * step[:, None]
        tl.store(item, i[:, None] + 0 * piece, mask=real)
        tl.store(item + 1, low, mask=real)
        tl.store(item + 2, tl.minimum(low + step[:, None], (begin + rows)[:, None]), mask=real)
        tl.store(item + 3, tl.where(parts[:, None] > 0, slot[:, None] + piece, -1), mask=real)


@triton.jit
def _attend_kernel(
    q_nope,
    q_rope,
    kv,
    kv_indices,
    work,
    counts,
    partial_out,
    partial_lse,
    out,
    lse,
    scale_log2e,
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
):
    # Pieces are loaded, not computed here: ptxas takes a loaded bound as equal in all threads, a reduced one not, and
    # then moves the operands of the matrix instructions through extra registers.
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    d, r = tl.arange(0, DIM), tl.arange(0, ROPE)
    items = tl.load(counts)
    for item in range(tl.program_id(1), items, tl.num_programs(1)):
        request = tl.load(work + 4 * item)
        low = tl.load(work + 4 * item + 1)
        high = tl.load(work + 4 * item + 2)
        slot = tl.load(work + 4 * item + 3)
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
            row = tl.load(kv_indices + j, mask=inside, other=0).to(tl.int64)
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
        if slot < 0:
            out_ptrs = out + n * stride_on + head[:, None] * stride_oh + d[None, :]
            tl.store(out_ptrs, acc.to(out.dtype.element_ty), mask=real[:, None])
            tl.store(lse + n * stride_ln + head, joined, mask=real)
        else:
            to = slot.to(tl.int64) * heads + head
            tl.store(partial_out + to[:, None] * DIM + d[None, :], acc, mask=real[:, None])
            tl.store(partial_lse + to, joined, mask=real)


@triton.jit
def _join_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    counts,
    joins,
    heads,
    stride_on,
    stride_oh,
    stride_ln,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
):
    # The entry is read before it is known to exist: one round trip to memory less.
    request = tl.load(joins + 4 * tl.program_id(0))
    slot = tl.load(joins + 4 * tl.program_id(0) + 1)
    pieces = tl.load(joins + 4 * tl.program_id(0) + 2)
    if tl.program_id(0) < tl.load(counts + 1):
        head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        real = head < heads
        d = tl.program_id(2) * DIM + tl.arange(0, DIM)
        width = tl.num_programs(2) * DIM
        i = tl.arange(0, PIECES)
        first = slot.to(tl.int64) * heads + head
        peak = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM], tl.float32)
        for start in range(0, pieces, PIECES):
            inside = real[:, None] & (start + i < pieces)[None, :]
            at = first[:, None] + (start + i)[None, :] * heads
            part_ptrs = partial_out + at[:, :, None] * width + d[None, None, :]
            part = tl.load(part_ptrs, mask=inside[:, :, None], other=0.0)
            part_lse = tl.load(partial_lse + at, mask=inside, other=-float("inf"))
            new_peak = tl.maximum(peak, tl.where(real, tl.max(part_lse, 1), 0.0))
            shrink = tl.exp(peak - new_peak)
            weight = tl.exp(part_lse - new_peak[:, None])
            total = total * shrink + tl.sum(weight, 1)
            acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
            peak = new_peak
        # No piece: no row of this request lies here.
        some = pieces > 0
        total = tl.where(some & real, total, 1.0)
        n = request.to(tl.int64)
        out_ptrs = out + n * stride_on + head[:, None] * stride_oh + d[None, :]
        tl.store(out_ptrs, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])
        tl.store(lse + n * stride_ln + head, tl.where(some, peak + tl.log(total), -float("inf")), mask=real)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def _shape(heads: int) -> _Shape:
    return next(shape for limit, shape in _SHAPES if heads <= limit)


def _join_shape(requests: int, workers: int) -> tuple[int, int, int]:
    """Heads of one program of the join, programs that share these heads' columns, and pieces taken at a time."""
    # As many pieces as a request has where all are alike and each program has one: loads don't wait for each other.
    pieces = min(32, max(4, triton.next_power_of_2(workers // requests + 1) // 2))
    return max(1, 16 // pieces), max(1, pieces // 16), pieces


def worker_count(device: torch.device, heads: int, kv_dtype: torch.dtype) -> int:
    """Programs that the device holds at once for each tile of ``heads`` query heads."""
    if mla_decode_hopper.takes(device, kv_dtype):
        tiles, resident = triton.cdiv(heads, mla_decode_hopper.HEADS), 1
    else:
        shape = _shape(heads)
        tiles, resident = triton.cdiv(heads, shape.heads), shape.resident
    return max(1, _multiprocessors(device) * resident // tiles)


class Plan(NamedTuple):
    """Pieces of one batch, on the device.

    counts: (2,) int32: pieces; requests of no piece or of several. joins: (n, 4) int32: each of those requests, its
    first slot of the scratch, its number of pieces, and an unset column that keeps ``work`` at a multiple of 16 bytes.
    work: (most, 4) int32: request, first and end index into ``kv_indices``, slot (-1: the only piece of its request).
    slots: pieces that the scratch must have room for. workers: programs that share the pieces.
    """

    counts: torch.Tensor
    joins: torch.Tensor
    work: torch.Tensor
    slots: int
    workers: int


def plan_size(requests: int, workers: int) -> int:
    """int32 elements of the buffer that :func:`plan_pieces` needs for at most so many requests.

    Every program may read the entry of ``work`` at its own number, whether there is such a piece or not.
    """
    return 4 + 4 * requests + 4 * max(requests, _ROUNDS.value * workers)


def plan_pieces(kv_indptr: torch.Tensor, workers: int, slots: int, buffer: torch.Tensor | None = None) -> Plan:
    """Cut the rows of all requests into pieces. Once per step: all layers of a step have the same rows.

    Args:
        kv_indptr: (n + 1,) int32, where each request's rows begin; n >= 1.
        workers: :func:`worker_count`.
        slots: pieces that the scratch of :func:`mla_decode` has room for.
        buffer: (plan_size(n, workers),) int32 at a stable address (CUDA graphs), or None for a new one.
    """
    n = kv_indptr.numel() - 1
    slots = min(slots, _ROUNDS.value * workers)
    most = max(n, slots)
    if buffer is None:
        buffer = torch.empty(plan_size(n, workers), dtype=torch.int32, device=kv_indptr.device)
    counts, joins = buffer[:2], buffer[4 : 4 + 4 * n].view(n, 4)
    work = buffer[4 + 4 * n : 4 + 4 * n + 4 * most].view(most, 4)
    requests = triton.next_power_of_2(n)
    _plan_kernel[(1,)](
        kv_indptr,
        counts,
        joins,
        work,
        n,
        workers,
        slots,
        ROWS=PIECE_ROWS,
        REQUESTS=requests,
        PIECES=max(1, min(128, 2048 // requests)),
        num_warps=4,
    )
    return Plan(counts, joins, work, slots, workers)


def mla_decode(
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv: torch.Tensor,
    kv_indices: torch.Tensor,
    plan: Plan,
    scale: float,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    run: int = 1,
) -> None:
    """Attention of one query token per request over the rows of ``kv`` that ``kv_indices`` names.

    Args:
        q_nope: (n, H, D) and q_rope: (n, H, R), any strides over n and H, last stride 1. D and R powers of two.
        kv: (rows, 1, D + R) or (rows, D + R), last stride 1; the first D elements are key and value, the rest key only.
        kv_indices: int; rows of request i at kv_indptr[i] .. kv_indptr[i + 1], of the kv_indptr ``plan`` was made of.
        scale: of the scores, before the softmax.
        partial_out: float32, contiguous, and partial_lse: float32, contiguous: scratch of at least plan.slots * H * D
            and plan.slots * H elements.
        out: (n, H, D), last stride 1. lse: (n, H) float32, contiguous in H: natural logarithm. Both are overwritten.
        run: each request's rows come in aligned runs of so many consecutive rows of ``kv`` (the layout's block). Where
            it is a multiple of 64, Hopper's copy engine moves whole tiles and no index of a single row is read.

    Raises:
        ValueError: the plan is another batch's, or a scratch tensor is too small or not contiguous.
    """
    n, heads, dim = out.shape
    if n == 0:
        return
    if n != plan.joins.shape[0]:
        raise ValueError(f"the plan is for {plan.joins.shape[0]} requests, but out has {n}")
    for name, scratch, width in (("partial_out", partial_out, dim), ("partial_lse", partial_lse, 1)):
        if not scratch.is_contiguous() or scratch.numel() < plan.slots * heads * width:
            raise ValueError(
                f"{name} must be contiguous with at least {plan.slots * heads * width} elements, "
                f"got shape {tuple(scratch.shape)}, stride {scratch.stride()}"
            )
    tensors = (q_nope, q_rope, kv_indices, plan.work, plan.counts)
    results = (partial_out, partial_lse, out, lse)
    strides = (*q_nope.stride()[:2], *q_rope.stride()[:2], kv.stride(0), *out.stride()[:2], lse.stride(0))
    rope = q_rope.shape[-1]
    if mla_decode_hopper.takes(kv.device, kv.dtype) and (dim, rope, q_nope.dtype) == (512, 64, kv.dtype):
        mla_decode_hopper.attend(kv, *tensors, *results, scale * _LOG2E, strides, plan.workers, run)
    else:
        shape = _shape(heads)
        _attend_kernel[(triton.cdiv(heads, shape.heads), plan.workers)](
            q_nope,
            q_rope,
            kv,
            *tensors[2:],
            *results,
            scale * _LOG2E,
            heads,
            *strides,
            DIM=dim,
            ROPE=rope,
            HEADS=shape.heads,
            ROWS=shape.rows,
            STAGES=shape.stages,
            num_warps=shape.warps,
            num_stages=shape.stages,
        )
    join_heads, shares, pieces = _join_shape(n, plan.workers)
    _join_kernel[(n, triton.cdiv(heads, join_heads), shares)](
        *results,
        plan.counts,
        plan.joins,
        heads,
        *strides[5:],
        DIM=dim // shares,
        HEADS=join_heads,
        PIECES=pieces,
        num_warps=4,
    )
