"""The attention kernel of :mod:`mla_decode` for Hopper: 64 heads against tiles of 64 rows, 16-bit KV.

Triton's own schedule computes every score twice (both warpgroups hold all 64 heads) and starts the copy of the next
tile after both matrix products of the present one. Here (Gluon) each group of warps has a role:

- left, one warpgroup, loads the queries and computes scores, softmax, and the left half of the output's columns. The
  scores of the next tile are queued behind its product with this one's weights;
- right, another, computes the right half of the columns from the weights, which it reads from shared memory;
- copy: where a block of the layout holds whole tiles, one warp has the copy engine move a tile with two instructions.
  Elsewhere four warps gather rows by their indices.

All three walk through the same items of the plan and count the same tiles, so each knows a barrier's phase by itself.
The counts run on from item to item: a tile's buffer is the lowest bit of its number, the phase of that buffer's
barriers the next bit, whatever number of tiles an item has. A program without an item waits for nothing. Barriers live
in shared memory and are made anew by every launch, so a replayed CUDA graph finds no state.

========  =========================  ==================  ==============================================================
barrier   completes                  arrivals            says
========  =========================  ==================  ==============================================================
full[b]   once per tile in buffer b  copy                the tile has arrived
empty[b]  once per tile in buffer b  left and right      its last product is done: copy may overwrite it
ready     once per step              left                ``weights`` and ``shrinks`` are written
taken     once per step              right               they are used: left may overwrite them
========  =========================  ==================  ==============================================================

A step is a tile, or the division by the sums after an item's last tile. The taken of that division comes after right
has stored its half: only then may left put the next item's queries where the result was staged.
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
def _item(work, item):
    work += 4 * item
    return gl.load(work), gl.load(work + 1), gl.load(work + 2), gl.load(work + 3)


# -- copying -----------------------------------------------------------------------------------------------------------


@gluon.jit
def _copy_page(latent_desc, key_desc, latent, key, full, row):
    """One thread has the copy engine fetch rows row .. row + 63."""
    mbarrier.expect(full, latent_desc.block_type.nbytes + key_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(latent_desc, [row, 0], full, latent)
    tma.async_copy_global_to_shared(key_desc, [row, latent_desc.block_shape[1]], full, key)


@gluon.jit
def _row_pointers(kv, stride, kv_indices, start, high, ROWS: gl.constexpr, LAYOUT: gl.constexpr):
    i = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    row = gl.load(kv_indices + gl.minimum(i, high - 1)).to(gl.int64)
    return kv + row[:, None] * stride, (i < high)[:, None]


@gluon.jit
def _gather_rows(kv, stride_kv, kv_indices, start, high, latents, keys, empty, tile):
    """All threads fetch rows start .. start + 63 of the item, 16 bytes each, zeros from ``high`` on; none, no tile."""
    ROWS: gl.constexpr = latents.shape[1]
    DIM: gl.constexpr = latents.shape[2]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    if start < high:
        wide, wide_real = _row_pointers(kv, stride_kv, kv_indices, start, high, ROWS, WIDE)
        narrow, narrow_real = _row_pointers(kv, stride_kv, kv_indices, start, high, ROWS, NARROW)
        d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
        r = DIM + gl.arange(0, keys.shape[2], gl.SliceLayout(0, NARROW))
        mbarrier.wait(empty.index(tile & 1), ((tile >> 1) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(latents.index(tile & 1), wide + d[None, :], wide_real)
        async_copy.async_copy_global_to_shared(keys.index(tile & 1), narrow + r[None, :], narrow_real)
    async_copy.commit_group()


@gluon.jit
def _say_full(full):
    """This group's copies have arrived; the tensor cores may read them."""
    fence_async_shared()
    _barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _copy_role(
    latent_desc,
    key_desc,
    kv,
    stride_kv,
    kv_indices,
    work,
    count,
    latents,
    keys,
    full,
    empty,
    ROWS: gl.constexpr,
    PAGES: gl.constexpr,
):
    # Starts the next item's tiles while the others still finish this one's: only the tiles' buffers are written here.
    tiles = 0
    # The first item is read before it is known to exist: one round trip to memory less.
    _, low, high, _ = _item(work, gl.program_id(1))
    items = gl.load(count)
    for item in range(gl.program_id(1), items, gl.num_programs(1)):
        if PAGES:
            row = gl.load(kv_indices + low).to(gl.int32)
            next_row = gl.load(kv_indices + gl.minimum(low + ROWS, high - 1)).to(gl.int32)
            for start in range(low, high, ROWS):
                now = tiles & 1
                mbarrier.wait(empty.index(now), ((tiles >> 1) & 1) ^ 1)  # a new barrier passes for phase 1
                _copy_page(latent_desc, key_desc, latents.index(now), keys.index(now), full.index(now), row)
                row = next_row
                next_row = gl.load(kv_indices + gl.minimum(start + 2 * ROWS, high - 1)).to(gl.int32)
                tiles += 1
        else:
            _gather_rows(kv, stride_kv, kv_indices, low, high, latents, keys, empty, tiles)
            _gather_rows(kv, stride_kv, kv_indices, low + ROWS, high, latents, keys, empty, tiles + 1)
            async_copy.wait_group(1)
            _say_full(full.index(tiles & 1))
            for start in range(low + ROWS, high, ROWS):
                # Before the wait for a free buffer: the tile in it is given up only once this one is there.
                async_copy.wait_group(0)
                _say_full(full.index((tiles + 1) & 1))
                _gather_rows(kv, stride_kv, kv_indices, start + ROWS, high, latents, keys, empty, tiles + 2)
                tiles += 1
            tiles += 1
        _, low, high, _ = _item(work, gl.minimum(item + gl.num_programs(1), items - 1))


