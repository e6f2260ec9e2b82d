"""Inputs, references, comparison and timing, shared by the GPU tests and benchmark/decode.py.

The ranks of a DCP group run here one after another in one process: each has a KV pool of its own and computes its
partial result; SGLang's merge kernels join them. Expected values come from other computations than the code under
test: blocks dealt out one by one (brute_force.py), attention in float64 (:func:`attention_f64`), and SGLang's own DCP1
path at the same dtype (:func:`stock_decode`), whose error is the yardstick.

Everything runs on :data:`DEVICE`: the GPU, or the CPU under ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton

from sglang_dcp_block import dcp_hooks
from sglang_dcp_block.attention import flashinfer_float16, flashinfer_mla, partials, triton_gqa, triton_mla
from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.kv_write import write_mla_kv
from sglang_dcp_block.testing.exchange import Exchange

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LORA, ROPE = 512, 64
DIM = LORA + ROPE
#: DeepSeek-V2's softmax scale: one over the root of the query's 128 + 64 dimensions before absorption.
SCALE = (128 + 64) ** -0.5
FP8 = torch.float8_e4m3fn
#: Dtype of queries and results. Triton's interpreter knows no bfloat16.
WORK = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
LN2 = math.log(2.0)


# -- generate ----------------------------------------------------------------------------------------------------------


def lengths_around(layout: DcpLayout, longest: int = 131072) -> list[int]:
    """Request lengths at, just below and just above a block and a cycle, odd ones between, and long ones."""
    b, c = layout.block_size, layout.cycle
    wanted = {1, b - 1, b, b + 1, c - 1, c, c + 1, 2 * c + b // 2 + 1, 1023, 8192, 8193, 32768 + 5, longest}
    return sorted(n for n in wanted if 1 <= n <= longest)


def random_kv(tokens: int, seed: int, device: torch.device = DEVICE) -> torch.Tensor:
    """(tokens, 576) float32, scaled so that a softmax over them prefers some tokens instead of averaging all."""
    gen = torch.Generator(device).manual_seed(seed)
    return torch.randn(tokens, DIM, generator=gen, device=device)


def random_q(requests: int, heads: int, seed: int, device: torch.device = DEVICE) -> torch.Tensor:
    """(requests, heads, 576) of WORK. With SCALE, scores against :func:`random_kv` have a deviation of about 2.6."""
    gen = torch.Generator(device).manual_seed(seed)
    return (torch.randn(requests, heads, DIM, generator=gen, device=device) * 1.5).to(WORK)


@dataclass
class Batch:
    """Requests whose KV lies in pages dealt at random over P pools.

    lens: tokens per request. table: (requests, longest) int32 widened slots, as ``req_to_token``. kv: per request
    (n, 576) in the pool's dtype, in order of position. pools: per rank (rows, 1, 576); rows of nobody hold NaN.
    """

    layout: DcpLayout
    page_size: int
    lens: list[int]
    table: torch.Tensor
    req_rows: torch.Tensor
    seq_lens: torch.Tensor
    kv: list[torch.Tensor]
    pools: list[torch.Tensor]

    @property
    def ranks(self) -> range:
        return range(self.layout.dcp_size)


def random_table(
    layout: DcpLayout, lens: Sequence[int], page_size: int, seed: int, width: int | None = None
) -> tuple[torch.Tensor, int]:
    """(requests, width) int32 widened slots in randomly ordered virtual pages, and rows per pool.

    Page 0 stays unused, as in SGLang, whose slot 0 takes the writes of padding.
    """
    slots_per_page = layout.virtual_page_size(page_size)
    pages_of = [triton.cdiv(n, slots_per_page) for n in lens]
    gen = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(pages_of), generator=gen) + 1
    table = torch.zeros(len(lens), width or max(lens), dtype=torch.int32)
    used = 0
    for i, (n, pages) in enumerate(zip(lens, pages_of, strict=True)):
        mine = order[used : used + pages]
        used += pages
        slots = (mine[:, None] * slots_per_page + torch.arange(slots_per_page)).reshape(-1)[:n]
        table[i, :n] = slots.to(torch.int32)
    return table.to(DEVICE), (used + 1) * layout.rows_per_virtual_page(page_size)


def as_bytes_if_fp8(x: torch.Tensor) -> torch.Tensor:
    """SGLang stores fp8 pools as uint8: a scatter copies bytes."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def page_size_of(layout: DcpLayout) -> int:
    """Rows of a page on one rank: small ones where Triton is interpreted, under rotation as the layout says."""
    if layout.is_rotated:
        return layout.page_rows
    return 64 if DEVICE.type == "cuda" else 4


