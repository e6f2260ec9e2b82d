"""DeepSeek-style MLA on SGLang's Triton attention backend under DCP: decode over a shard, extend over the gather.

SGLang 0.5.23 wires the Triton backend to DCP for MHA/GQA only. An MLA layer differs in three ways: the model has
gathered the query heads already and merges the partial results itself, so a decode returns ``(out, lse)``; KV is
written through ``set_mla_kv_buffer``, which knows the owner rule; and an extend attends to the prefix that the model
has gathered into ``dcp_kv_buffer`` instead of to the pool.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.attention.mla_decode import mla_decode, plan_pieces, plan_size, worker_count
from sglang_dcp_block.attention.partials import partial_dtype
from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.dcp.layout import RotatedLayout
from sglang_dcp_block.runtime import active_layout, active_rank


def shard_kv_indices(
    backend: Any,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor | None = None,
    kv_start_idx: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of this rank's shard of each request, for ``TritonAttnBackend._dcp_kv_indices`` of MLA and GQA models.

    Args:
        req_pool_indices: (n,) int. lens: (n,) int, global tokens from ``kv_start_idx`` (default 0).
        kv_indptr: (>= n + 1,) int32, filled in place.
        kv_indices: int64 buffer with a stable address (CUDA graphs), or None for a new one.

    Returns:
        ``kv_indptr[:n + 1]``, ``kv_indices`` (rows of request i at kv_indptr[i] .. kv_indptr[i + 1]; what lies beyond
        the last is unset), and the local lengths (n,).
    """
    layout, rank = active_layout(), active_rank()
    n = len(req_pool_indices)
    if isinstance(layout, RotatedLayout):
        if kv_start_idx is not None:
            raise NotImplementedError("a window of a request has no shard under --dcp-rotate: drop --dcp-rotate")
        local_lens = kernels.rotated_local_lens(backend.req_to_token, req_pool_indices, lens, layout, rank)
        # Row j of a page lies in the same place of every rank's pool.
        layout, rank = layout.plain, 0
    elif kv_start_idx is None:
        local_lens = layout.local_len(lens, rank)
    else:
        local_lens = layout.interval_len(kv_start_idx, lens, rank)
    kv_indptr = kv_indptr[: n + 1]
    torch.cumsum(local_lens, dim=0, out=kv_indptr[1:])
    if kv_indices is None:
        # A bound from host values: reading the exact total back would stall the stream. Rank 0's share is the largest:
        # GQA asks the size whether there is a prefix at all, and all ranks must answer alike.
        bound = n * layout.local_len(backend.max_context_len, 0)
        kv_indices = torch.empty(bound, dtype=torch.int64, device=backend.device)
    kernels.shard_rows_from_table(
        backend.req_to_token, req_pool_indices, local_lens, kv_indptr, kv_indices, layout, rank, starts=kv_start_idx
    )
    backend.dcp_block_plan = None  # the plan, if any, is of other rows
    return kv_indptr, kv_indices, local_lens


def plan_decode(
    original: Any, backend: Any, num_kv_splits: torch.Tensor, seq_lens: torch.Tensor, *args: Any, **kwargs: Any
) -> None:
    """Cut this step's rows into the pieces that the layers of :func:`forward_decode` share.

    Around ``TritonAttnBackend.get_num_kv_splits``, which SGLang calls with (n,) lengths once the indices of a decode
    step are built, before every eager step, capture and replay, and not on extend steps. So a graph that holds the
    plan's address finds the plan of its step there.
    """
    original(backend, num_kv_splits, seq_lens, *args, **kwargs)
    n = seq_lens.numel()
    if n == 0 or not backend.use_mla:
        return
    kv_indptr = backend.kv_indptr
    workers = worker_count(kv_indptr.device, backend.num_head, backend.token_to_kv_pool.dtype)
    if not hasattr(backend, "dcp_block_plan_buffer"):
        # One buffer for all batch sizes: CUDA graphs keep its address.
        size = plan_size(kv_indptr.numel() - 1, workers)
        backend.dcp_block_plan_buffer = torch.empty(size, dtype=torch.int32, device=kv_indptr.device)
    slots = n * backend.max_kv_splits
    backend.dcp_block_plan = plan_pieces(kv_indptr[: n + 1], workers, slots, backend.dcp_block_plan_buffer)


def lse_is_base_e(original: Any, attention_backend: str | None) -> bool:
    """The Triton decode kernel's LSE is a natural logarithm; other backends as SGLang says."""
    return attention_backend == "triton" or original(attention_backend)


def _is_mla(q_rope: torch.Tensor | None, layer: Any) -> bool:
    return q_rope is not None and layer.tp_k_head_num == 1


def _refuse_extras(what: str, extras: dict[str, Any]) -> None:
    """An argument that a layer passes and nobody reads would change its answers without a word."""
    given = sorted(name for name, value in extras.items() if value is not None)
    if given:
        raise NotImplementedError(f"MLA {what} under DCP on the Triton backend takes no {', '.join(given)}")


