"""Torch stand-ins for the two FlashInfer wrappers that SGLang's FlashInfer-MLA backend builds.

They keep FlashInfer's contract where SGLang relies on it (plan then run, base-2 LSE, causal masks aligned to the end of
the KV) and check what a GPU kernel silently trusts: index ranges, lengths, head counts. CUDA graphs and the fast plan
that goes with them are out of scope and refused.

An empty KV shard gives out = 0 and lse = -inf. With ``SGLANG_DCP_BLOCK_EMPTY_SHARD=garbage`` it gives NaN and lse = 0
instead, as a kernel that skips its work leaves behind: a merge without a guard must then fail.
"""

from __future__ import annotations

import math
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

EMPTY_SHARD_VARIABLE = "SGLANG_DCP_BLOCK_EMPTY_SHARD"


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention of one request in float32, with its log-sum-exp in base 2.

    q: (queries, heads, d). k: (keys, heads or 1, d). v: (keys, heads or 1, dv). Returns (queries, heads, dv) and
    (queries, heads) float32. causal: query i sees keys [0, keys - queries + i].
    """
    queries, heads, _ = q.shape
    keys = k.shape[0]
    if keys == 0:
        garbage = os.environ.get(EMPTY_SHARD_VARIABLE) == "garbage"
        fill, fill_lse = (math.nan, 0.0) if garbage else (0.0, -math.inf)
        return torch.full((queries, heads, v.shape[-1]), fill), torch.full((queries, heads), fill_lse)
    # (queries, kv heads, heads of each, d): keys that heads share are not copied for each.
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("qngd,knd->ngqk", grouped, k.float()) * scale
    if causal:
        last_visible = torch.arange(queries)[:, None] + (keys - queries)
        scores = scores.masked_fill(torch.arange(keys)[None, :] > last_visible, -math.inf)
    out = torch.einsum("ngqk,knd->qngd", torch.softmax(scores, dim=-1), v.float())
    return out.flatten(1, 2), torch.logsumexp(scores, dim=-1).flatten(0, 1).transpose(0, 1) / math.log(2)


def _check(name: str, tensor: torch.Tensor, planned: int, shape: tuple[int, ...]) -> None:
    """DP attention pads a batch beyond its plan: more rows are as good, FlashInfer never reads them."""
    if tensor.shape[0] < planned or tuple(tensor.shape[1:]) != shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)}, planned {(planned, *shape)}")


def _offsets(name: str, indptr: torch.Tensor) -> list[int]:
    values = indptr.tolist()
    if not values or values[0] != 0 or any(b < a for a, b in pairwise(values)):
        raise ValueError(f"{name} must rise from 0, got {values}")
    return values


class MlaModule:
    """What FlashInfer compiles of absorbed MLA for one dtype of the results, called as FlashInfer calls it.

    dtypes: of queries, KV and results, which a compiled kernel takes for granted.
    """

    def __init__(self, *dtypes: torch.dtype) -> None:
        self._dtypes = dtypes

    def run(
        self,
        _float_workspace: Any,
        _int_workspace: Any,
        plan: tuple[list[int], list[int]],
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        kv_indices: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        causal: bool,
        _heads: int,
        _page_size: int,
        scale: float,
        _lse_base_on_e: bool,
        *_scales: float | None,
    ) -> None:
        """out: (tokens, heads, ckv) and lse: (tokens, heads), base 2, are filled. plan: offsets of queries and KV."""
        if (found := (q_nope.dtype, ckv_cache.dtype, out.dtype)) != self._dtypes:
            raise TypeError(f"queries, KV and results are {found}, compiled for {self._dtypes}")
        qo, kv = plan
        for i, (first, end) in enumerate(pairwise(qo)):
            picked = kv_indices[kv[i] : kv[i + 1]].long()
            latent = ckv_cache[picked]
            query = torch.cat([q_nope[first:end], q_pe[first:end]], dim=-1)
            key = torch.cat([latent, kpe_cache[picked]], dim=-1)
            partial, partial_lse = attention(query, key, latent, scale, causal)
            out[first:end] = partial.to(out.dtype)
            if lse is not None:
                lse[first:end] = partial_lse
        out[qo[-1] :] = math.nan


def load_module(_backend: str, model_dtype: torch.dtype, _lora_dim: int, _rope_dim: int) -> MlaModule:
    """For :func:`sglang_dcp_block.attention.flashinfer_float16.load_module`."""
    return MlaModule(model_dtype, model_dtype, torch.float16)


class BatchMLAPagedAttentionWrapper:
    """Absorbed MLA over a pool of latent rows, page size 1."""

    def __init__(self, float_workspace_buffer: torch.Tensor, use_cuda_graph: bool = False, **_: Any) -> None:
        if use_cuda_graph:
            raise NotImplementedError("the CPU stand-in for FlashInfer has no CUDA graphs: pass --disable-cuda-graph")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        if page_size != 1:
            raise ValueError(f"page_size must be 1, got {page_size}")
        self._qo, self._kv = _offsets("qo_indptr", qo_indptr), _offsets("kv_indptr", kv_indptr)
        lengths = [b - a for a, b in pairwise(self._kv)]
        if lengths != kv_len_arr.tolist():
            raise ValueError(f"kv_len_arr {kv_len_arr.tolist()} disagrees with kv_indptr {self._kv}")
        if len(self._qo) != len(self._kv):
            raise ValueError(f"{len(self._qo) - 1} query requests, {len(self._kv) - 1} KV requests")
        if kv_indices.numel() < self._kv[-1]:
            raise ValueError(f"{self._kv[-1]} kv_indices needed, got {kv_indices.numel()}")
        self._indices = kv_indices[: self._kv[-1]]
        self._heads, self._dims, self._causal, self._scale = num_heads, (head_dim_ckv, head_dim_kpe), causal, sm_scale
        module = MlaModule(q_data_type, kv_data_type, q_data_type)
        self._planned_backend = SimpleNamespace(_backend="fa2", _cached_module=module)

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """q: (tokens, heads, ckv or kpe). caches: (rows, 1, ckv or kpe). Returns (tokens, heads, ckv), base-2 LSE."""
        tokens = self._qo[-1]
        for name, tensor, dim in (("q_nope", q_nope, self._dims[0]), ("q_pe", q_pe, self._dims[1])):
            _check(name, tensor, tokens, (self._heads, dim))
        indices = self._indices.long()
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < ckv_cache.shape[0]):
            span = f"[{int(indices.min())}, {int(indices.max())}]"
            raise IndexError(f"kv_indices {span} leave the pool of {ckv_cache.shape[0]} rows")
        result = torch.empty_like(q_nope) if out is None else out
        lse = torch.full(q_nope.shape[:2], math.nan)
        self._planned_backend._cached_module.run(
            *(None, None, (self._qo, self._kv), q_nope, q_pe, ckv_cache, kpe_cache, indices, result),
            *(lse if return_lse else None, self._causal, self._heads, 1, self._scale, False, 1.0, 1.0, None),
        )
        return (result, lse) if return_lse else result


class BatchPrefillWithRaggedKVCacheWrapper:
    """Plain multi-head attention over keys and values given as one packed tensor."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **_: Any) -> None:
        if kv_layout != "NHD":
            raise ValueError(f"kv_layout must be NHD, got {kv_layout}")

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int,
        q_data_type: torch.dtype | None = None,
        causal: bool = True,
    ) -> None:
        self._qo, self._kv = _offsets("qo_indptr", qo_indptr), _offsets("kv_indptr", kv_indptr)
        self._q_shape, self._k_shape = (num_qo_heads, head_dim_qk), (num_kv_heads, head_dim_qk)
        self._v_shape = (num_kv_heads, head_dim_vo)

    plan = begin_forward

    def forward_return_lse(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = True,
        sm_scale: float | None = None,
        logits_soft_cap: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if logits_soft_cap:
            raise NotImplementedError("the CPU stand-in for FlashInfer has no logits_soft_cap")
        for name, tensor, count, shape in (
            ("q", q, self._qo[-1], self._q_shape),
            ("k", k, self._kv[-1], self._k_shape),
            ("v", v, self._kv[-1], self._v_shape),
        ):
            _check(name, tensor, count, shape)
        scale = q.shape[-1] ** -0.5 if sm_scale is None else sm_scale
        out = q.new_full((q.shape[0], q.shape[1], v.shape[-1]), math.nan)
        lse = torch.full(q.shape[:2], math.nan)
        for i in range(len(self._qo) - 1):
            rows, keys = slice(self._qo[i], self._qo[i + 1]), slice(self._kv[i], self._kv[i + 1])
            partial, lse[rows] = attention(q[rows], k[keys], v[keys], scale, causal)
            out[rows] = partial.to(out.dtype)
        return out, lse

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.forward_return_lse(*args, **kwargs)[0]


class CpuFactories:
    """``torch`` for one module: tensor factories turn device="cuda" into CPU and drop pin_memory."""

    _FACTORIES = frozenset(("empty", "zeros", "ones", "full", "arange", "tensor"))

    def __init__(self, torch_module: Any) -> None:
        self._torch = torch_module

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._torch, name)
        if name not in self._FACTORIES:
            return value

        def factory(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Any:
            return value(*args, device="cpu" if str(device).startswith("cuda") else device, **kwargs)

        return factory
