"""Prefix gather over threads that really exchange buffers, against the simulation and against SGLang at B = 1."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from brute_force import between, deal
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp import gather
from sglang_dcp_block.dcp.gather import gather_order, gather_prefix
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.host_rows import rows_of_run

DA, DP = 6, 3


class Group:
    """An all-gather over threads. Counts the collectives of each rank."""

    def __init__(self, size):
        self.size, self.parts, self.calls = size, [None] * size, [0] * size
        self.barrier = threading.Barrier(size)

    def all_gather_into_tensor(self, rank):
        def call(output, input_):
            self.calls[rank] += 1
            self.parts[rank] = input_
            self.barrier.wait(30)
            assert input_.is_contiguous() and output.shape[0] == self.size * input_.shape[0]
            torch.cat(self.parts, out=output)
            self.barrier.wait(30)

        return call

    def run(self, f):
        """f(rank) on every rank at once; the results, or the first exception."""
        results, errors = [None] * self.size, []

        def work(rank):
            try:
                results[rank] = f(rank)
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def prefixes(starts, lens, dtype, device):
    """One random row per token, request after request, and the same split by request."""
    dense = torch.randn(sum(lens), 1, DA + DP, generator=torch.Generator().manual_seed(sum(lens))).to(device).to(dtype)
    return dense, list(dense.split(list(lens)))


def rows_of(rank, requests, starts, lens, cell):
    """This rank's rows of all requests, chosen by the simulation."""
    dealt = deal(max([s + n for s, n in zip(starts, lens, strict=True)], default=0), *cell)
    parts = [
        rows.view(torch.uint8 if rows.element_size() == 1 else rows.dtype)[
            [t - start for t in between(dealt, rank, start, length)]
        ].view(rows.dtype)
        for rows, start, length in zip(requests, starts, lens, strict=True)
    ]
    return torch.cat(parts) if parts else torch.empty(0, 1, DA + DP)


def gather_all(cell, starts, lens, mine, group=None, starts_seen=None):
    layout, group = DcpLayout(*cell), group or Group(cell[0])
    return group.run(
        lambda r: gather_prefix(
            mine[r][..., :DA],
            mine[r][..., DA:],
            torch.tensor(starts if starts_seen is None else starts_seen, dtype=torch.int64),
            torch.tensor(lens, dtype=torch.int64),
            layout,
            r,
            group.all_gather_into_tensor(r),
        )
    )


def same(a, b):
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


cells = st.sampled_from([(1, 1), (2, 1), (3, 2), (2, 16), (4, 3), (8, 64), (8, 16), (4, 128)])
spans = st.lists(st.tuples(st.integers(0, 600), st.integers(0, 600)), min_size=1, max_size=4)


@given(cells, spans, st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]))
def test_every_rank_gets_the_dense_prefix(device, cell, requests, dtype):
    starts, lens = zip(*requests, strict=True)
    dense, split = prefixes(starts, lens, dtype, device)
    mine = [rows_of(r, split, starts, lens, cell) for r in range(cell[0])]
    group = Group(cell[0])
    for got in gather_all(cell, starts, lens, mine, group):
        assert same(got, dense)
    assert set(group.calls) == {1 if sum(lens) else 0}


@given(cells, spans)
def test_gather_order_is_where_the_simulation_put_the_tokens(cell, requests):
    starts, lens = zip(*requests, strict=True)
    dealt = deal(1200, *cell)
    slots = {}
    counts = [0] * cell[0]
    for i, (start, length) in enumerate(requests):
        for rank in range(cell[0]):
            for t in between(dealt, rank, start, length):
                slots[i, t] = (rank, counts[rank])
                counts[rank] += 1
    got = gather_order(starts, lens, DcpLayout(*cell))
    assert got.max_rows == max(counts) and got.order.dtype == np.int64
    wanted = [slots[i, t] for i, (s, n) in enumerate(requests) for t in range(s, s + n)]
    assert got.order.tolist() == [rank * max(counts) + k for rank, k in wanted]


def test_short_prefixes_leave_ranks_empty_and_no_prefix_needs_no_collective(device):
    dense, split = prefixes((0,), (5,), torch.float32, device)
    mine = [rows_of(r, split, (0,), (5,), (4, 64)) for r in range(4)]
    assert [len(m) for m in mine] == [5, 0, 0, 0]
    assert all(same(got, dense) for got in gather_all((4, 64), (0,), (5,), mine))

    nothing = [torch.empty(0, 1, DA + DP, dtype=torch.bfloat16, device=device)] * 4
    for starts, lens in (((), ()), ((64, 0), (0, 0))):
        group = Group(4)
        got = gather_all((4, 64), starts, lens, nothing, group)
        assert all(g.shape == (0, 1, DA + DP) and g.dtype == torch.bfloat16 for g in got) and group.calls == [0] * 4