# -- computing ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _softmax(score, peak, total, weights, shrinks, ready, taken, step):
    """One more tile of base-2 scores: its weights, and the factor for all before it, to where both warpgroups read.

    The fence is before the arrival on ``ready`` and by every thread: what it has stored, zeros in a last tile's rows
    included, is there for the tensor cores of either warpgroup once that one has waited.
    """
    new_peak = gl.maximum(peak, gl.max(score, 1))
    shrink = gl.exp2(peak - new_peak)
    weight = gl.exp2(score - new_peak[:, None])
    total = total * shrink[:, None] + weight
    mbarrier.wait(taken, (step & 1) ^ 1)
    weights.store(weight.to(weights.dtype))
    shrinks.store(shrink)
    fence_async_shared()
    _barrier()
    mbarrier.arrive(ready, count=1)
    return new_peak, total, shrink


@gluon.jit
def _store_half(acc, staging, to, stride_h, head0, heads, DIM: gl.constexpr, FIRST: gl.constexpr):
    """Columns FIRST .. FIRST + 255 of a piece's result."""
    dtype: gl.constexpr = to.dtype.element_ty
    HEADS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    if dtype.primitive_bitwidth == 16:
        # Through shared memory: the accumulators' layout would write half sectors.
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        half = staging._reinterpret(dtype, [HEADS, DIM], staging.layout).slice(FIRST, COLUMNS, 1)
        half.store(acc.to(dtype))
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        d = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, WIDE))
        gl.store(to + h[:, None] * stride_h + d[None, :], half.load(WIDE), mask=(h < heads)[:, None])
    else:
        ACC: gl.constexpr = acc.type.layout
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, ACC))
        d = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, ACC))
        gl.store(to + h[:, None] * stride_h + d[None, :], acc, mask=(h < heads)[:, None])


@gluon.jit
def _store_result(
    acc,
    staging,
    out,
    stride_on,
    stride_oh,
    partial_out,
    request,
    slot,
    head0,
    heads,
    DIM: gl.constexpr,
    FIRST: gl.constexpr,
):
    if slot < 0:
        _store_half(acc, staging, out + request.to(gl.int64) * stride_on, stride_oh, head0, heads, DIM, FIRST)
    else:
        _store_half(acc, staging, partial_out + slot.to(gl.int64) * heads * DIM, DIM, head0, heads, DIM, FIRST)


