"""The attention kernel of :mod:`mla_decode` for Hopper: 64 heads against tiles of 64 rows, 16-bit KV.

Triton's own schedule computes every score twice (both warpgroups hold all 64 heads) and starts the copy of the next
tile after both matrix products of the present one. Gluon lets this file say where each value lies and when each copy
starts:

- two warpgroups share a tile: half of the rows each in the scores, half of the latent's columns each in the output;
- the scores of the next tile are queued behind the output of this one, and the copy after it starts when that is done;
- where a block of the layout holds whole tiles, the copy engine moves a tile with two instructions of one thread.
  Elsewhere all threads gather rows by their indices.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Triton 3.6 and 3.8 name it differently.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_LN2: gl.constexpr = gl.constexpr(0.6931471805599453)

#: Query heads and rows of a tile.
HEADS = 64
ROWS = 64


@cache
def takes(device: torch.device, kv_dtype: torch.dtype) -> bool:
    """Whether the kernel runs on ``device`` over KV of this dtype."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] == 9
        and kv_dtype in (torch.bfloat16, torch.float16)
    )


@gluon.jit
def _copy_page(latent_desc, key_desc, latent, key, arrived, row):
    """One thread has the copy engine fetch rows row .. row + 63."""
    mbarrier.expect(arrived, latent_desc.block_type.nbytes + key_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(latent_desc, [row, 0], arrived, latent)
    tma.async_copy_global_to_shared(key_desc, [row, latent_desc.block_shape[1]], arrived, key)


@gluon.jit
def _copy_rows(kv, stride, wide_rows, narrow_rows, left, latent, key, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """All threads fetch the rows named, 16 bytes each; from row ``left`` on the tile is filled with zeros."""
    rows: gl.constexpr = latent.shape[0]
    dim: gl.constexpr = latent.shape[1]
    i = gl.arange(0, rows, gl.SliceLayout(1, WIDE))
    d = gl.arange(0, dim, gl.SliceLayout(0, WIDE))
    pointers = kv + wide_rows.to(gl.int64)[:, None] * stride + d[None, :]
    async_copy.async_copy_global_to_shared(latent, pointers, (i < left)[:, None])
    i = gl.arange(0, rows, gl.SliceLayout(1, NARROW))
    r = gl.arange(0, key.shape[1], gl.SliceLayout(0, NARROW))
    pointers = kv + narrow_rows.to(gl.int64)[:, None] * stride + dim + r[None, :]
    async_copy.async_copy_global_to_shared(key, pointers, (i < left)[:, None])
    async_copy.commit_group()


@gluon.jit
def _row_numbers(kv_indices, start, high, LAYOUT: gl.constexpr, ROWS: gl.constexpr):
    i = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    return gl.load(kv_indices + gl.minimum(start + i, high - 1)).to(gl.int32)


@gluon.jit
def _item(work, item):
    work += 4 * item
    return gl.load(work), gl.load(work + 1), gl.load(work + 2), gl.load(work + 3)


@gluon.jit
def _softmax(score, peak, total, acc, weights):
    """One more tile of base-2 scores: its weights into shared memory, and all before it brought to the new peak."""
    new_peak = gl.maximum(peak, gl.max(score, 1))
    shrink = gl.exp2(peak - new_peak)
    weight = gl.exp2(score - new_peak[:, None])
    weights.store(weight.to(weights.dtype))
    fence_async_shared()
    total = total * shrink[:, None] + weight
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    _barrier()
    return new_peak, total, acc


@gluon.jit
def _attend_kernel(
    latent_desc,
    key_desc,
    kv,
    q_nope,
    q_rope,
    kv_indices,
    work,
    count,
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
    DIM: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    PAGES: gl.constexpr,
):
    dtype: gl.constexpr = kv.dtype.element_ty
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, ROWS // 2, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DIM // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)

    nope = gl.allocate_shared_memory(dtype, [HEADS, DIM], TILE)
    rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE], TILE)
    latents = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    keys = gl.allocate_shared_memory(dtype, [2, ROWS, ROPE], TILE)
    weights = gl.allocate_shared_memory(dtype, [HEADS, ROWS], TILE)
    arrived = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if PAGES:
        mbarrier.init(arrived.index(0), count=1)
        mbarrier.init(arrived.index(1), count=1)
        fence_async_shared()
        _barrier()

    head0 = gl.program_id(0) * HEADS
    column = gl.arange(0, ROWS, gl.SliceLayout(0, SCORE))
    no_score = gl.zeros([HEADS, ROWS], gl.float32, SCORE)
    tiles = 0  # so far: its lowest bit is the buffer, the next that buffer's phase
    # The first item is read before it is known to exist: one round trip to memory less.
    request, low, high, slot = _item(work, gl.program_id(1))
    items = gl.load(count)
    for item in range(gl.program_id(1), items, gl.num_programs(1)):
        fence_async_shared()
        _barrier()  # every warp is done with the item before
        now = tiles & 1
        if PAGES:
            row = gl.load(kv_indices + low).to(gl.int32)
            _copy_page(latent_desc, key_desc, latents.index(now), keys.index(now), arrived.index(now), row)
            if low + ROWS < high:
                next_row = gl.load(kv_indices + low + ROWS).to(gl.int32)
                _copy_page(
                    latent_desc, key_desc, latents.index(1 - now), keys.index(1 - now), arrived.index(1 - now), next_row
                )
            row = gl.load(kv_indices + gl.minimum(low + 2 * ROWS, high - 1)).to(gl.int32)
        else:
            wide = _row_numbers(kv_indices, low, high, WIDE, ROWS)
            narrow = _row_numbers(kv_indices, low, high, NARROW, ROWS)
            _copy_rows(kv, stride_kv, wide, narrow, high - low, latents.index(now), keys.index(now), WIDE, NARROW)
            wide = _row_numbers(kv_indices, low + ROWS, high, WIDE, ROWS)
            narrow = _row_numbers(kv_indices, low + ROWS, high, NARROW, ROWS)
            _copy_rows(
                kv,
                stride_kv,
                wide,
                narrow,
                high - low - ROWS,
                latents.index(1 - now),
                keys.index(1 - now),
                WIDE,
                NARROW,
            )
            wide = _row_numbers(kv_indices, low + 2 * ROWS, high, WIDE, ROWS)
            narrow = _row_numbers(kv_indices, low + 2 * ROWS, high, NARROW, ROWS)

        n = request.to(gl.int64)
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
        pointers = q_nope + n * stride_qn + h[:, None] * stride_qh + d[None, :]
        nope.store(gl.load(pointers, mask=(h < heads)[:, None], other=0.0))
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, NARROW))
        d = gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))
        pointers = q_rope + n * stride_rn + h[:, None] * stride_rh + d[None, :]
        rope.store(gl.load(pointers, mask=(h < heads)[:, None], other=0.0))

        peak = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORE))
        total = gl.zeros([HEADS, ROWS], gl.float32, SCORE)
        acc = gl.zeros([HEADS, DIM], gl.float32, ACC)
        if PAGES:
            mbarrier.wait(arrived.index(now), (tiles >> 1) & 1)
        else:
            async_copy.wait_group(1)
        fence_async_shared()
        _barrier()
        score = warpgroup_mma(nope, latents.index(now).permute((1, 0)), no_score, use_acc=False, is_async=True)
        score = warpgroup_mma(rope, keys.index(now).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        for start in range(low, high - ROWS, ROWS):
            now = tiles & 1
            tiles += 1
            other = tiles & 1
            peak, total, acc = _softmax(score * scale_log2e, peak, total, acc, weights)
            acc_token = warpgroup_mma(weights, latents.index(now), acc, is_async=True)
            if PAGES:
                mbarrier.wait(arrived.index(other), (tiles >> 1) & 1)
            else:
                async_copy.wait_group(0)
                fence_async_shared()
                _barrier()
            # The scores of the next tile, queued behind the product of this one.
            score_token = warpgroup_mma(
                nope, latents.index(other).permute((1, 0)), no_score, use_acc=False, is_async=True
            )
            score_token = warpgroup_mma(rope, keys.index(other).permute((1, 0)), score_token, is_async=True)
            acc_token = warpgroup_mma_wait(2, deps=[acc_token])
            _barrier()  # every warp is done with this tile and its weights
            if PAGES:
                if start + 2 * ROWS < high:
                    _copy_page(latent_desc, key_desc, latents.index(now), keys.index(now), arrived.index(now), row)
                row = gl.load(kv_indices + gl.minimum(start + 3 * ROWS, high - 1)).to(gl.int32)
            else:
                left = high - start - 2 * ROWS
                _copy_rows(kv, stride_kv, wide, narrow, left, latents.index(now), keys.index(now), WIDE, NARROW)
                wide = _row_numbers(kv_indices, start + 3 * ROWS, high, WIDE, ROWS)
                narrow = _row_numbers(kv_indices, start + 3 * ROWS, high, NARROW, ROWS)
            score, acc = warpgroup_mma_wait(0, deps=[score_token, acc_token])

        last = (high - low - 1) % ROWS + 1
        latent = latents.index(tiles & 1)
        tiles += 1
        if PAGES and last < ROWS:
            # The page's other rows are anybody's, and 0 * NaN is NaN.
            i = gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
            for part in gl.static_range(0, DIM, 64):
                some = latent.slice(part, 64, 1)
                some.store(gl.where((i < last)[:, None], some.load(NARROW), 0.0))
        score = gl.where((column < last)[None, :], score * scale_log2e, -float("inf"))
        peak, total, acc = _softmax(score, peak, total, acc, weights)
        acc = warpgroup_mma(weights, latent, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if not PAGES:
            async_copy.wait_group(0)
        _barrier()  # every warp is done with the last tile

        sums = gl.sum(total, 1)
        acc = acc * gl.convert_layout(1.0 / sums, gl.SliceLayout(1, ACC))[:, None]
        joined = (peak + gl.log2(sums)) * _LN2
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
        lse_h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, SCORE))
        result = latents._reinterpret(gl.float32, [HEADS, DIM], gl.NVMMASharedLayout(128, 32, 2))
        if slot < 0:
            out_pointers = out + n * stride_on + h[:, None] * stride_oh + d[None, :]
            # Through shared memory, because the tensor cores' layout would write half sectors.
            if out.dtype.element_ty == dtype:
                nope.store(acc.to(dtype))
                gl.store(out_pointers, nope.load(WIDE), mask=(h < heads)[:, None])
            else:
                result.store(acc)
                gl.store(out_pointers, result.load(WIDE), mask=(h < heads)[:, None])
            gl.store(lse + n * stride_ln + lse_h, joined, mask=lse_h < heads)
        else:
            # Straight from the accumulators, whole sectors of 32 bytes: through shared memory took 6 us longer.
            first = slot.to(gl.int64) * heads
            acc_h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, ACC))
            acc_d = gl.arange(0, DIM, gl.SliceLayout(0, ACC))
            gl.store(partial_out + (first + acc_h)[:, None] * DIM + acc_d[None, :], acc, mask=(acc_h < heads)[:, None])
            gl.store(partial_lse + first + lse_h, joined, mask=lse_h < heads)
        request, low, high, slot = _item(work, gl.minimum(item + gl.num_programs(1), items - 1))


