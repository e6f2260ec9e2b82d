"""Device twins and index kernels against DcpLayout and against the simulation."""

import itertools
import mmap
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from brute_force import BLOCKS, SIZES, between, deal
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.dcp.kernels import shard_rows_from_table, shard_slots_from_stream
from sglang_dcp_block.dcp.layout import DcpLayout

CANARY = -77
MAP_NORESERVE = 0x4000  # Linux; the mmap module names it from Python 3.13 on


@triton.jit
def every_twin_kernel(x_ptr, out_ptr, n, rank, P: tl.constexpr, B: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + offsets, kernels.owner(x, P, B), mask=mask)
    tl.store(out_ptr + n + offsets, kernels.local_index(x, P, B), mask=mask)
    tl.store(out_ptr + 2 * n + offsets, kernels.perm(x, P, B), mask=mask)
    tl.store(out_ptr + 3 * n + offsets, kernels.position(x, rank, P, B), mask=mask)
    tl.store(out_ptr + 4 * n + offsets, kernels.local_len(x, rank, P, B), mask=mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "block"), [(p, b) for p in SIZES for b in BLOCKS])
def test_device_twins(ranks, block, dtype, device):
    layout, rank = DcpLayout(ranks, block), ranks - 1
    dealt = deal(2 * layout.cycle + block + 2, ranks, block)
    n = len(dealt.owner)
    x = torch.arange(n, dtype=dtype, device=device)
    out = torch.empty((5, n), dtype=dtype, device=device)
    every_twin_kernel[(1,)](x, out, n, rank, P=ranks, B=block, TILE=triton.next_power_of_2(n))
    owner, row, perm, position, local_len = out.cpu()
    assert owner.tolist() == dealt.owner.tolist()
    assert row.tolist() == dealt.row.tolist()
    held = dealt.held[rank]
    assert position[: len(held)].tolist() == held.tolist()
    assert local_len.tolist() == np.searchsorted(held, np.arange(n)).tolist()
    t = x.cpu()
    assert torch.equal(perm, layout.perm(t)) and torch.equal(position, layout.position(t, rank))


def test_device_twins_far_out(device):
    """Slot ids of a pool of 2**40 slots keep their 64 bits."""
    layout = DcpLayout(8, 64)
    x = torch.tensor([2**40, 2**40 + 65, 2**33 - 1], device=device)
    out = torch.empty((5, 3), dtype=torch.int64, device=device)
    every_twin_kernel[(1,)](x, out, 3, 5, P=8, B=64, TILE=4)
    t = x.cpu()
    expected = [layout.owner(t), layout.local_index(t), layout.perm(t), layout.position(t, 5), layout.local_len(t, 5)]
    assert torch.equal(out.cpu(), torch.stack(expected))


# -- index kernels -------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Requests on scattered virtual pages. table: (R, T) widened slots. req, starts, lens: one entry per request."""

    layout: DcpLayout
    table: np.ndarray
    req: list[int]
    starts: list[int]
    lens: list[int]

    def expected(self, rank: int) -> list[list[tuple[int, int]]]:
        """For each request the (slot, physical row) of this rank's tokens, by simulation alone."""
        ranks, block = self.layout.dcp_size, self.layout.block_size
        by_position = deal(max([s + n for s, n in zip(self.starts, self.lens, strict=True)], default=0), ranks, block)
        by_slot = deal(int(self.table.max()) + 1, ranks, block)
        result = []
        for q, start, length in zip(self.req, self.starts, self.lens, strict=True):
            slots = [int(self.table[q, t]) for t in between(by_position, rank, start, length)]
            assert all(by_slot.owner[v] == rank for v in slots)
            result.append([(v, int(by_slot.row[v])) for v in slots])
        return result