def make_batch(
    layout: DcpLayout,
    lens: Sequence[int],
    *,
    page_size: int = 64,
    dtype: torch.dtype = WORK,
    seed: int = 0,
    kv: Sequence[torch.Tensor] | None = None,
) -> Batch:
    """Requests of random KV, or of the ``kv`` given, written into the ranks' pools by the write kernel, in one call
    per rank."""
    lens = list(lens)
    table, rows = random_table(layout, lens, page_size, seed)
    kv = kv or [random_kv(n, seed * 1000 + i) for i, n in enumerate(lens)]
    kv = [x.to(dtype) for x in kv]
    slots = torch.cat([table[i, :n] for i, n in enumerate(lens)])
    flat = torch.cat(kv)
    pools = []
    for rank in range(layout.dcp_size):
        pool = torch.full((rows, 1, DIM), math.nan, dtype=torch.float32, device=DEVICE).to(dtype)
        write_mla_kv(
            as_bytes_if_fp8(pool),
            slots,
            as_bytes_if_fp8(flat[:, :LORA]),
            as_bytes_if_fp8(flat[:, LORA:]),
            layout,
            rank,
        )
        pools.append(pool)
    return Batch(
        layout,
        page_size,
        lens,
        table,
        torch.arange(len(lens), dtype=torch.int64, device=DEVICE),
        torch.tensor(lens, dtype=torch.int64, device=DEVICE),
        kv,
        pools,
    )


# -- run ---------------------------------------------------------------------------------------------------------------


@contextmanager
def as_rank(layout: DcpLayout, rank: int, how: str = "a2a"):
    """Hooked code below believes it is ``rank`` of a group with ``layout`` that merges by ``how``."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(partials, "comm_backend", lambda: how))
        for module in (dcp_hooks, triton_gqa, triton_mla):
            stack.enter_context(mock.patch.object(module, "active_layout", lambda: layout))
            stack.enter_context(mock.patch.object(module, "active_rank", lambda: rank))
        yield


def indptr(lens: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=dtype, device=DEVICE)


@contextmanager
def syncs_are_errors():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sglang_pool(rows: int, dtype: torch.dtype) -> Any:
    """SGLang's own pool of one MLA layer, of so many rows in all."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(rows - 1, 1, dtype, LORA, ROPE, 1, DEVICE.type, False)


def write_through_pool(
    pool: Any, loc: torch.Tensor, kv: torch.Tensor, layout: DcpLayout | None = None, rank: int = 0
) -> None:
    """(n, 576) rows into :func:`sglang_pool`, which casts them to its dtype. Without a layout as SGLang without DCP."""
    from sglang.srt.mem_cache import memory_pool

    parallel = SimpleNamespace(attn_dcp_size=layout.dcp_size if layout else 1, dcp_enabled=layout is not None)
    layer, where = MlaLayer(1), memory_pool.KVWriteLoc(loc)
    with mock.patch.object(memory_pool, "get_parallel", lambda: parallel):
        if layout is None:
            pool.set_kv_buffer(layer, where, kv[:, None], None)
            return
        hook = mock.patch.object(memory_pool, "set_mla_kv_buffer_dcp_sharded_triton", dcp_hooks.set_mla_kv_buffer)
        with as_rank(layout, rank), hook:
            pool.set_mla_kv_buffer(layer, where, kv[:, None, :LORA], kv[:, None, LORA:])


