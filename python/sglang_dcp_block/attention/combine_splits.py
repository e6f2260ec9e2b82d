"""Second stage of the Triton MLA decode: one kernel joins the KV splits of a shard into (out, LSE), empty shards included.

SGLang's second stage returns no LSE, so each layer would need a logsumexp over the splits (several launches) and a
guard for empty shards. Here all of it is one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _combine_splits_kernel(
    partial_out,
    partial_lse,
    out,
    lse,
    kv_indptr,
    stride_pb,
    stride_ph,
    stride_ps,
    stride_lb,
    stride_lh,
    stride_ob,
    stride_oh,
    stride_lse,
    SPLITS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    offsets = tl.arange(0, BLOCK_D)
    mask = offsets < D
    peak = -float("inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], dtype=tl.float32)
    rows = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
    # Emptiness is read from the lengths: whatever lies in the partial buffers then is another request's.
    if rows > 0:
        for split in range(SPLITS):
            split_lse = tl.load(partial_lse + request * stride_lb + head * stride_lh + split)
            # A split without rows has stored nothing; its LSE still holds the -inf that the caller filled in.
            if split_lse > -float("inf"):
                values = tl.load(
                    partial_out + request * stride_pb + head * stride_ph + split * stride_ps + offsets,
                    mask=mask,
                    other=0.0,
                )
                new_peak = tl.maximum(peak, split_lse)
                shrink = tl.exp(peak - new_peak)
                weight = tl.exp(split_lse - new_peak)
                acc = acc * shrink + weight * values
                total = total * shrink + weight
                peak = new_peak
    if total > 0.0:
        acc = acc / total
        joined = peak + tl.log(total)
    else:
        joined = -float("inf")
    tl.store(out + request * stride_ob + head * stride_oh + offsets, acc.to(out.dtype.element_ty), mask=mask)
    tl.store(lse + request * stride_lse + head, joined)


def combine_splits(
    partial_out: torch.Tensor, partial_lse: torch.Tensor, kv_indptr: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> None:
    """Join the splits of each (request, head) by their LSE (flash-decoding's reduction) into ``out`` and ``lse``.

    Args:
        partial_out: (>= n, >= H, S, D) float32, normalised per split. partial_lse: (>= n, >= H, S) float32, natural
            logarithm, contiguous in S, -inf where a split holds no row.
        kv_indptr: (n + 1,) int32, rows of each request on this rank; a request without rows gives out = 0,
            lse = -inf, whatever the partial buffers hold.
        out: (n, H, D), any float dtype, contiguous in D. lse: (n, H) float32, contiguous in H. Both are overwritten.
    """
    n, heads, dim = out.shape
    if n == 0:
        return
    _combine_splits_kernel[(n, heads)](
        partial_out,
        partial_lse,
        out,
        lse,
        kv_indptr,
        partial_out.stride(0),
        partial_out.stride(1),
        partial_out.stride(2),
        partial_lse.stride(0),
        partial_lse.stride(1),
        out.stride(0),
        out.stride(1),
        lse.stride(0),
        SPLITS=partial_out.shape[2],
        D=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=4,
    )