def attend(
    kv: torch.Tensor,
    q_nope: torch.Tensor,
    q_rope: torch.Tensor,
    kv_indices: torch.Tensor,
    work: torch.Tensor,
    count: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale_log2e: float,
    strides: tuple[int, ...],
    workers: int,
    run: int,
) -> None:
    """Every piece of the plan, into ``out`` and ``lse`` or into the scratch. Arguments as in :func:`mla_decode`."""
    heads, dim = out.shape[1:]
    rope = q_rope.shape[-1]
    tile = gl.NVMMASharedLayout(128, 16, 2)
    shape, stride = [kv.shape[0], dim + rope], [kv.stride(0), 1]
    _attend_kernel[(triton.cdiv(heads, HEADS), workers)](
        TensorDescriptor(kv, shape, stride, [ROWS, dim], tile),
        TensorDescriptor(kv, shape, stride, [ROWS, rope], tile),
        kv,
        q_nope,
        q_rope,
        kv_indices,
        work,
        count,
        partial_out,
        partial_lse,
        out,
        lse,
        scale_log2e,
        heads,
        *strides,
        DIM=dim,
        ROPE=rope,
        HEADS=HEADS,
        ROWS=ROWS,
        PAGES=run % ROWS == 0,
        num_warps=8,
    )
