"""KV write, index building, prefix gather and empty-shard guard, compiled, one rank after another in one process."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import kit
import numpy as np
import pytest
import torch
from brute_force import deal, deal_pages
from kit import DEVICE, DIM, LORA

from sglang_dcp_block.attention import partials
from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.dcp.gather import gather_prefix
from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout
from sglang_dcp_block.mem_cache.kv_write import write_mla_kv

ON_GPU = DEVICE.type == "cuda"
LAYOUTS = [DcpLayout(p, b) for p in (2, 4, 8) for b in (1, 16, 64)] if ON_GPU else [DcpLayout(2, 4)]
LONG = [DcpLayout(8, 64), DcpLayout(8, 1), DcpLayout(2, 128)] if ON_GPU else [DcpLayout(2, 4)]
#: Pages of one block and of several.
ROTATED = (
    [DcpLayout(p, b).rotated(page) for p, page in ((2, 64), (4, 128), (8, 64)) for b in (16, 64)]
    if ON_GPU
    else [DcpLayout(2, 4).rotated(8)]
)


def name(value: object) -> str | None:
    if not isinstance(value, DcpLayout):
        return None
    rotated = f"-rotated{value.page_rows}" if isinstance(value, RotatedLayout) else ""
    return f"P{value.dcp_size}-B{value.block_size}{rotated}"


layouts = pytest.mark.parametrize("layout", LAYOUTS, ids=name)
rotated_layouts = pytest.mark.parametrize("layout", ROTATED, ids=name)


# -- KV write ----------------------------------------------------------------------------------------------------------


class Writing(NamedTuple):
    rows: int
    loc: torch.Tensor
    kv: torch.Tensor  # (tokens, 576)


def writing(layout: DcpLayout, tokens: int, dtype: torch.dtype) -> Writing:
    """Tokens to distinct slots anywhere in the pools, slot 0 (padding) and a negative slot among them."""
    rows = 32 * layout.block_size * (8 if ON_GPU else 2)
    gen = torch.Generator().manual_seed(tokens)
    slots = torch.randperm(rows * layout.dcp_size - 1, generator=gen)[:tokens] + 1
    loc = torch.cat([slots, torch.tensor([0, 0, -1])]).to(DEVICE)
    return Writing(rows, loc, kit.random_kv(len(loc), tokens).to(dtype))


def written_by_hand(pool: torch.Tensor, w: Writing, layout: DcpLayout, rank: int) -> torch.Tensor:
    if layout.is_rotated:
        pages = w.rows // layout.page_rows
        dealt = deal_pages(pages, layout.dcp_size, layout.block_size, layout.page_rows)
    else:
        dealt = deal(w.rows * layout.dcp_size, layout.dcp_size, layout.block_size)
    expected = pool.clone()
    for token, slot in enumerate(w.loc.tolist()):
        if slot > 0 and dealt.owner[slot] == rank:
            kit.as_bytes_if_fp8(expected)[dealt.row[slot], 0] = kit.as_bytes_if_fp8(w.kv)[token]
    return expected


def empty_pool(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, 1, DIM), float("nan"), device=DEVICE).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@layouts
@pytest.mark.parametrize("dtype", [kit.WORK, kit.FP8] if ON_GPU else [kit.WORK], ids=str)
def test_write_puts_each_row_where_dealing_puts_it(layout: DcpLayout, dtype: torch.dtype) -> None:
    w = writing(layout, 500 if ON_GPU else 40, dtype)
    source = kit.as_bytes_if_fp8(w.kv)  # k_nope and k_rope are slices of one latent row, as in the model
    for rank in range(layout.dcp_size):
        pool = empty_pool(w.rows, dtype)
        before = pool.clone()
        write_mla_kv(kit.as_bytes_if_fp8(pool), w.loc, source[:, None, :LORA], source[:, None, LORA:], layout, rank)
        assert torch.equal(bits(pool), bits(written_by_hand(before, w, layout, rank)))
        other = written_by_hand(before, w, layout, (rank + 1) % layout.dcp_size)
        assert not torch.equal(bits(pool), bits(other)), "the check can't tell two ranks apart"


@pytest.mark.parametrize("dcp_size", [2, 4, 8] if ON_GPU else [2])
def test_write_at_block_one_is_stock(dcp_size: int) -> None:
    from sglang.kernels.ops.kvcache.mla_buffer import _set_mla_kv_buffer_impl

    layout = DcpLayout(dcp_size, 1)
    w = writing(layout, 300 if ON_GPU else 40, kit.WORK)
    w = w._replace(loc=w.loc[:-1], kv=w.kv[:-1])  # stock has no negative slots
    nope, rope = w.kv[:, None, :LORA], w.kv[:, None, LORA:]
    for rank in range(dcp_size):
        ours, stock = empty_pool(w.rows, kit.WORK), empty_pool(w.rows, kit.WORK)
        write_mla_kv(ours, w.loc, nope, rope, layout, rank)
        _set_mla_kv_buffer_impl(stock, w.loc, nope, rope, reserved_skip_index=0, dcp_world_size=dcp_size, dcp_rank=rank)
        assert torch.equal(bits(ours), bits(stock))


@rotated_layouts
def test_write_under_rotation_deals_page_by_page(layout: RotatedLayout) -> None:
    w = writing(layout.plain, 500 if ON_GPU else 40, kit.WORK)
    unrotated_differs = False
    for rank in range(layout.dcp_size):
        pool = empty_pool(w.rows, kit.WORK)
        before = pool.clone()
        write_mla_kv(pool, w.loc, w.kv[:, None, :LORA], w.kv[:, None, LORA:], layout, rank)
        assert torch.equal(bits(pool), bits(written_by_hand(before, w, layout, rank)))
        unrotated_differs |= not torch.equal(bits(pool), bits(written_by_hand(before, w, layout.plain, rank)))
    assert unrotated_differs, "the check can't tell the rule from the one without rotation"


@pytest.mark.parametrize("layout", LAYOUTS + ROTATED[-2:], ids=name)
def test_fp8_rows_are_the_bytes_that_sglang_writes_without_dcp(layout: DcpLayout) -> None:
    """SGLang's pool casts and stores; under DCP our kernel scatters what it has cast. Some values overflow FP8, some
    are subnormal."""
    w = writing(layout.plain, 300 if ON_GPU else 40, kit.WORK)
    w.kv[::3] *= 200
    w.kv[1::3] /= 200
    count = len(w.kv)
    one = kit.sglang_pool(count + 1, kit.FP8)
    kit.write_through_pool(one, torch.arange(1, count + 1, device=DEVICE), w.kv)
    cast = w._replace(kv=one.get_key_buffer(0)[1:, 0])
    assert cast.kv.isnan().any() or cast.kv.float().abs().max() == 448, "nothing overflows"
    for rank in range(layout.dcp_size):
        pool = kit.sglang_pool(w.rows, kit.FP8)
        before = empty_pool(w.rows, kit.FP8)
        pool.kv_buffer[0].copy_(kit.as_bytes_if_fp8(before))
        kit.write_through_pool(pool, w.loc, w.kv, layout, rank)
        got = pool.get_key_buffer(0)
        assert torch.equal(bits(got), bits(written_by_hand(before, cast, layout, rank)))
        shifted = cast._replace(kv=kit.as_bytes_if_fp8(cast.kv).roll(1, 0).view(kit.FP8))
        assert not torch.equal(bits(got), bits(written_by_hand(before, shifted, layout, rank)))


# -- indices -----------------------------------------------------------------------------------------------------------


class Requests(NamedTuple):
    lens: list[int]
    starts: list[int]
    table: torch.Tensor
    rows: torch.Tensor  # request rows in the table, not in order


def requests(layout: DcpLayout, with_starts: bool) -> Requests:
    longest = 131072 if ON_GPU else 60
    lens = kit.lengths_around(layout, longest)
    gen = np.random.default_rng(7)
    starts = [int(gen.integers(0, n)) if with_starts else 0 for n in lens]
    table, _ = kit.random_table(layout, lens, 64 if ON_GPU else 4, seed=3, width=longest)
    order = torch.from_numpy(gen.permutation(len(lens)))
    shuffled = torch.zeros_like(table)
    shuffled[order.to(DEVICE)] = table
    return Requests(lens, starts, shuffled, order.to(DEVICE))


def owned_slots_by_hand(r: Requests, layout: DcpLayout, rank: int) -> list[np.ndarray]:
    dealt = deal(max(r.lens), layout.dcp_size, layout.block_size)
    table = r.table.cpu().numpy()
    owned = []
    for i, (n, start) in enumerate(zip(r.lens, r.starts, strict=True)):
        positions = np.arange(start, n)
        owned.append(table[int(r.rows[i]), positions[dealt.owner[start:n] == rank]])
    return owned


def lens_and_indptr(r: Requests, layout: DcpLayout, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lens = torch.tensor(r.lens, device=DEVICE)
    starts = torch.tensor(r.starts, device=DEVICE)
    local = layout.interval_len(starts, lens - starts, rank)
    indptr = torch.zeros(len(r.lens) + 1, dtype=torch.int32, device=DEVICE)
    torch.cumsum(local, dim=0, out=indptr[1:])
    return local, indptr, starts


@layouts
@pytest.mark.parametrize("with_starts", [False, True], ids=["from_zero", "from_anywhere"])
def test_rows_from_table_are_the_dealt_rows(layout: DcpLayout, with_starts: bool) -> None:
    r = requests(layout, with_starts)
    dealt = deal(int(r.table.max()) + 1, layout.dcp_size, layout.block_size)
    for rank in range(layout.dcp_size):
        local, indptr, starts = lens_and_indptr(r, layout, rank)
        owned = np.concatenate(owned_slots_by_hand(r, layout, rank))
        assert (dealt.owner[owned] == rank).all()
        out = torch.full((len(owned) + 9,), -7, dtype=torch.int64, device=DEVICE)
        kernels.shard_rows_from_table(
            r.table, r.rows, local, indptr, out, layout, rank, starts=starts if with_starts else None
        )
        assert np.array_equal(out[:-9].cpu().numpy(), dealt.row[owned])
        assert (out[-9:] == -7).all(), "wrote past the last run"


@layouts
@pytest.mark.parametrize("with_starts", [False, True], ids=["from_zero", "from_anywhere"])
def test_slots_from_stream_are_the_dealt_slots(layout: DcpLayout, with_starts: bool) -> None:
    r = requests(layout, with_starts)
    stream = torch.cat([r.table[r.rows[i], s:n] for i, (s, n) in enumerate(zip(r.starts, r.lens, strict=True))])
    sizes = torch.tensor([n - s for s, n in zip(r.starts, r.lens, strict=True)], device=DEVICE)
    stream_indptr = torch.zeros(len(r.lens) + 1, dtype=torch.int32, device=DEVICE)
    torch.cumsum(sizes, dim=0, out=stream_indptr[1:])
    for rank in range(layout.dcp_size):
        local, indptr, starts = lens_and_indptr(r, layout, rank)
        owned = np.concatenate(owned_slots_by_hand(r, layout, rank))
        out = torch.full((len(owned) + 9,), -7, dtype=torch.int32, device=DEVICE)
        kernels.shard_slots_from_stream(
            stream, stream_indptr, local, indptr, out, layout, rank, starts=starts if with_starts else None
        )
        assert np.array_equal(out[:-9].cpu().numpy(), owned)
        assert (out[-9:] == -7).all(), "wrote past the last run"


@pytest.mark.parametrize("dcp_size", [2, 4, 8] if ON_GPU else [2])
def test_indices_at_block_one_are_stock(dcp_size: int) -> None:
    from sglang.kernels.ops.attention.dcp_kernels import create_triton_kv_indices_for_dcp_triton

    layout = DcpLayout(dcp_size, 1)
    r = requests(layout, with_starts=False)
    for rank in range(dcp_size):
        local, indptr, _ = lens_and_indptr(r, layout, rank)
        ours = torch.zeros(int(indptr[-1]), dtype=torch.int64, device=DEVICE)
        stock = torch.zeros_like(ours)
        kernels.shard_rows_from_table(r.table, r.rows, local, indptr, ours, layout, rank)
        create_triton_kv_indices_for_dcp_triton[(len(r.lens),)](
            r.table, r.rows, local, indptr, None, stock, r.table.stride(0), dcp_size, rank
        )
        assert torch.equal(ours, stock)


@rotated_layouts
def test_rows_of_a_decode_step_under_rotation(layout: RotatedLayout) -> None:
    """By the hook that a decode step calls. The control: lengths and rows without rotation."""
    v = layout.page_slots
    lens = sorted({*kit.lengths_around(layout, 5000 if ON_GPU else 60), v - 1, v, v + 1, 2 * v + layout.block_size})
    table, rows_in_pool = kit.random_table(layout, lens, layout.page_rows, seed=3)
    order = torch.from_numpy(np.random.default_rng(7).permutation(len(lens))).to(DEVICE)
    shuffled = torch.zeros_like(table)
    shuffled[order] = table
    dealt = deal_pages(rows_in_pool // layout.page_rows, layout.dcp_size, layout.block_size, layout.page_rows)
    seq_lens, unrotated_differs = torch.tensor(lens, device=DEVICE), False
    for rank in range(layout.dcp_size):
        mine = [[s for s in table[i, :n].tolist() if dealt.owner[s] == rank] for i, n in enumerate(lens)]
        backend = kit.TritonRank(layout, rank, empty_pool(rows_in_pool, kit.WORK), shuffled, 16, max(lens))
        local = backend.index(order, seq_lens)
        assert local.tolist() == [len(slots) for slots in mine]
        total = sum(map(len, mine))
        assert backend.kv_indptr[-1] == total
        assert backend.kv_indices[:total].tolist() == [int(dealt.row[s]) for slots in mine for s in slots]
        unrotated_differs |= local.tolist() != layout.plain.local_len(seq_lens, rank).tolist()
    assert unrotated_differs, "the check can't tell the rule from the one without rotation"


# -- gather ------------------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("dtype", [kit.WORK, kit.FP8] if ON_GPU else [kit.WORK], ids=str)
def test_gather_restores_the_order_of_positions(layout: DcpLayout, dtype: torch.dtype) -> None:
    lens = [n for n in kit.lengths_around(layout, 9000 if ON_GPU else 40) if n > 0]
    starts = [(7 * i) % (2 * layout.cycle) for i in range(len(lens))]
    whole = [kit.random_kv(s + n, i).to(dtype) for i, (s, n) in enumerate(zip(starts, lens, strict=True))]
    dealt = deal(max(map(len, whole)), layout.dcp_size, layout.block_size)
    owners = torch.from_numpy(dealt.owner).to(DEVICE)

    def rows_of(rank: int) -> torch.Tensor:
        parts = [kit.as_bytes_if_fp8(w)[s:][owners[s : len(w)] == rank] for w, s in zip(whole, starts, strict=True)]
        return torch.cat(parts)[:, None].view(dtype)

    sent: list[torch.Tensor] = []

    def gather(rank: int, all_gather) -> torch.Tensor:
        rows = rows_of(rank)
        return gather_prefix(rows[..., :LORA], rows[..., LORA:], starts, lens, layout, rank, all_gather)

    for rank in range(layout.dcp_size):
        gather(rank, lambda output, mine: sent.append(mine.clone()))
    want = torch.cat([w[s:] for w, s in zip(whole, starts, strict=True)])[:, None]
    for rank in range(layout.dcp_size):
        got = gather(rank, lambda output, mine: output.copy_(torch.cat(sent)))
        assert torch.equal(bits(got), bits(want))
    sent.reverse()
    swapped = gather(0, lambda output, mine: output.copy_(torch.cat(sent)))
    assert not torch.equal(bits(swapped), bits(want)), "the check can't tell the ranks' parts apart"


@rotated_layouts
def test_gather_under_rotation_restores_the_order_of_positions(layout: RotatedLayout) -> None:
    lens = kit.lengths_around(layout, 9000 if ON_GPU else 60)
    batch = kit.make_batch(layout, lens, page_size=layout.page_rows)
    want = torch.cat(batch.kv)[:, None]
    assert torch.equal(bits(kit.gathered_prefix(batch)), bits(want))
    unrotated = kit.gathered_prefix(replace(batch, layout=layout.plain))
    assert not torch.equal(bits(unrotated), bits(want)), "the check can't tell the rule from the one without rotation"


# -- guard -------------------------------------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("dtype", [kit.WORK, torch.float32], ids=str)
def test_guard_clears_empty_shards_and_nothing_else(layout: DcpLayout, dtype: torch.dtype) -> None:
    lens = kit.lengths_around(layout, 5 * layout.cycle)
    dealt = deal(max(lens), layout.dcp_size, layout.block_size)
    seq_lens = torch.tensor(lens, device=DEVICE)
    heads = 16 if ON_GPU else 3
    seen = set()
    for rank in range(layout.dcp_size):
        empty = np.array([(dealt.owner[:n] != rank).all() for n in lens])
        seen |= set(empty.tolist())
        out = torch.randn(len(lens), heads, LORA, device=DEVICE).to(dtype)
        lse = torch.randn(len(lens), heads, device=DEVICE)
        out[torch.from_numpy(empty).to(DEVICE)] = float("nan")
        lse[torch.from_numpy(empty).to(DEVICE)] = 5.0  # stale, from an earlier step
        want_out, want_lse = out.clone(), lse.clone()
        want_out[torch.from_numpy(empty).to(DEVICE)] = 0
        want_lse[torch.from_numpy(empty).to(DEVICE)] = -float("inf")
        guard_empty_shards(out, lse, seq_lens, layout, rank)
        assert torch.equal(bits(out), bits(want_out)) and torch.equal(lse, want_lse)
    assert seen == {True, False}


# -- merge -------------------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """Every rank's partial results (P, n, H, 512) and natural-log LSE (P, n, H) as they go to the merge."""

    out: torch.Tensor
    lse: torch.Tensor

    def merged(self, how: str) -> torch.Tensor:
        """(n, H, 512) by SGLang's merge with our kernels around and in it; only the collectives are the kit's."""
        from sglang.srt.layers.dcp import comm

        ranks, combine = self.out.shape[0], comm.dcp_lse_combine_triton
        exchange = kit.Exchange(ranks)

        def work(rank: int) -> torch.Tensor:
            part, lse = self.out[rank], self.lse[rank]
            if how == "a2a":
                return comm.dcp_a2a_lse_reduce(part, lse, exchange, is_lse_base_on_e=True)
            scatter = comm.cp_lse_ag_out_rs_mla
            out = partials.gather_lse_reduce_scatter(scatter, part, lse, exchange, is_lse_base_on_e=True)
            return out.transpose(0, 1)

        with (
            mock.patch.object(comm, "use_symmetric_memory", lambda _group: nullcontext()),
            mock.patch.object(comm, "dcp_lse_combine_triton", lambda *a, **k: partials.lse_combine(combine, *a, **k)),
            mock.patch.object(partials, "_model_dtype", kit.WORK),
        ):
            return torch.cat(exchange.run(work), dim=1)

    def expected(self, scale: float = 1.0) -> torch.Tensor:
        weight = torch.softmax(self.lse.double() * scale, dim=0).nan_to_num(0)  # no rank has a row: 0 / 0
        return (weight[..., None] * self.out.double()).sum(0)