def _write_kv(backend: Any, layer: Any, forward_batch: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    backend.token_to_kv_pool.set_mla_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, k_rope)


def forward_decode(
    original: Any, backend: Any, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, **kwargs
):
    """Decode of one MLA layer over this rank's shard.

    Args:
        q: (n, H, kv_lora_rank) and q_rope: (n, H, rope), H = heads of the whole DCP group.
        k: (n, 1, kv_lora_rank) and k_rope: (n, 1, rope), this step's rows, written by their owner.

    Returns:
        out (n, H * kv_lora_rank), in the dtype that goes to the merge, and the natural-log LSE (n, H) float32. A
        request with no row on this rank gives out = 0 and lse = -inf.
    """
    if not _is_mla(q_rope, layer):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    _refuse_extras("decode", kwargs)
    if k is not None and save_kv_cache:
        _write_kv(backend, layer, forward_batch, k, k_rope)
    heads = layer.tp_q_head_num
    q_nope, q_rope = q.view(-1, heads, layer.v_head_dim), q_rope.reshape(q.shape[0], heads, -1)
    out = torch.empty(q_nope.shape, dtype=partial_dtype(q.dtype), device=q.device)
    lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q.device)
    meta = backend.forward_metadata
    mla_decode(
        q_nope,
        q_rope,
        backend.token_to_kv_pool.get_key_buffer(layer.layer_id),
        meta.kv_indices,
        backend.dcp_block_plan,
        layer.scaling,
        meta.attn_logits,
        meta.attn_lse,
        out,
        lse,
        run=active_layout().block_size,
    )
    return out.view(-1, heads * layer.v_head_dim), lse


def _prefix_index(gathered: Any, prefix_lens: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where each request's prefix lies in the gathered rows: made by a batch's first layer, read by the others."""
    if not hasattr(gathered, "dcp_block_prefix_index"):
        kv_indptr = torch.zeros_like(like)
        torch.cumsum(prefix_lens, dim=0, out=kv_indptr[1:])
        kv_indices = torch.arange(gathered.dcp_extend_prefix_lens_sum, dtype=torch.int64, device=like.device)
        gathered.dcp_block_prefix_index = kv_indptr, kv_indices
    return gathered.dcp_block_prefix_index


def forward_extend(
    original: Any, backend: Any, q, k, v, layer, forward_batch, save_kv_cache=True, q_rope=None, k_rope=None, **kwargs
):
    """Extend of one MLA layer: the prefix from ``dcp_kv_buffer``, the new tokens from ``k`` and ``k_rope``.

    Two shapes arrive here. Without any prefix the model computes plain MHA on its own heads (k has as many heads as
    q). With a prefix it computes absorbed MLA (one latent head, ``q_rope`` given).
    """
    if not backend.use_mla or layer.tp_k_head_num not in (1, layer.tp_q_head_num):
        return original(backend, q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
    _refuse_extras("extend", kwargs)
    meta = backend.forward_metadata
    if meta.custom_mask is not None:
        raise NotImplementedError("MLA extend under DCP on the Triton backend takes no custom mask: drop speculation")
    heads = layer.tp_q_head_num
    pool = backend.token_to_kv_pool
    if _is_mla(q_rope, layer):
        if save_kv_cache:
            _write_kv(backend, layer, forward_batch, k, k_rope)
        q = torch.cat([q.view(-1, heads, layer.v_head_dim), q_rope.reshape(q.shape[0], heads, -1)], dim=-1)
        v = k
        k = torch.cat([k, k_rope.view(k.shape[0], 1, -1)], dim=-1)
        gathered = forward_batch.attn_dcp_metadata
        # The kernel would round queries and softmax weights to an FP8 prefix's dtype.
        k_buffer = gathered.dcp_kv_buffer[: gathered.dcp_extend_prefix_lens_sum].to(q.dtype)
        v_buffer = k_buffer[..., : layer.v_head_dim]
        kv_indptr, kv_indices = _prefix_index(gathered, forward_batch.extend_prefix_lens, meta.kv_indptr)
    else:
        if save_kv_cache:
            raise NotImplementedError("MHA extend of an MLA layer under DCP writes its KV before attention, not in it")
        k_buffer, v_buffer = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        kv_indptr = torch.zeros_like(meta.kv_indptr)
        kv_indices = torch.empty(0, dtype=torch.int64, device=q.device)
    q = q.view(-1, heads, layer.qk_head_dim)
    out = q.new_empty((q.shape[0], heads, layer.v_head_dim))
    backend.extend_attention_fwd(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        out,
        k_buffer,
        v_buffer,
        meta.qo_indptr,
        kv_indptr,
        kv_indices,
        None,
        True,
        None,
        meta.max_extend_len,
        1.0,
        1.0,
        sm_scale=layer.scaling,
        logit_cap=0.0,
    )
    return out.view(-1, heads * layer.v_head_dim)
