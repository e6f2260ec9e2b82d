"""Backend-independent hooks: SGLang's DCP helpers, answered from the layout in force.

Each function has the signature of the target that plugin.HOOKS names for it.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp_block.dcp import gather, kernels
from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout
from sglang_dcp_block.mem_cache.host_rows import rows_of_run
from sglang_dcp_block.mem_cache.kv_write import write_mla_kv
from sglang_dcp_block.runtime import active_layout, active_rank


def get_attn_backend() -> Any:
    from sglang.srt.model_executor import forward_context

    return forward_context.get_attn_backend()


def get_dcp_lens(
    lens: torch.Tensor,
    dcp_size: int,
    dcp_rank: int,
    start: torch.Tensor | None = None,
    interleave_size: int | None = None,
) -> torch.Tensor:
    """Tokens of [start, start + lens) on a rank. A caller that names no interleave size gets the layout's blocks.

    Under rotation lengths don't tell, and only the heuristic that sizes Triton's splits asks: it gets the most that a
    rank may hold.
    """
    if dcp_size == 1:
        return lens
    layout = active_layout() if interleave_size is None else DcpLayout(dcp_size, interleave_size)
    if layout.dcp_size != dcp_size:
        raise ValueError(f"asked for lengths over {dcp_size} DCP ranks, but the layout in force is {layout}")
    if layout.is_rotated and start is None:
        return layout.plain.local_len(lens, 0)
    return layout.local_len(lens, dcp_rank) if start is None else layout.interval_len(start, lens, dcp_rank)


def translate_dcp_read_ids(original: Any, translator: Any, widened_ids: torch.Tensor) -> torch.Tensor:
    """Rows of slots that this rank owns."""
    if translator.is_translating:
        raise RuntimeError("a block layout can't be read through the unified memory pool's translation")
    return active_layout().local_index(widened_ids)


def maybe_dcp_kernel_indices(indices: torch.Tensor, dcp_size: int, dcp_rank: int) -> torch.Tensor:
    return indices if dcp_size == 1 else rows_of_run(indices, active_layout(), dcp_rank)


def set_mla_kv_buffer(
    kv_buffer: torch.Tensor,
    loc: torch.Tensor,
    cache_k_nope: torch.Tensor,
    cache_k_rope: torch.Tensor,
    *,
    reserved_skip_index: int = 0,
) -> None:
    write_mla_kv(
        kv_buffer,
        loc,
        cache_k_nope,
        cache_k_rope,
        active_layout(),
        active_rank(),
        reserved_skip_index=reserved_skip_index,
    )


def prepare_extend_metadata(
    original: Any,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_prefix_lens_cpu: list[int],
    extend_seq_lens: torch.Tensor,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """SGLang's metadata with this rank's prefix rows selected per request, from position 0 of each.

    Under rotation only the device knows whose a prefix's last rows are. So every rank sends all that any may hold,
    which the host can count, and the order of the gathered rows comes from the slots, once for all layers.
    """
    metadata = original(
        seq_lens,
        extend_prefix_lens,
        extend_prefix_lens_cpu,
        extend_seq_lens,
        req_pool_indices,
        req_to_token,
        *args,
        **kwargs,
    )
    if metadata is None:
        return None
    layout, rank = active_layout(), active_rank()
    rotated = layout if isinstance(layout, RotatedLayout) else None
    if rotated:
        layout, rank = layout.plain, 0  # who holds the most
    local_lens = layout.local_len(extend_prefix_lens, rank)
    indptr = torch.zeros(len(local_lens) + 1, dtype=torch.int32, device=local_lens.device)
    torch.cumsum(local_lens, dim=0, out=indptr[1:])
    total = sum(layout.local_len(int(n), rank) for n in extend_prefix_lens_cpu)
    rows = torch.empty(total, dtype=torch.int32, device=local_lens.device)
    kernels.shard_rows_from_table(req_to_token, req_pool_indices, local_lens, indptr, rows, layout, rank)
    metadata.dcp_local_prefix_kv_indices = rows
    if rotated:
        get_attn_backend().dcp_block_gather_order = kernels.rotated_gather_order(
            req_to_token, req_pool_indices, extend_prefix_lens, indptr, total, sum(extend_prefix_lens_cpu), rotated
        )
    return metadata


def all_gather_kv_cache(
    prefix_kv_a: torch.Tensor,
    prefix_k_pe: torch.Tensor,
    prefix_kv_lens_cpu: torch.Tensor,
    prefix_starts_cpu: torch.Tensor | None = None,
) -> torch.Tensor:
    from sglang.srt.runtime_context import get_parallel

    lens, layout = prefix_kv_lens_cpu.tolist(), active_layout()
    starts = [0] * len(lens) if prefix_starts_cpu is None else prefix_starts_cpu.tolist()
    all_gather = get_parallel().dcp_group.all_gather_into_tensor
    if not layout.is_rotated:
        return gather.gather_prefix(prefix_kv_a, prefix_k_pe, starts, lens, layout, active_rank(), all_gather)
    order = get_attn_backend().dcp_block_gather_order
    if any(starts) or sum(lens) != len(order):
        raise RuntimeError(
            f"the gather was prepared for whole prefixes of {len(order)} tokens, got {starts} and {lens}"
        )
    return gather.gather_rows(prefix_kv_a, prefix_k_pe, len(prefix_kv_a), order, layout.dcp_size, all_gather)


def filter_chunk_kv_indices(
    kv_indices: torch.Tensor, chunk_starts_cpu: torch.Tensor, chunk_seq_lens_cpu: torch.Tensor
) -> torch.Tensor:
    """This rank's slots, still widened, of one prefix chunk per request, packed in request order."""
    layout, rank = active_layout(), active_rank()
    starts, lens = chunk_starts_cpu.to(torch.int64), chunk_seq_lens_cpu.to(torch.int64)
    local_lens = layout.interval_len(starts, lens, rank)
    indptrs = torch.zeros((2, len(lens) + 1), dtype=torch.int64)
    torch.cumsum(torch.stack([lens, local_lens]), dim=1, out=indptrs[:, 1:])
    total = int(indptrs[1, -1])
    out = kv_indices.new_empty(total)
    on_device = [x.to(kv_indices.device, non_blocking=True) for x in (indptrs[0], local_lens, indptrs[1], starts)]
    stream_indptr, local_lens, indptr, starts = on_device
    kernels.shard_slots_from_stream(kv_indices, stream_indptr, local_lens, indptr, out, layout, rank, starts=starts)
    return out
