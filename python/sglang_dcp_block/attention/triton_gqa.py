"""Grouped-query attention on SGLang's Triton backend under DCP, with blocks instead of single tokens.

SGLang 0.5.23 has this path for token round-robin: every rank of a DCP group computes the same KV heads, writes its
share of the tokens, attends with the query heads of the whole group to its own rows, and merges by LSE. It is right
where the ranks of a group hold the same KV heads (server_args.REFUSALS, gqa-kv-heads). Blocks change who writes, which
rows are read (:func:`sglang_dcp_block.attention.triton_mla.shard_kv_indices`), and that a shard is empty while others
are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_dcp_block.mem_cache.kv_write import write_rows
from sglang_dcp_block.runtime import active_layout, active_rank


def set_kv_buffer(
    backend: Any,
    forward_batch: Any,
    layer: Any,
    loc_info: Any,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: Any = None,
    v_scale: Any = None,
) -> None:
    """Write the rows of the tokens whose slots this rank owns, for ``TritonAttnBackend._set_kv_buffer``.

    Args:
        k: (n, H, D) and v: (n, H, Dv) in the pool's dtype (plugin.check_gqa_pool), of a model whose KV scales are 1
            (plugin.check_kv_scales).
    """
    pool, loc = backend.token_to_kv_pool, forward_batch.out_cache_loc
    for buffer, rows in ((pool.get_key_buffer(layer.layer_id), k), (pool.get_value_buffer(layer.layer_id), v)):
        write_rows(buffer.flatten(1), loc, rows.flatten(1), active_layout(), active_rank())


def forward_extend_dcp(
    original: Callable[..., torch.Tensor],
    backend: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    *args: Any,
) -> torch.Tensor:
    """All ranks take part in the merge over the cached prefix, or none does.

    SGLang leaves it out on a rank that has no index of a prefix row. With blocks one rank's share of a prefix may be
    empty, and the others would wait for it forever. Our indices have the same size on every rank, so the batch decides.
    """
    prefix_lens = forward_batch.extend_prefix_lens_cpu
    if prefix_lens is not None and not any(prefix_lens):
        meta = backend.forward_metadata
        meta.kv_indices = meta.kv_indices[:0]
    return original(backend, q, k, v, layer, forward_batch, *args)