def make_batch(cell, page_size, requests, seed) -> Batch:
    layout = DcpLayout(*cell)
    size = layout.virtual_page_size(page_size)
    longest = max([s + n for s, n in requests], default=0)
    pages = max(1, -(-longest // size))
    rows = len(requests) + 1
    order = np.random.default_rng(seed).permutation(rows * pages).reshape(rows, pages)
    table = (order[:, :, None] * size + np.arange(size)).reshape(rows, -1)
    req = [len(requests) - k for k in range(len(requests))]
    return Batch(layout, table, req, [s for s, _ in requests], [n for _, n in requests])


def run_table(batch, rank, device, no_sync, *, dtype=torch.int32, with_starts=True, width_beyond=5):
    """Rows of each request as lists; checks that nothing outside them was written."""
    wide = torch.full((batch.table.shape[0], batch.table.shape[1] + width_beyond), 10**6, dtype=torch.int32)
    wide[:, : batch.table.shape[1]] = torch.from_numpy(batch.table)
    table = wide.to(device)[:, : batch.table.shape[1]]
    return run(
        batch,
        rank,
        device,
        dtype,
        with_starts,
        lambda lens, indptr, out, starts: shard_rows_from_table(
            table, torch.tensor(batch.req, device=device), lens, indptr, out, batch.layout, rank, starts
        ),
        no_sync,
    )


def run_stream(batch, rank, device, no_sync, *, dtype=torch.int32, with_starts=True):
    parts = [batch.table[q, s : s + n] for q, s, n in zip(batch.req, batch.starts, batch.lens, strict=True)]
    stream = torch.from_numpy(np.concatenate([*parts, np.empty(0, np.int64)]).astype(np.int32)).to(device)
    stream_indptr = torch.tensor(np.cumsum([0, *batch.lens]), dtype=torch.int32, device=device)
    return run(
        batch,
        rank,
        device,
        dtype,
        with_starts,
        lambda lens, indptr, out, starts: shard_slots_from_stream(
            stream, stream_indptr, lens, indptr, out, batch.layout, rank, starts
        ),
        no_sync,
    )


def run(batch, rank, device, dtype, with_starts, launch, no_sync):
    starts = torch.tensor(batch.starts, dtype=dtype, device=device)
    local_lens = batch.layout.interval_len(starts, torch.tensor(batch.lens, dtype=dtype, device=device), rank)
    indptr = torch.zeros(len(batch.lens) + 1, dtype=torch.int32, device=device)
    indptr[1:] = local_lens.cumsum(0)
    indptr += 2  # the first run doesn't begin at 0
    total = int(indptr[-1])
    out = torch.full((total + 3,), CANARY, dtype=dtype, device=device)
    with no_sync():
        launch(local_lens, indptr, out, starts if with_starts else None)
    assert out[:2].tolist() == [CANARY] * 2 and out[total:].tolist() == [CANARY] * 3
    bounds = indptr.tolist()
    return [out[a:b].tolist() for a, b in itertools.pairwise(bounds)]


cells = st.sampled_from([(1, 1), (2, 1), (3, 2), (2, 16), (4, 3), (8, 64), (4, 128), (8, 16)])
spans = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 900)), max_size=3)


@given(cells, st.sampled_from([1, 16, 64]), spans, st.sampled_from([torch.int32, torch.int64]), st.data())
def test_index_kernels_pick_what_the_simulation_dealt(device, no_sync, cell, page_size, requests, dtype, data):
    """Starts lie anywhere: mid-block, mid-cycle, in the middle of a virtual page."""
    batch = make_batch(cell, page_size, requests, seed=len(requests))
    rank = data.draw(st.integers(0, cell[0] - 1))
    expected = batch.expected(rank)
    assert run_table(batch, rank, device, no_sync, dtype=dtype) == [[row for _, row in r] for r in expected]
    assert run_stream(batch, rank, device, no_sync, dtype=dtype) == [[slot for slot, _ in r] for r in expected]


@pytest.mark.parametrize("cell", [(2, 1), (4, 16), (8, 64)])
def test_without_starts_requests_begin_at_zero(device, no_sync, cell):
    cycle = cell[0] * cell[1]
    batch = make_batch(cell, 64, [(0, n) for n in (0, 1, cycle - 1, cycle, cycle + 1)], seed=1)
    for rank in range(cell[0]):
        expected = batch.expected(rank)
        rows = run_table(batch, rank, device, no_sync, with_starts=False)
        slots = run_stream(batch, rank, device, no_sync, with_starts=False)
        assert rows == [[row for _, row in r] for r in expected]
        assert slots == [[slot for slot, _ in r] for r in expected]