@gluon.jit
def _right_role(
    work,
    count,
    nope,
    latents,
    weights,
    shrinks,
    full,
    empty,
    ready,
    taken,
    out,
    stride_on,
    stride_oh,
    partial_out,
    heads,
    DIM: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
):
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16])
    head0 = gl.program_id(0) * HEADS
    tiles = 0
    steps = 0
    request, low, high, slot = _item(work, gl.program_id(1))
    items = gl.load(count)
    for item in range(gl.program_id(1), items, gl.num_programs(1)):
        acc = gl.zeros([HEADS, DIM // 2], gl.float32, ACC)
        rows = high - low
        # Not range(low, high, ROWS): Triton 3.6 doesn't carry from item to item what only bounds a nested loop, so all
        # items would get the first one's. The other roles read their bounds elsewhere too, which keeps them: let it.
        while rows > 0:
            rows -= ROWS
            now = tiles & 1
            mbarrier.wait(full.index(now), (tiles >> 1) & 1)
            mbarrier.wait(ready, steps & 1)
            acc = acc * shrinks.load(gl.SliceLayout(1, ACC))[:, None]
            acc = warpgroup_mma(weights, latents.index(now).slice(DIM // 2, DIM // 2, 1), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            _barrier()  # every warp of this role is done with the tile, the weights and the factors
            mbarrier.arrive(empty.index(now), count=1)
            mbarrier.arrive(taken, count=1)
            tiles += 1
            steps += 1
        mbarrier.wait(ready, steps & 1)
        acc = acc * shrinks.load(gl.SliceLayout(1, ACC))[:, None]
        # Left has waited for its last scores before this step's ready: nobody reads the queries any more.
        _store_result(acc, nope, out, stride_on, stride_oh, partial_out, request, slot, head0, heads, DIM, DIM // 2)
        _barrier()  # the staged half has left shared memory
        mbarrier.arrive(taken, count=1)
        steps += 1
        request, low, high, slot = _item(work, gl.minimum(item + gl.num_programs(1), items - 1))


@gluon.jit
def _left_role(
    q_nope,
    q_rope,
    work,
    count,
    nope,
    rope,
    latents,
    keys,
    weights,
    shrinks,
    full,
    empty,
    ready,
    taken,
    out,
    lse,
    partial_out,
    partial_lse,
    scale_log2e,
    heads,
    stride_qn,
    stride_qh,
    stride_rn,
    stride_rh,
    stride_on,
    stride_oh,
    stride_ln,
    DIM: gl.constexpr,
    ROPE: gl.constexpr,
    HEADS: gl.constexpr,
    ROWS: gl.constexpr,
    PAGES: gl.constexpr,
):
    SCORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM // 2, 16])
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    NARROW: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    head0 = gl.program_id(0) * HEADS
    column = gl.arange(0, ROWS, gl.SliceLayout(0, SCORE))
    no_score = gl.zeros([HEADS, ROWS], gl.float32, SCORE)
    tiles = 0
    steps = 0
    request, low, high, slot = _item(work, gl.program_id(1))
    items = gl.load(count)
    for item in range(gl.program_id(1), items, gl.num_programs(1)):
        n = request.to(gl.int64)
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
        q = gl.load(q_nope + n * stride_qn + h[:, None] * stride_qh + d[None, :], mask=(h < heads)[:, None], other=0.0)
        h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, NARROW))
        d = gl.arange(0, ROPE, gl.SliceLayout(0, NARROW))
        r = gl.load(q_rope + n * stride_rn + h[:, None] * stride_rh + d[None, :], mask=(h < heads)[:, None], other=0.0)
        # The results of the item before left from where its queries were: the right half until this step ...
        mbarrier.wait(taken, (steps & 1) ^ 1)
        _barrier()  # ... and the left half until every warp of this role is here
        nope.store(q)
        rope.store(r)
        fence_async_shared()
        _barrier()

        peak = gl.full([HEADS], -float("inf"), gl.float32, gl.SliceLayout(1, SCORE))
        total = gl.zeros([HEADS, ROWS], gl.float32, SCORE)
        acc = gl.zeros([HEADS, DIM // 2], gl.float32, ACC)
        now = tiles & 1
        mbarrier.wait(full.index(now), (tiles >> 1) & 1)
        score = warpgroup_mma(nope, latents.index(now).permute((1, 0)), no_score, use_acc=False, is_async=True)
        score = warpgroup_mma(rope, keys.index(now).permute((1, 0)), score, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        for _start in range(low, high - ROWS, ROWS):
            now = tiles & 1
            tiles += 1
            other = tiles & 1
            peak, total, shrink = _softmax(score * scale_log2e, peak, total, weights, shrinks, ready, taken, steps)
            steps += 1
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
            acc_token = warpgroup_mma(weights, latents.index(now).slice(0, DIM // 2, 1), acc, is_async=True)
            mbarrier.wait(full.index(other), (tiles >> 1) & 1)
            # The scores of the next tile, queued behind the product of this one.
            score_token = warpgroup_mma(
                nope, latents.index(other).permute((1, 0)), no_score, use_acc=False, is_async=True
            )
            score_token = warpgroup_mma(rope, keys.index(other).permute((1, 0)), score_token, is_async=True)
            acc_token = warpgroup_mma_wait(2, deps=[acc_token])
            _barrier()  # every warp of this role is done with the tile and its weights
            mbarrier.arrive(empty.index(now), count=1)
            score, acc = warpgroup_mma_wait(0, deps=[score_token, acc_token])

        last = (high - low - 1) % ROWS + 1
        now = tiles & 1
        tiles += 1
        latent = latents.index(now)
        if PAGES and last < ROWS:
            # The page's other rows are anybody's, and 0 * NaN is NaN. Right reads the tile after _softmax's ready. A
            # slower warp may still read these rows for its scores: those columns are masked below.
            i = gl.arange(0, ROWS, gl.SliceLayout(1, NARROW))
            for part in gl.static_range(0, DIM, 64):
                some = latent.slice(part, 64, 1)
                some.store(gl.where((i < last)[:, None], some.load(NARROW), 0.0))
        score = gl.where((column < last)[None, :], score * scale_log2e, -float("inf"))
        peak, total, shrink = _softmax(score, peak, total, weights, shrinks, ready, taken, steps)
        steps += 1
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
        acc = warpgroup_mma(weights, latent.slice(0, DIM // 2, 1), acc, is_async=True)
        sums = gl.sum(total, 1)
        inverse = 1.0 / sums
        joined = (peak + gl.log2(sums)) * _LN2
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.wait(taken, (steps & 1) ^ 1)
        shrinks.store(inverse)
        _barrier()  # also: every warp is done with the last tile, and its scores with the queries
        mbarrier.arrive(ready, count=1)
        mbarrier.arrive(empty.index(now), count=1)
        steps += 1
        acc = acc * gl.convert_layout(inverse, gl.SliceLayout(1, ACC))[:, None]
        _store_result(acc, nope, out, stride_on, stride_oh, partial_out, request, slot, head0, heads, DIM, 0)
        lse_h = head0 + gl.arange(0, HEADS, gl.SliceLayout(1, SCORE))
        if slot < 0:
            gl.store(lse + n * stride_ln + lse_h, joined, mask=lse_h < heads)
        else:
            gl.store(partial_lse + slot.to(gl.int64) * heads + lse_h, joined, mask=lse_h < heads)
        request, low, high, slot = _item(work, gl.minimum(item + gl.num_programs(1), items - 1))


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
    TILE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    nope = gl.allocate_shared_memory(dtype, [HEADS, DIM], TILE)
    rope = gl.allocate_shared_memory(dtype, [HEADS, ROPE], TILE)
    latents = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    keys = gl.allocate_shared_memory(dtype, [2, ROWS, ROPE], TILE)
    weights = gl.allocate_shared_memory(dtype, [HEADS, ROWS], TILE)
    shrinks = gl.allocate_shared_memory(gl.float32, [HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(ready, count=1)
    mbarrier.init(taken, count=1)
    fence_async_shared()
    _barrier()
    gl.warp_specialize(
        [
            (
                _left_role,
                (
                    q_nope,
                    q_rope,
                    work,
                    count,
                    nope,
                    rope,
                    latents,
                    keys,
                    weights,
                    shrinks,
                    full,
                    empty,
                    ready,
                    taken,
                    out,
                    lse,
                    partial_out,
                    partial_lse,
                    scale_log2e,
                    heads,
                    stride_qn,
                    stride_qh,
                    stride_rn,
                    stride_rh,
                    stride_on,
                    stride_oh,
                    stride_ln,
                    DIM,
                    ROPE,
                    HEADS,
                    ROWS,
                    PAGES,
                ),
            ),
            (
                _right_role,
                (
                    work,
                    count,
                    nope,
                    latents,
                    weights,
                    shrinks,
                    full,
                    empty,
                    ready,
                    taken,
                    out,
                    stride_on,
                    stride_oh,
                    partial_out,
                    heads,
                    DIM,
                    HEADS,
                    ROWS,
                ),
            ),
            (
                _copy_role,
                (
                    latent_desc,
                    key_desc,
                    kv,
                    stride_kv,
                    kv_indices,
                    work,
                    count,
                    latents,
                    keys,
                    full,
                    empty,
                    ROWS,
                    PAGES,
                ),
            ),
        ],
        [4, 1 if PAGES else 4],  # warps of right and copy
        [200, 24] if PAGES else [176, 96],  # and their registers per thread; left, of num_warps, takes the others
    )


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
        num_warps=4,
    )