def gathered_prefix(batch: Batch) -> torch.Tensor:
    """All requests of ``batch`` as an extend's cached prefixes -> (tokens, 1, 576) of the pools' dtype.

    Through the hooks of an extend, with SGLang's kernel that reads a rank's rows from its pool between them. Every
    rank must get the same bytes.
    """
    from sglang.kernels.ops.kvcache.mla_buffer import get_mla_kv_buffer_triton

    exchange = Exchange(batch.layout.dcp_size)
    parallel = SimpleNamespace(dcp_group=exchange)

    def work(rank: int) -> torch.Tensor:
        backend, pool = SimpleNamespace(), batch.pools[rank]
        with (
            as_rank(batch.layout, rank),
            mock.patch.object(dcp_hooks, "get_attn_backend", lambda: backend),
            mock.patch("sglang.srt.runtime_context.get_parallel", lambda: parallel),
        ):
            rows = prefix_rows(batch)
            nope, rope = (pool.new_empty(len(rows), 1, width) for width in (LORA, ROPE))
            get_mla_kv_buffer_triton(pool, rows, nope, rope)
            return dcp_hooks.all_gather_kv_cache(nope, rope, torch.tensor(batch.lens))

    dense = exchange.run(work)
    assert exchange.calls == 1
    assert all(torch.equal(x.view(torch.uint8), dense[0].view(torch.uint8)) for x in dense)
    return dense[0]


def prefix_rows(batch: Batch) -> torch.Tensor:
    """The hook that selects the rows which this rank (:func:`as_rank`) sends to the gather of all requests."""
    metadata = dcp_hooks.prepare_extend_metadata(
        lambda *_: SimpleNamespace(), batch.seq_lens, batch.seq_lens, batch.lens, None, batch.req_rows, batch.table
    )
    return metadata.dcp_local_prefix_kv_indices


class MlaLayer(NamedTuple):
    """What SGLang's RadixAttention tells a backend about an absorbed MLA layer."""

    tp_q_head_num: int
    tp_k_head_num: int = 1
    qk_head_dim: int = DIM
    head_dim: int = DIM
    v_head_dim: int = LORA
    scaling: float = SCALE
    layer_id: int = 0
    logit_cap: float = 0.0


class Pool:
    """One layer of MLATokenToKVPool, holding the rows of one rank."""

    def __init__(self, rows: torch.Tensor, layout: DcpLayout, rank: int) -> None:
        self.rows, self.layout, self.rank = rows, layout, rank

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def get_key_buffer(self, _layer_id: int) -> torch.Tensor:
        return self.rows

    def get_value_buffer(self, _layer_id: int) -> torch.Tensor:
        return self.rows[..., :LORA]

    def set_mla_kv_buffer(self, _layer: Any, loc_info: Any, k: torch.Tensor, k_rope: torch.Tensor) -> None:
        write_mla_kv(self.rows, loc_info.loc, k, k_rope, self.layout, self.rank)


def core_count() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if DEVICE.type == "cuda" else 16


def dependent_launch() -> bool:
    """Whether SGLang's decode kernels start before the one ahead has drained, as on Hopper."""
    if DEVICE.type != "cuda":
        return False
    from sglang.kernels.jit.utils import is_arch_support_pdl

    return is_arch_support_pdl()


def max_kv_splits(context: int) -> int:
    """As many splits as TritonAttnBackend allows MLA: it follows the multiprocessors and the context length."""
    from sglang.srt.layers.attention.triton_backend import _mla_decode_kv_splits_cap

    return _mla_decode_kv_splits_cap(8, core_count(), context)


def kv_splits(local_lens: torch.Tensor, heads: int, cap: int) -> torch.Tensor:
    """(n,) int32: SGLang's own choice of splits per request from this rank's lengths."""
    from sglang.kernels.ops.attention.metadata import get_num_kv_splits_triton

    n = local_lens.numel()
    splits = torch.empty(n, dtype=torch.int32, device=DEVICE)
    get_num_kv_splits_triton[(1,)](
        splits,
        local_lens.clamp_min(1),
        n,
        1,
        heads,
        1,
        cap,
        core_count(),
        MAX_NUM_SEQ=max(256, triton.next_power_of_2(n)),
    )
    return splits


