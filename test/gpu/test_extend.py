"""Absorbed MLA extend: prefix from the gathered shards, new tokens from the batch, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import kit
import pytest
import torch
from kit import DEVICE, DIM, LORA

from sglang_dcp_block.attention import triton_mla
from sglang_dcp_block.dcp.gather import gather_prefix
from sglang_dcp_block.dcp.layout import DcpLayout

ON_GPU = DEVICE.type == "cuda"
#: The gather copies bits, so an extend under DCP differs from DCP1 by nothing but the order of its prefix tiles.
ALLOWED = 1.05


class Extend(NamedTuple):
    """prefix and new: tokens per request. kv: per request (prefix + new, 576)."""

    prefix: list[int]
    new: list[int]
    kv: list[torch.Tensor]
    q: list[torch.Tensor]  # (new, H, 576)


def extends(layout: DcpLayout, heads: int) -> Extend:
    b, c = layout.block_size, layout.cycle
    pairs = [(0, 5), (1, 1), (b, 64), (c - 1, 17), (c, 33), (c + 1, 130), (5000, 70), (32768, 64)]
    if not ON_GPU:
        pairs = [(0, 3), (b, 2), (c + 1, 5)]
    prefix, new = [p for p, _ in pairs], [n for _, n in pairs]
    kv = [kit.random_kv(p + n, 10 + i).to(kit.WORK) for i, (p, n) in enumerate(pairs)]
    q = [kit.random_q(n, heads, 70 + i) for i, n in enumerate(new)]
    return Extend(prefix, new, kv, q)


def indptr(lens: list[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=dtype, device=DEVICE)


def gathered_prefix(e: Extend, layout: DcpLayout, dtype: torch.dtype) -> tuple[kit.Batch, torch.Tensor]:
    """Prefixes through the ranks' pools: written, selected, gathered. The dense rows are the same on every rank."""
    cached = [i for i, p in enumerate(e.prefix) if p]
    batch = kit.make_batch(layout, [e.prefix[i] for i in cached], page_size=64 if ON_GPU else 4, dtype=dtype)
    batch.kv[:] = [e.kv[i][: e.prefix[i]].to(dtype) for i in cached]
    slots = torch.cat([batch.table[i, :n] for i, n in enumerate(batch.lens)])
    flat = torch.cat(batch.kv)
    for rank in batch.ranks:
        kit.write_mla_kv(batch.pools[rank], slots, flat[:, :LORA], flat[:, LORA:], layout, rank)
    mine = []
    for rank in batch.ranks:
        _, rows, _ = kit.shard_rows(batch, rank, torch.int64)
        mine.append(batch.pools[rank][rows])
    sent: list[torch.Tensor] = []
    for all_gather in (lambda out, x: sent.append(x.clone()), lambda out, x: out.copy_(torch.cat(sent))):
        for rank in batch.ranks:
            rows = mine[rank]
            dense = gather_prefix(
                rows[..., :LORA], rows[..., LORA:], [0] * len(batch.lens), batch.lens, layout, rank, all_gather
            )
    return batch, dense