def test_many_tiles_and_programs(device, no_sync):
    """More rows than one tile, so several programs per request share the work; at P = 1 each of them loops too."""
    for cell, lens in (((1, 1), [(0, 40_000), (7, 3_000)]), ((2, 64), [(0, 9_000), (4_160, 4_100)])):
        batch = make_batch(cell, 64, lens, seed=2)
        rank = cell[0] - 1
        expected = batch.expected(rank)
        assert run_table(batch, rank, device, no_sync) == [[row for _, row in r] for r in expected]
        assert run_stream(batch, rank, device, no_sync) == [[slot for slot, _ in r] for r in expected]


@pytest.mark.parametrize("rows", [run_table, run_stream])
@pytest.mark.parametrize("wrong", ["rank", "start", "block", "size"])
def test_a_wrong_rule_is_noticed(device, no_sync, rows, wrong):
    batch = make_batch((4, 16), 64, [(0, 333), (80, 200)], seed=3)
    expected = batch.expected(1)
    field = 1 if rows is run_table else 0
    layout = {"block": DcpLayout(4, 32), "size": DcpLayout(2, 16)}.get(wrong, batch.layout)
    starts = [0, 64] if wrong == "start" else batch.starts
    got = rows(batch._replace(layout=layout, starts=starts), 2 if wrong == "rank" else 1, device, no_sync)
    assert got != [[pair[field] for pair in r] for r in expected]


def test_no_request_is_no_work(device):
    empty = torch.empty(0, dtype=torch.int32, device=device)
    out = torch.full((2,), CANARY, device=device)
    table = torch.zeros((2, 8), dtype=torch.int32, device=device)
    shard_rows_from_table(table, empty, empty, empty, out, DcpLayout(2, 4), 0)
    shard_slots_from_stream(empty, empty, empty, empty, out, DcpLayout(2, 4), 0)
    assert out.tolist() == [CANARY] * 2


def test_a_table_of_more_than_2_to_the_31_elements(device):
    """Row 2 of a table with rows of 2**30 elements: its offset doesn't fit 32 bits."""
    stride, slots = 1 << 30, torch.arange(40, dtype=torch.int32)
    if device == "cpu":
        # The interpreter copies whole tensors, so the kernel gets the head of a sparse mapping and reads beyond it.
        memory = mmap.mmap(-1, 4 * (2 * stride + 64), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        memory[8 * stride : 8 * stride + 160] = slots.numpy().tobytes()
        table = torch.frombuffer(memory, dtype=torch.int32, count=64)
    else:
        table = torch.zeros(2 * stride + 64, dtype=torch.int32, device=device)
        table[2 * stride : 2 * stride + 40] = slots.to(device)
    one = torch.tensor([2], dtype=torch.int32, device=device)
    layout = DcpLayout(2, 4)
    out = torch.full((20,), CANARY, device=device)
    kernels._rows_from_table_kernel[(1, 1)](
        table, stride, one, one * 10, one * 0, None, out, RANK=1, P=2, B=4, SPLITS=1, TILE=1024
    )
    assert out.tolist() == layout.local_index(layout.position(torch.arange(20), 1)).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": torch.zeros(8, dtype=torch.int32)}, "req_to_token must be a matrix"),
        ({"table": torch.zeros((8, 2), dtype=torch.int32).T}, "last stride 1"),
        ({"lens": torch.zeros(1, dtype=torch.int32)}, "local_lens must have at least 2 elements, got 1"),
        ({"indptr": torch.zeros(8, dtype=torch.int32)[::2]}, "indptr must be a contiguous vector"),
        ({"starts": torch.zeros((2, 1), dtype=torch.int32)}, "starts must be a contiguous vector"),
        ({"rank": 2}, "rank must be below dcp_size=2, got 2"),
    ],
)
def test_refusals(device, change, message):
    two = torch.zeros(2, dtype=torch.int32)
    args = {"table": torch.zeros((2, 8), dtype=torch.int32), "lens": two, "indptr": two, "starts": two, "rank": 0}
    args = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in {**args, **change}.items()}
    with pytest.raises(ValueError, match=message):
        shard_rows_from_table(
            args["table"],
            two.to(device),
            args["lens"],
            args["indptr"],
            torch.zeros(8, device=device, dtype=torch.int32),
            DcpLayout(2, 4),
            args["rank"],
            args["starts"],
        )