@pytest.mark.parametrize("ranks", [2, 4, 8] if ON_GPU else [2])
@pytest.mark.parametrize("how", ["a2a", "ag_rs"])
def test_merge_of_unrounded_partial_results(how: str, ranks: int, report) -> None:
    """Float16 for a2a, float32 for ag_rs, merged to the model's dtype: within one rounding of float64, everywhere.

    One rank is empty in a third of the requests, all but one in another third; two rows of padding nobody holds.
    """
    n, heads = 17, 2 * ranks
    gen = torch.Generator(DEVICE).manual_seed(ranks)
    out = torch.randn(ranks, n, heads, LORA, generator=gen, device=DEVICE)
    lse = torch.randn(ranks, n, heads, generator=gen, device=DEVICE) * 4
    nothing = torch.zeros(ranks, n, dtype=torch.bool, device=DEVICE)
    nothing[ranks - 1, ::3] = True
    nothing[1:, 1::3] = True
    nothing[:, -2:] = True
    out[nothing], lse[nothing] = 0, -math.inf
    parts = Parts(out.to(torch.float16 if how == "a2a" else torch.float32), lse)
    got, want = parts.merged(how), parts.expected()
    assert got.dtype == kit.WORK and got.shape == want.shape
    close = dict(rtol=2**-8, atol=2e-5) if torch.bfloat16 == kit.WORK else dict(rtol=1e-5, atol=2e-5)
    report(how=how, ranks=ranks, worst=kit.difference(got[:-2], want[:-2]).worst)
    torch.testing.assert_close(got.double(), want, **close)
    assert (got[-2:] == 0).all()
    for wrong in (parts.expected(kit.LN2), Parts(parts.out, lse.flip(0)).merged(how).double()):
        assert not torch.allclose(wrong[:-2], want[:-2], rtol=0.1, atol=1e-2), "the check can't tell weights apart"


