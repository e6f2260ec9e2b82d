"""FlashInfer-MLA decode under a block layout: which rows a rank attends to, empty shards, and float16 results.

Each function has the signature of the target that plugin.HOOKS names for it.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.attention import flashinfer_float16
from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.runtime import active_layout, active_rank


def plan_decode_metadata(
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    init_metadata_replay: bool,
    fast_decode_kwargs: dict[str, Any],
    bs: int,
) -> int:
    """Shard the packed slot stream in place and return the shard's length.

    ``kv_lens`` (bs,) and ``kv_indptr`` (>= bs + 1,) are rewritten to local lengths; this rank's slots, still widened,
    are compacted into ``kv_indices[:returned]``. A CUDA graph reads these very tensors, so none is rebound. On replay
    the total comes from the host lengths in ``fast_decode_kwargs``, which SGLang made local before.
    """
    layout, rank = active_layout(), active_rank()
    local_lens = layout.local_len(kv_lens, rank)
    local_indptr = torch.zeros_like(kv_indptr[: bs + 1])
    torch.cumsum(local_lens, dim=0, out=local_indptr[1:])
    if init_metadata_replay:
        total = int(fast_decode_kwargs["kv_len_arr_cpu"].sum())
    else:
        total = int(local_indptr[-1])
    local = kv_indices.new_empty(total)
    kernels.shard_slots_from_stream(kv_indices, kv_indptr[: bs + 1], local_lens, local_indptr, local, layout, rank)
    kv_indices[:total] = local
    kv_lens.copy_(local_lens)
    kv_indptr[: bs + 1] = local_indptr
    return total


def call_begin_forward(original: Any, updater: Any, wrapper: Any, *args: Any, **kwargs: Any) -> None:
    """Plan a decode step, eager, for a capture or for a replay, whose results are the partial results of a merge."""
    original(updater, wrapper, *args, **kwargs)
    flashinfer_float16.use_float16(wrapper, updater.data_type, updater.kv_lora_rank, updater.qk_rope_head_dim)


def forward_decode(original: Any, backend: Any, q, k, v, layer, forward_batch, *args: Any, **kwargs: Any) -> Any:
    """As the original: out (n, H * kv_lora_rank), here in the dtype for the merge, and base-2 LSE (n, H) float32."""
    result = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
    if not isinstance(result, tuple):
        return result
    out, lse = result
    out = flashinfer_float16.partial_result(backend.forward_metadata.decode_wrapper, out)
    heads = out.view(out.shape[0], layer.tp_q_head_num, layer.v_head_dim)
    guard_empty_shards(heads, lse, forward_batch.seq_lens, active_layout(), active_rank())
    return out, lse