class TritonRank:
    """The parts of TritonAttnBackend that a decode of one rank uses, with buffers at stable addresses."""

    def __init__(
        self, layout: DcpLayout, rank: int, pool: torch.Tensor, table: torch.Tensor, heads: int, context: int
    ) -> None:
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

        n = table.shape[0]
        self.layout, self.rank, self.heads = layout, rank, heads
        self.req_to_token, self.device, self.max_context_len = table, DEVICE, context
        self.dcp_size, self.dcp_rank, self.num_head, self.num_kv_head = layout.dcp_size, rank, heads, 1
        self.use_mla, self.use_pdl = True, dependent_launch()
        self.decode_attention_fwd = decode_attention_fwd
        self.token_to_kv_pool = Pool(pool, layout, rank)
        self.max_kv_splits = max_kv_splits(context)
        self.kv_indptr = torch.zeros(n + 1, dtype=torch.int32, device=DEVICE)
        self.kv_indices = torch.zeros(n * layout.plain.local_len(context, 0), dtype=torch.int64, device=DEVICE)
        self.forward_metadata = SimpleNamespace(
            kv_indptr=self.kv_indptr,
            kv_indices=self.kv_indices,
            attn_logits=torch.full((n, heads, self.max_kv_splits, LORA), math.nan, device=DEVICE),
            attn_lse=torch.full((n, heads, self.max_kv_splits), math.nan, device=DEVICE),
            num_kv_splits=torch.ones(n, dtype=torch.int32, device=DEVICE),
            uneven_batch=None,
        )

    def index(self, req_rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
        """Build this step's indices and plan in place; returns the local lengths."""
        with as_rank(self.layout, self.rank):
            *_, local = triton_mla.shard_kv_indices(self, req_rows, seq_lens, self.kv_indptr, self.kv_indices)
        triton_mla.plan_decode(lambda *_: None, self, self.forward_metadata.num_kv_splits, local)
        return local

    def split(self, local_lens: torch.Tensor) -> None:
        self.forward_metadata.num_kv_splits.copy_(kv_splits(local_lens, self.heads, self.max_kv_splits))

    def attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        seq_lens: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
        how: str = "a2a",
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(n, H, 576) queries -> out (n, H, 512), lse (n, H), natural log. new: (loc, k, k_rope) to write first.

        q: or its two parts, the first contiguous, as the model has them.
        """
        batch = SimpleNamespace(seq_lens=seq_lens, out_cache_loc=None if new is None else new[0])
        k, k_rope = (None, None) if new is None else new[1:]
        q_nope, q_rope = q if isinstance(q, tuple) else (q[..., :LORA].contiguous(), q[..., LORA:])
        write = lambda backend, layer, _batch, k, k_rope: backend.token_to_kv_pool.set_mla_kv_buffer(  # noqa: E731
            layer, SimpleNamespace(loc=new[0]), k, k_rope
        )
        with as_rank(self.layout, self.rank, how), mock.patch.object(triton_mla, "_write_kv", write):
            out, lse = triton_mla.forward_decode(
                None, self, q_nope, k, k, MlaLayer(self.heads), batch, q_rope=q_rope, k_rope=k_rope
            )
        return out.view(q_nope.shape), lse


def triton_rank(batch: Batch, rank: int, heads: int, context: int | None = None) -> TritonRank:
    context = context or batch.table.shape[1]
    return TritonRank(batch.layout, rank, batch.pools[rank], batch.table, heads, context)


def triton_partials(batch: Batch, q: torch.Tensor, how: str = "a2a") -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's (out, lse) for the merge ``how``, stacked: (P, n, H, 512), (P, n, H)."""
    parts = []
    for rank in batch.ranks:
        backend = triton_rank(batch, rank, q.shape[1])
        backend.split(backend.index(batch.req_rows, batch.seq_lens))
        parts.append(backend.attend(q, batch.seq_lens, how=how))
        del backend
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])