@pytest.mark.parametrize("wrong", ["ranks swapped", "rows moved by one", "blocks swapped", "starts"])
def test_a_wrong_order_is_noticed(device, wrong):
    cell, starts, lens = (2, 16), (0, 32), (64, 64)
    dense, split = prefixes(starts, lens, torch.float32, device)
    mine = [rows_of(r, split, starts, lens, cell) for r in range(2)]
    if wrong == "ranks swapped":
        mine.reverse()
    elif wrong == "rows moved by one":
        mine = [m.roll(1, 0) for m in mine]
    elif wrong == "blocks swapped":
        mine = [torch.cat([m[16:32], m[:16], m[32:]]) for m in mine]
    got = gather_all(cell, starts, lens, mine, starts_seen=(16, 48) if wrong == "starts" else None)
    assert not any(same(g, dense) for g in got)


def test_a_wrong_count_of_rows_names_both_numbers(device):
    _, split = prefixes((0,), (40,), torch.float32, device)
    mine = [rows_of(r, split, (0,), (40,), (2, 16)) for r in range(2)]
    assert [len(m) for m in mine] == [24, 16]
    with pytest.raises(ValueError, match=r"kv_a must hold the 24 rows .* gives rank 0, got 23"):
        gather_all((2, 16), (0,), (40,), [mine[0][:-1], mine[1]])
    with pytest.raises(ValueError, match="k_pe must hold the 24 rows"):
        gather_prefix(mine[0][..., :DA], mine[1][..., DA:], (0,), (40,), DcpLayout(2, 16), 0, lambda o, i: None)


def test_other_refusals(device):
    rows = torch.zeros(1, 1, DA, device=device)
    call = lambda starts, lens, pe=rows: gather_prefix(rows, pe, starts, lens, DcpLayout(2, 4), 0, lambda o, i: None)  # noqa: E731
    with pytest.raises(ValueError, match=r"same dtype, got .*float32 and .*bfloat16"):
        call((0,), (1,), rows.bfloat16())
    with pytest.raises(ValueError, match="one element per request, got 2 and 1"):
        call((0, 0), (1,))
    with pytest.raises(ValueError, match="at least 0"):
        call((-1,), (1,))
    with pytest.raises(ValueError, match="must lie on the CPU"):
        call(torch.zeros(1, device="meta"), (1,))


def test_layers_of_a_batch_share_one_index_tensor(device):
    """A batch of 8 chunks over 61 layers: the index is made once per chunk."""
    gather._device_index.cache_clear()
    mine = torch.zeros(4, 1, DA + DP, device=device)
    for _layer in range(61):
        for chunk in range(8):
            gather_prefix(mine[..., :DA], mine[..., DA:], [8 * chunk], [8], DcpLayout(2, 4), 0, lambda o, i: o.zero_())
    assert gather._device_index.cache_info().misses == 8


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sglang_gives_the_same_prefix_at_block_size_one(device, monkeypatch, ranks):
    """SGLang's gather for token round-robin, run on the same rows over the same group."""
    from sglang.srt.layers.dcp import comm

    starts, lens = (0, 7, 32), (65, 21, 1)
    dense, split = prefixes(starts, lens, torch.bfloat16, device)
    mine = [rows_of(r, split, starts, lens, (ranks, 1)) for r in range(ranks)]
    group, here = Group(ranks), threading.local()

    def parallel():
        dcp_group = SimpleNamespace(all_gather_into_tensor=group.all_gather_into_tensor(here.rank))
        return SimpleNamespace(dcp_enabled=True, dcp_size=ranks, dcp_rank=here.rank, dcp_group=dcp_group)

    monkeypatch.setattr(comm, "get_parallel", parallel)

    def stock(rank):
        here.rank = rank
        return comm.all_gather_kv_cache_for_dcp(
            mine[rank][..., :DA], mine[rank][..., DA:], torch.tensor(lens), torch.tensor(starts)
        )

    for theirs, ours in zip(group.run(stock), gather_all((ranks, 1), starts, lens, mine), strict=True):
        assert same(theirs, dense) and same(ours, theirs)


# -- rows of a run, for host copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cell", "page_size"), [((2, 1), 1), ((3, 2), 16), ((8, 64), 64), ((2, 128), 64)])
def test_rows_of_run(cell, page_size, no_sync, device):
    """Scattered virtual pages with a partial last one, against the simulation over slots."""
    layout = DcpLayout(*cell)
    size = layout.virtual_page_size(page_size)
    slots = np.repeat([5, 1, 4], size) * size + np.tile(np.arange(size), 3)
    dealt = deal(6 * size, *cell)
    for n in {0, 1, size - 1, size, 2 * size + 1, 2 * size + layout.block_size, 3 * size}:
        for dtype in (torch.int32, torch.int64):
            run = torch.tensor(slots[:n], dtype=dtype, device=device)
            for rank in range(cell[0]):
                with no_sync():
                    got = rows_of_run(run, layout, rank)
                wanted = [int(dealt.row[v]) for v in slots[:n] if dealt.owner[v] == rank]
                assert got.tolist() == wanted and got.dtype == dtype
                if n == 3 * size and layout.block_size > 1:
                    assert rows_of_run(run.roll(1), layout, rank).tolist() != wanted  # control: not aligned


def test_rows_of_run_reads_no_value():
    run = torch.empty(1000, dtype=torch.int64, device="meta")
    assert rows_of_run(run, DcpLayout(8, 64), 7).shape == (DcpLayout(8, 64).local_len(1000, 7),)
