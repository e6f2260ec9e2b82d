"""Absorbed MLA extend: prefix from the gathered shards, new tokens from the batch, against float64."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import kit
import pytest
import torch
from kit import DEVICE, DIM, LORA, indptr

from sglang_dcp_block.attention import triton_mla
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


def gathered_prefix(e: Extend, layout: DcpLayout, dtype: torch.dtype) -> tuple[kit.Batch, torch.Tensor]:
    """Prefixes through the ranks' pools: written, selected, gathered. The dense rows are the same on every rank."""
    cached = [i for i, p in enumerate(e.prefix) if p]
    lens, kv = [e.prefix[i] for i in cached], [e.kv[i][: e.prefix[i]] for i in cached]
    batch = kit.make_batch(layout, lens, page_size=kit.page_size_of(layout), dtype=dtype, kv=kv)
    return batch, kit.gathered_prefix(batch)


class Case(NamedTuple):
    layout: DcpLayout
    heads: int
    dtype: torch.dtype = kit.WORK  # of the prefix

    def __str__(self) -> str:
        layout, dtype = self.layout, str(self.dtype).split(".")[-1]
        rotated = f"-rotated{layout.page_rows}" if layout.is_rotated else ""
        return f"P{layout.dcp_size}-B{layout.block_size}{rotated}-H{self.heads}-{dtype}"


def cases() -> list[Case]:
    if not ON_GPU:
        plain = DcpLayout(2, 4)
        return [Case(plain, 16), Case(plain, 16, kit.FP8), Case(plain.rotated(8), 16)]
    found = [Case(DcpLayout(*c), heads) for c in ((2, 64), (8, 64), (8, 1)) for heads in (16, 32, 64, 128)]
    found += [Case(DcpLayout(p, b), 16, kit.FP8) for p in (2, 4, 8) for b in (1, 16, 64)]
    found += [Case(DcpLayout(p, b).rotated(64), 16) for p in (2, 4, 8) for b in (16, 64)]
    return [*found, Case(DcpLayout(4, 64).rotated(128), 16, kit.FP8)]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_extend_over_the_gathered_prefix_is_as_exact_as_stock_dcp1(case: Case, report) -> None:
    """An FP8 prefix is widened. SGLang's kernel rounds queries and weights to FP8 instead, so there the stricter
    yardstick is stock over the widened rows."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    layout, heads, dtype = case
    e = extends(layout, heads)
    batch, dense = gathered_prefix(e, layout, dtype)
    want_dense = torch.cat([kv[:p] for kv, p in zip(e.kv, e.prefix, strict=True)]).to(dtype)
    same = torch.equal(kit.as_bytes_if_fp8(dense[:, 0]), kit.as_bytes_if_fp8(want_dense))
    assert same, "the gathered prefix is not the requests' KV in order"

    q = torch.cat(e.q)
    new_kv = torch.cat([kv[p:] for kv, p in zip(e.kv, e.prefix, strict=True)])[:, None]
    total_prefix = sum(e.prefix)
    buffer = torch.full((total_prefix + len(new_kv), 1, DIM), float("nan"), device=DEVICE).to(dtype)
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

    def attend() -> torch.Tensor:
        with kit.as_rank(layout, rank), mock.patch.object(triton_mla, "_write_kv", lambda *args: None):
            return triton_mla.forward_extend(
                None, backend, q[..., :LORA].contiguous(), k, k, kit.MlaLayer(heads), forward_batch,
                q_rope=q[..., LORA:].contiguous(), k_rope=k_rope,
            ).view(-1, heads, LORA)  # fmt: skip

    out = attend()

    def stock(pool_dtype: torch.dtype) -> torch.Tensor:
        result = torch.empty_like(out)
        pool = torch.zeros(total_prefix + 1, 1, DIM, device=DEVICE).to(pool_dtype)
        pool[1:, 0] = want_dense.to(pool_dtype)
        rows = torch.arange(1, total_prefix + 1, device=DEVICE)
        extend_attention_fwd(
            q.contiguous(), new_kv.contiguous(), k, result, pool, pool[..., :LORA], indptr(e.new, torch.int64),
            indptr(e.prefix), rows, None, True, None, max(e.new), 1.0, 1.0, sm_scale=kit.SCALE,
        )  # fmt: skip
        return result

    seen = [torch.cat([kv[:p].to(dtype).to(kv.dtype), kv[p:]]) for kv, p in zip(e.kv, e.prefix, strict=True)]
    want = torch.cat([kit.extend_f64(x, kv) for x, kv in zip(e.q, seen, strict=True)])
    ours, theirs = kit.difference(out, want), {str(d): kit.difference(stock(d), want) for d in {kit.WORK, dtype}}
    report(case=str(case), worst=ours.worst, mean=ours.mean, **{f"stock_{d}": x.worst for d, x in theirs.items()})
    for name, error in theirs.items():
        assert ours.worst <= ALLOWED * error.worst, f"{ours}, stock DCP1 over {name}: {error}"

    shifted = kit.as_bytes_if_fp8(buffer).roll(1, 0)
    shifted[:1] = 0
    forward_batch.attn_dcp_metadata.dcp_kv_buffer = shifted.view(dtype)
    assert kit.difference(attend(), want).worst > 0.1, "a prefix shifted by one row passed"


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