def shard_rows(
    batch: Batch, rank: int, dtype: torch.dtype = torch.int32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """indptr (n + 1,) int32, exact rows, local lengths of one rank."""
    local = batch.layout.local_len(batch.seq_lens, rank)
    indptr = torch.zeros(len(batch.lens) + 1, dtype=torch.int32, device=DEVICE)
    torch.cumsum(local, dim=0, out=indptr[1:])
    total = sum(batch.layout.local_len(n, rank) for n in batch.lens)
    rows = torch.empty(total, dtype=dtype, device=DEVICE)
    kernels.shard_rows_from_table(batch.table, batch.req_rows, local, indptr, rows, batch.layout, rank)
    return indptr, rows, local


class FlashInferRank:
    """FlashInfer's MLA decode as FlashInferMLAAttnBackend plans it, over one rank's rows.

    hooked: as the plugin has it at B > 1. Otherwise FlashInfer's alone: DCP1, and SGLang's own token round-robin.
    """

    _workspace: torch.Tensor | None = None

    def __init__(
        self, pool: torch.Tensor, heads: int, hooked: bool, graph: dict[str, torch.Tensor] | None = None
    ) -> None:
        from flashinfer import BatchMLAPagedAttentionWrapper

        if FlashInferRank._workspace is None:
            FlashInferRank._workspace = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
        buffers = {} if graph is None else dict(use_cuda_graph=True, **graph)
        self.wrapper = BatchMLAPagedAttentionWrapper(FlashInferRank._workspace, backend="auto", **buffers)
        self.pool, self.heads, self.hooked, self.graph = pool, heads, hooked, graph
        # What the hook reads of SGLang's FlashInferMLAIndicesUpdaterDecode.
        self.data_type, self.kv_lora_rank, self.qk_rope_head_dim = WORK, LORA, ROPE

    def plan(self, indptr: torch.Tensor, rows: torch.Tensor, local: torch.Tensor) -> None:
        qo = torch.arange(local.numel() + 1, dtype=torch.int32, device=DEVICE)
        self._plan(self.wrapper.plan, qo, indptr, rows, local.to(torch.int32))

    def replan(self, indptr: torch.Tensor, rows: torch.Tensor, local: torch.Tensor) -> None:
        """SGLang's plan before a replay, from lengths on the host; the rows go into the graph's own buffer."""
        from sglang.srt.layers.attention.flashinfer_mla_backend import fast_mla_decode_plan

        kv_indices = self.graph["kv_indices"]
        kv_indices[: rows.numel()] = rows
        qo = torch.arange(local.numel() + 1, dtype=torch.int32)
        lens = local.to("cpu", torch.int32)
        self._plan(lambda *args: fast_mla_decode_plan(self.wrapper, *args), qo, indptr.cpu(), kv_indices, lens)

    def _plan(self, plan: Callable[..., None], *tensors: torch.Tensor) -> None:
        def original(*_: Any) -> None:
            plan(*tensors, self.heads, LORA, ROPE, 1, False, SCALE, WORK, WORK)

        if not self.hooked:
            return original()
        with mock.patch.object(flashinfer_float16, "over_dcp_group", lambda mine: [mine]):
            flashinfer_mla.call_begin_forward(original, self, self.wrapper)

    def attend(self, q: torch.Tensor, pool: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """out (n, H, 512) and base-2 LSE (n, H). An fp8 pool is widened first, as SGLang does."""
        kv = (self.pool if pool is None else pool).to(q.dtype)
        q_nope, q_rope = q[..., :LORA], q[..., LORA:]
        out = torch.empty(q_nope.shape, dtype=q.dtype, device=DEVICE)
        out, lse = self.wrapper.run(q_nope, q_rope, kv[..., :LORA], kv[..., LORA:], out=out, return_lse=True)
        return flashinfer_float16.partial_result(self.wrapper, out), lse


def flashinfer_partials(batch: Batch, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank's guarded (out, base-2 lse), stacked."""
    outs, lses = [], []
    for rank in batch.ranks:
        backend = FlashInferRank(batch.pools[rank], q.shape[1], hooked=batch.layout.block_size > 1)
        backend.plan(*shard_rows(batch, rank))
        out, lse = backend.attend(q)
        guard_empty_shards(out, lse, batch.seq_lens, batch.layout, rank)
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def merge(outs: torch.Tensor, lses: torch.Tensor, base_e: bool, how: str = "a2a") -> torch.Tensor:
    """All ranks' partial results merged as an engine does -> (n, H, 512) in the working dtype.

    how: "a2a" (the combine kernel after the all-to-all) or "ag_rs" (each rank's correction, summed in float32).
    """
    from sglang.kernels.ops.attention.dcp_kernels import CPTritonContext, correct_attn_out, dcp_lse_combine_triton

    if how == "a2a":
        return partials.lse_combine(dcp_lse_combine_triton, outs, lses, base_e)[0]

    def gather_and_scatter(_out: torch.Tensor) -> torch.Tensor:
        total = 0.0
        for rank in range(outs.shape[0]):
            scaled = torch.empty(outs[rank].transpose(0, 1).shape, dtype=torch.float32, device=DEVICE)
            correct_attn_out(outs[rank], lses, rank, CPTritonContext(), scaled, is_lse_base_on_e=base_e)
            total = total + scaled
        return total.transpose(0, 1).to(outs.dtype)

    return partials.gather_lse_reduce_scatter(gather_and_scatter, outs)


# -- references --------------------------------------------------------------------------------------------------------


def attention_f64(q: torch.Tensor, kv: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode attention in float64. q: (n, H, 576), kv: n of (length, 576). -> out (n, H, 512), lse (n, H), natural."""
    outs, lses = [], []
    for query, rows in zip(q.double(), kv, strict=True):
        rows = rows.double()
        scores = query @ rows.T * SCALE
        lses.append(scores.logsumexp(-1))
        outs.append(scores.softmax(-1) @ rows[:, :LORA])
    return torch.stack(outs), torch.stack(lses)


def extend_f64(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last len(q) positions in float64. q: (m, H, 576), kv: (n, 576). -> (m, H, 512)."""
    m, n = q.shape[0], kv.shape[0]
    rows = kv.double()
    scores = torch.einsum("mhd,nd->mhn", q.double(), rows) * SCALE
    position = torch.arange(n - m, n, device=q.device)
    hidden = torch.arange(n, device=q.device) > position[:, None]
    scores = scores.masked_fill(hidden[:, None, :], -math.inf)
    return scores.softmax(-1) @ rows[:, :LORA]


def single(batch: Batch, dtype: torch.dtype | None = None) -> Batch:
    """The same requests on one rank: what DCP1 holds, or the same rows in another dtype."""
    layout = DcpLayout(1, 1)
    table, rows = random_table(layout, batch.lens, batch.page_size, seed=1)
    pool = torch.full((rows, 1, DIM), math.nan, dtype=torch.float32, device=DEVICE).to(dtype or batch.pools[0].dtype)
    for i, kv in enumerate(x.to(pool.dtype) for x in batch.kv):
        as_bytes_if_fp8(pool)[table[i, : batch.lens[i]].long(), 0] = as_bytes_if_fp8(kv)
    return Batch(layout, batch.page_size, batch.lens, table, batch.req_rows, batch.seq_lens, batch.kv, [pool])


def stock_decode(one: Batch, q: torch.Tensor, backend: str) -> torch.Tensor:
    """SGLang's DCP1 decode over the pool of :func:`single`: none of this project's code runs. -> (n, H, 512)."""
    n, heads = q.shape[:2]
    rows = torch.cat([one.table[i, :length] for i, length in enumerate(one.lens)])
    indptr = torch.zeros(n + 1, dtype=torch.int32, device=DEVICE)
    torch.cumsum(one.seq_lens, dim=0, out=indptr[1:])
    pool = one.pools[0]
    if backend == "flashinfer":
        wrapper = FlashInferRank(pool, heads, hooked=False)
        wrapper.plan(indptr, rows, one.seq_lens)
        return wrapper.attend(q)[0]
    from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd

    cap = max_kv_splits(one.table.shape[1])
    out = torch.empty(n, heads, LORA, dtype=q.dtype, device=DEVICE)
    logits = torch.full((n, heads, cap, LORA), math.nan, device=DEVICE)
    lse = torch.full((n, heads, cap), math.nan, device=DEVICE)
    splits = kv_splits(one.seq_lens, heads, cap)
    decode_attention_fwd(
        q,
        pool,
        pool[..., :LORA],
        out,
        indptr,
        rows.long(),
        logits,
        lse,
        splits,
        cap,
        SCALE,
        1.0,
        1.0,
        has_mla=True,
        use_pdl=dependent_launch(),
    )
    return out


# -- compare -----------------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """norm(got - want) / norm(want) over requests and heads: largest, mean, and (request, head) of the largest."""

    worst: float
    mean: float
    where: tuple[int, int]

    def __str__(self) -> str:
        return f"worst {self.worst:.2e} at {self.where}, mean {self.mean:.2e}"


def difference(got: torch.Tensor, want: torch.Tensor) -> Difference:
    """Relative error per (request, head) row. A NaN counts as infinite."""
    error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    error = torch.where(error.isnan(), math.inf, error)
    flat = int(error.argmax())
    return Difference(float(error.max()), float(error.mean()), divmod(flat, error.shape[1]))


# -- time --------------------------------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """Microseconds: median, 10th and 90th percentile over ``count`` samples."""

    median: float
    p10: float
    p90: float
    count: int


def timing(samples_us: Sequence[float]) -> Timing:
    p10, median, p90 = np.percentile(np.asarray(samples_us), [10, 50, 90])
    return Timing(float(median), float(p10), float(p90), len(samples_us))


def capture(body: Callable[[], Any], warmups: int = 2) -> torch.cuda.CUDAGraph:
    """``body`` as a CUDA graph. It is run a few times first, so that nothing compiles or loads during capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph


def time_alternating(
    runs: dict[str, Callable[[], Any]], seconds: float = 0.3, least: int = 15, most: int = 400
) -> dict[str, Timing]:
    """Each callable timed with events, in turns, so that a drift of the clocks meets all of them alike.

    Every round has another order: what the one before leaves in the cache would favour a fixed neighbour.
    """
    for run in runs.values():
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for run in runs.values():
        run()
    end.record()
    end.synchronize()
    rounds = int(min(most, max(least, seconds * 1e3 / max(start.elapsed_time(end), 1e-3))))
    marks = {
        name: [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for name in runs
    }
    order, rng = list(runs), random.Random(0)
    for i in range(rounds):
        rng.shuffle(order)
        for name in order:
            marks[name][i][0].record()
            runs[name]()
            marks[name][i][1].record()
    torch.cuda.synchronize()
    return {name: timing([a.elapsed_time(b) * 1e3 for a, b in pairs]) for name, pairs in marks.items()}


def copy_bandwidth(gigabytes: float = 4.0) -> float:
    """Bytes per second of a large device-to-device copy, read plus written."""
    source = torch.empty(int(gigabytes * 2**30) // 4, dtype=torch.float32, device=DEVICE).normal_()
    target = torch.empty_like(source)
    best = time_alternating({"copy": lambda: target.copy_(source)}, seconds=0.5)["copy"]
    return 2 * source.numel() * 4 / (best.median * 1e-6)


def environment() -> dict[str, Any]:
    """Which machine, how many GPUs, which versions: printed with every result."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    def found(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "multiprocessors": core_count() if cuda else 0,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{p: found(p) for p in ("torch", "triton", "sglang", "flashinfer-python")},
    }