@pytest.mark.parametrize("heads", [16, 32, 64, 128] if ON_GPU else [16])
@pytest.mark.parametrize(
    "layout", [DcpLayout(2, 64), DcpLayout(8, 64), DcpLayout(8, 1)] if ON_GPU else [DcpLayout(2, 4)], ids=str
)
def test_extend_over_the_gathered_prefix_is_as_exact_as_stock_dcp1(layout: DcpLayout, heads: int, report) -> None:
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    e = extends(layout, heads)
    batch, dense = gathered_prefix(e, layout, kit.WORK)
    want_dense = torch.cat([kv[:p] for kv, p in zip(e.kv, e.prefix, strict=True)])
    assert torch.equal(dense[:, 0], want_dense), "the gathered prefix is not the requests' KV in order"

    q = torch.cat(e.q)
    new_kv = torch.cat([kv[p:] for kv, p in zip(e.kv, e.prefix, strict=True)])[:, None]
    total_prefix = sum(e.prefix)
    buffer = torch.full((total_prefix + len(new_kv), 1, DIM), float("nan"), dtype=kit.WORK, device=DEVICE)
    buffer[:total_prefix] = dense
    rank = layout.dcp_size - 1
    backend = SimpleNamespace(
        use_mla=True,
        extend_attention_fwd=extend_attention_fwd,
        token_to_kv_pool=kit.Pool(batch.pools[rank], layout, rank),
        forward_metadata=SimpleNamespace(
            custom_mask=None,
            kv_indptr=torch.zeros(len(e.new) + 1, dtype=torch.int32, device=DEVICE),
            qo_indptr=indptr(e.new, torch.int64),
            max_extend_len=max(e.new),
        ),
    )
    forward_batch = SimpleNamespace(
        extend_prefix_lens=torch.tensor(e.prefix, device=DEVICE),
        attn_dcp_metadata=SimpleNamespace(dcp_extend_prefix_lens_sum=total_prefix, dcp_kv_buffer=buffer),
    )
    k, k_rope = new_kv[..., :LORA].contiguous(), new_kv[..., LORA:].contiguous()
    with kit.as_rank(layout, rank), mock.patch.object(triton_mla, "_write_kv", lambda *args: None):
        out = triton_mla.forward_extend(
            None,
            backend,
            q[..., :LORA].contiguous(),
            k,
            k,
            kit.MlaLayer(heads),
            forward_batch,
            q_rope=q[..., LORA:].contiguous(),
            k_rope=k_rope,
        ).view(-1, heads, LORA)

    stock = torch.empty_like(out)
    pool = torch.cat([torch.zeros(1, 1, DIM, dtype=kit.WORK, device=DEVICE), want_dense[:, None]])
    rows = torch.arange(1, total_prefix + 1, device=DEVICE)
    full_k = new_kv.contiguous()
    extend_attention_fwd(
        q.contiguous(), full_k, k, stock, pool, pool[..., :LORA], indptr(e.new, torch.int64), indptr(e.prefix), rows,
        None, True, None, max(e.new), 1.0, 1.0, sm_scale=kit.SCALE,
    )  # fmt: skip
    want = torch.cat([kit.extend_f64(x, kv) for x, kv in zip(e.q, e.kv, strict=True)])
    ours, theirs = kit.difference(out, want), kit.difference(stock, want)
    report(layout=str(layout), heads=heads, worst=ours.worst, stock_worst=theirs.worst, mean=ours.mean)
    assert ours.worst <= ALLOWED * theirs.worst, f"{ours}, stock DCP1: {theirs}"

    shifted = buffer.roll(1, 0)
    forward_batch.attn_dcp_metadata.dcp_kv_buffer = shifted
    shifted[:1] = 0
    with kit.as_rank(layout, rank), mock.patch.object(triton_mla, "_write_kv", lambda *args: None):
        wrong = triton_mla.forward_extend(
            None, backend, q[..., :LORA].contiguous(), k, k, kit.MlaLayer(heads), forward_batch,
            q_rope=q[..., LORA:].contiguous(), k_rope=k_rope,
        ).view(-1, heads, LORA)  # fmt: skip
    assert kit.difference(wrong, want).worst > 0.1, "a prefix shifted by one row passed"


@pytest.mark.parametrize("heads", [16, 2])
def test_extend_without_prefix_is_plain_causal_attention(heads: int, report) -> None:
    """No prefix: the model computes MHA on its own heads, 192-wide keys and 128-wide values."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    layout = DcpLayout(8, 64)
    lens = [1, 63, 64, 500] if ON_GPU else [1, 5]
    total = sum(lens)
    gen = torch.Generator(DEVICE).manual_seed(0)
    q, k = (torch.randn(total, heads, 192, generator=gen, device=DEVICE).to(kit.WORK) for _ in range(2))
    v = torch.randn(total, heads, 128, generator=gen, device=DEVICE).to(kit.WORK)
    pool = torch.zeros(64, 1, DIM, dtype=kit.WORK, device=DEVICE)
    backend = SimpleNamespace(
        use_mla=True,
        extend_attention_fwd=extend_attention_fwd,
        token_to_kv_pool=kit.Pool(pool, layout, 0),
        forward_metadata=SimpleNamespace(
            custom_mask=None,
            kv_indptr=torch.zeros(len(lens) + 1, dtype=torch.int32, device=DEVICE),
            qo_indptr=indptr(lens, torch.int64),
            max_extend_len=max(lens),
        ),
    )
    layer = kit.MlaLayer(heads, tp_k_head_num=heads, qk_head_dim=192, head_dim=192, v_head_dim=128)
    out = triton_mla.forward_extend(None, backend, q, k, v, layer, SimpleNamespace(), save_kv_cache=False)
    out = out.view(total, heads, 128)
    want, first = [], 0
    for n in lens:
        at = slice(first, first + n)
        scores = torch.einsum("mhd,nhd->hmn", q[at].double(), k[at].double()) * kit.SCALE
        scores = scores.masked_fill(torch.ones(n, n, device=DEVICE).triu(1).bool(), -torch.inf)
        want.append(torch.einsum("hmn,nhd->mhd", scores.softmax(-1), v[at].double()))
        first += n
    error = kit.difference(out, torch.cat(want))
    report(heads=heads, worst=error.worst, mean=error.mean)
    assert error.worst < (0.02 if torch.bfloat16 == kit.WORK else 1e-5)
