"""Partial results that lose nothing before the merge.

SGLang's merges take and return the partial results in the model's dtype. In bfloat16 that rounding is the largest error
of a sharded decode. Both merges carry something finer:

- ag_rs weighs the partial results in float32 and adds those, so they may come in float32;
- a2a sends 16 bits, and float16 has three bits more of them behind the point than bfloat16. A partial result is a mean
  of latent rows, and those come out of an RMS norm: sqrt(512) = 23 times its largest weight, far from float16's 65504.
  Elements below 2^-17 come out coarser than in bfloat16.

Triton's come as the merge likes them best (:func:`partial_dtype`), FlashInfer's in float16 (flashinfer_float16.py). The
merged result is rounded to the model's dtype once, as without DCP; ag_rs of float16 rounds its sum to float16 before.
Each hook has its target's signature.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: dtype of the model's activations, from :func:`keep_model_dtype`: SGLang's merges aren't told.
_model_dtype: torch.dtype | None = None


def comm_backend() -> str:
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().dcp_comm_backend


def is_merged() -> bool:
    """False in SGLang's dummy run that tunes kernels: there the layer gets a rank's partial results as they are."""
    from sglang.srt.layers.logits_processor import get_in_autotune_dummy_run

    return not get_in_autotune_dummy_run()


def keep_model_dtype(model_dtype: torch.dtype) -> None:
    """Merged results are of this dtype, whatever the partial results are.

    Raises:
        RuntimeError: it was another before.
    """
    global _model_dtype
    if _model_dtype not in (None, model_dtype):
        raise RuntimeError(f"two models in one server, in {_model_dtype} and {model_dtype}, can't share a DCP merge")
    _model_dtype = model_dtype


def partial_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """dtype that a rank's partial results take from Triton to the merge, for activations of ``model_dtype``."""
    keep_model_dtype(model_dtype)
    if not is_merged():
        return model_dtype
    if comm_backend() == "ag_rs":
        return torch.float32
    return torch.float16 if model_dtype == torch.bfloat16 else model_dtype


@triton.jit
def _combine_kernel(
    parts,
    lses,
    out,
    stride_pr,
    stride_pn,
    stride_ph,
    stride_lr,
    stride_ln,
    stride_lh,
    stride_on,
    stride_oh,
    P: tl.constexpr,
    RANKS: tl.constexpr,
    DIM: tl.constexpr,
    BASE_E: tl.constexpr,
):
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rank, d = tl.arange(0, RANKS), tl.arange(0, DIM)
    real = rank < P
    lse = tl.load(lses + rank * stride_lr + n * stride_ln + h * stride_lh, mask=real, other=-float("inf"))
    part_ptrs = parts + rank[:, None] * stride_pr + n * stride_pn + h * stride_ph + d[None, :]
    part = tl.load(part_ptrs, mask=real[:, None], other=0.0).to(tl.float32)
    peak = tl.max(lse, 0)
    # No rank has a row: a padding row of a CUDA graph.
    below = lse - tl.where(peak == -float("inf"), 0.0, peak)
    weight = tl.exp(below) if BASE_E else tl.exp2(below)
    total = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + n * stride_on + h * stride_oh + d, merged.to(out.dtype.element_ty))


def lse_combine(
    original: Any,
    recv_output: torch.Tensor,
    recv_lse: torch.Tensor,
    is_lse_base_on_e: bool = True,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """After the all-to-all: (P, n, H, D) partial results and their (P, n, H) LSE -> (n, H, D) in the model's dtype."""
    if _model_dtype in (None, recv_output.dtype):
        return original(recv_output, recv_lse, is_lse_base_on_e, return_lse)
    if return_lse:
        raise NotImplementedError(f"a merge of {recv_output.dtype} partial results gives no LSE")
    ranks, n, heads, dim = recv_output.shape
    out = torch.empty((n, heads, dim), dtype=_model_dtype, device=recv_output.device)
    if n:
        _combine_kernel[(n, heads)](
            recv_output,
            recv_lse,
            out,
            *recv_output.stride()[:3],
            *recv_lse.stride(),
            *out.stride()[:2],
            P=ranks,
            RANKS=triton.next_power_of_2(ranks),
            DIM=dim,
            BASE_E=is_lse_base_on_e,
        )
    return out, None


def gather_lse_reduce_scatter(original: Any, cp_attn_out: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The merge by all-gather of LSE and reduce-scatter of weighed results, in the model's dtype."""
    return original(cp_attn_out, *args, **kwargs).to(_model_dtype or cp_attn_out.dtype)