# -- no device-to-host sync --------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """One decode step's write and index building on one rank, as callables on ready tensors."""

    write: object
    rows_into_buffer: object
    rows_eager: object
    slots: object
    guard: object


def step(layout: DcpLayout, rank: int) -> Step:
    batch = kit.make_batch(layout, [layout.block_size, 777, 3 * layout.cycle + 1, 5000], page_size=64)
    backend = kit.triton_rank(batch, rank, 16)
    n = len(batch.lens)
    loc = torch.arange(layout.cycle, layout.cycle + n, device=DEVICE)
    kv = kit.random_kv(n, 1).to(kit.WORK)[:, None]
    out, lse = torch.zeros(n, 16, LORA, device=DEVICE), torch.zeros(n, 16, device=DEVICE)
    indptr, _, local = kit.shard_rows(batch, rank)
    stream = torch.cat([batch.table[i, :k] for i, k in enumerate(batch.lens)])
    stream_indptr = torch.zeros(n + 1, dtype=torch.int32, device=DEVICE)
    torch.cumsum(batch.seq_lens, dim=0, out=stream_indptr[1:])
    slots = torch.empty(len(stream), dtype=torch.int32, device=DEVICE)

    def rows_eager() -> None:
        with kit.as_rank(layout, rank):
            kit.triton_mla.shard_kv_indices(backend, batch.req_rows, batch.seq_lens, backend.kv_indptr)

    return Step(
        lambda: write_mla_kv(batch.pools[rank], loc, kv[..., :LORA], kv[..., LORA:], layout, rank),
        lambda: backend.index(batch.req_rows, batch.seq_lens),
        rows_eager,
        lambda: kernels.shard_slots_from_stream(stream, stream_indptr, local, indptr, slots, layout, rank),
        lambda: guard_empty_shards(out, lse, batch.seq_lens, layout, rank),
    )


@pytest.mark.cuda_only
@pytest.mark.parametrize("layout", LONG, ids=name)
def test_write_index_and_guard_never_wait_for_the_device(layout: DcpLayout) -> None:
    runs = step(layout, layout.dcp_size - 1)
    for run in runs:  # compile
        run()
    with kit.syncs_are_errors():
        for run in runs:
            run()
        mask = torch.ones(4, dtype=torch.bool, device=DEVICE)
        with pytest.raises(RuntimeError):  # the control: what a boolean index does
            torch.arange(4, device=DEVICE)[mask]


@pytest.mark.cuda_only
@pytest.mark.parametrize("dtype", [kit.WORK, kit.FP8], ids=str)
@pytest.mark.parametrize("layout", [LONG[0], *ROTATED[-2:]], ids=name)
def test_a_decode_step_and_the_start_of_an_extend_never_wait_for_the_device(
    layout: DcpLayout, dtype: torch.dtype
) -> None:
    """Write through SGLang's pool, index, plan, attention of a decode; rows and order of an extend's gather."""
    rank, lens = layout.dcp_size - 1, [layout.block_size, 777, 3 * layout.cycle + 1, 5000]
    batch = kit.make_batch(layout, lens, page_size=kit.page_size_of(layout), dtype=dtype)
    backend = kit.triton_rank(batch, rank, 16)
    pool = kit.sglang_pool(batch.pools[rank].shape[0], dtype)
    loc = torch.stack([batch.table[i, n - 1] for i, n in enumerate(lens)]).long()
    kv, q = kit.random_kv(len(lens), 1).to(kit.WORK), kit.random_q(len(lens), 16, 2)
    parts = q[..., :LORA].contiguous(), q[..., LORA:]

    def decode() -> None:
        kit.write_through_pool(pool, loc, kv, layout, rank)
        backend.split(backend.index(batch.req_rows, batch.seq_lens))
        backend.attend(parts, batch.seq_lens)

    def extend() -> None:
        with kit.as_rank(layout, rank), mock.patch.object(kit.dcp_hooks, "get_attn_backend", lambda: backend):
            kit.prefix_rows(batch)

    for run in (decode, extend):
        run()  # compile
        with kit.syncs_are_errors():
            run()
    assert hasattr(backend, "dcp_block_gather_order") == layout.is_rotated
    with kit.syncs_are_errors(), pytest.raises(RuntimeError):  # the control
        batch.seq_lens.tolist()


@pytest.mark.cuda_only
@pytest.mark.parametrize("layout", LONG[:1], ids=name)
def test_profile_shows_no_copy_to_the_host_and_no_nonzero(layout: DcpLayout, report) -> None:
    from torch.profiler import ProfilerActivity, profile

    runs = step(layout, 0)
    for run in runs:
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for run in runs:
            run()
    names = {event.key for event in profiled.key_averages()}
    waits = {n for n in names if "Synchronize" in n and "Device" not in n}  # the profiler's own end is a device sync
    host_copies = {n for n in names if "DtoH" in n or "Device -> Pageable" in n}
    masks = names & {"aten::nonzero", "aten::masked_select", "aten::index", "aten::item", "aten::_local_scalar_dense"}
    report(kernels=sorted(n for n in names if n.startswith("_")), waits=sorted(waits), host_copies=sorted(host_copies))
    assert any("_write_mla_kv_kernel" in n for n in names) and any("_rows_from_table" in n for n in names)
    assert not (waits or host_copies or masks)
