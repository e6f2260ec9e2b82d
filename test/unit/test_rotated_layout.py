"""RotatedLayout and its device twins against pages that are dealt out like cards, each from its own rank on."""

from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from brute_force import deal_pages, edge_lengths, first_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dcp_block import dcp_hooks, runtime
from sglang_dcp_block.attention import triton_mla
from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp import kernels
from sglang_dcp_block.dcp.gather import gather_rows
from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout
from sglang_dcp_block.mem_cache.kv_write import write_mla_kv

#: (P, B, page size); B * k is a page's rows.
CELLS = [(p, b, page) for p, b in product((2, 3, 4, 8), (2, 3, 16)) for page in (1, b, 2 * b)]
FEW = [(2, 16, 16), (3, 2, 4), (4, 3, 1), (8, 16, 32)]


def rotated(ranks: int, block: int, page_size: int) -> RotatedLayout:
    return DcpLayout(ranks, block).rotated(page_size)


class Request:
    """``length`` tokens on scattered pages. slots: by position. held(rank): its positions there, in order."""

    def __init__(self, layout: RotatedLayout, length: int, seed: int = 0) -> None:
        pages = 4 * layout.dcp_size + 1
        self.dealt = deal_pages(pages, layout.dcp_size, layout.block_size, layout.page_rows)
        size = layout.page_rows * layout.dcp_size
        needed = -(-length // size)
        self.pages = np.random.default_rng(seed).permutation(pages)[:needed]
        self.slots = np.array([self.pages[t // size] * size + t % size for t in range(length)], np.int64)

    def held(self, rank: int) -> list[int]:
        return [t for t, slot in enumerate(self.slots) if self.dealt.owner[slot] == rank]


def lengths(layout: RotatedLayout) -> list[int]:
    size = layout.page_slots
    edges = {*edge_lengths(layout.dcp_size, layout.block_size), size - 1, size, size + 1, 2 * size + layout.block_size}
    return sorted(n for n in edges if n <= 3 * size)


def disagreements(layout: RotatedLayout) -> set[str]:
    """Names of the quantities in which ``layout`` differs from the deal."""
    pages = 3 * layout.dcp_size + 1
    dealt, wrong = deal_pages(pages, layout.dcp_size, layout.block_size, layout.page_rows), set()
    slots = np.arange(len(dealt.owner))
    if not np.array_equal(layout.owner(slots), dealt.owner):
        wrong.add("owner")
    if not np.array_equal(layout.local_index(slots), dealt.row):
        wrong.add("local_index")
    for seed, length in enumerate(lengths(layout)):
        one = Request(layout, length, seed)
        for rank in range(layout.dcp_size):
            held = one.held(rank)
            if length and layout.plain.local_len(length, layout.turn(rank, int(one.slots[-1]))) != len(held):
                wrong.add("turn")
            for start in {0, layout.block_size - 1, length // 2}:
                if start > length:
                    continue
                first = start // layout.page_slots * layout.page_slots
                pages_of = one.pages[first // layout.page_slots :]
                runs = layout.owned_in_pages(start, length - start, rank, pages_of, first)
                tokens = [int(p) + k for p, c in zip(runs.position, runs.length, strict=True) for k in range(c)]
                rows = [int(j) + k for j, c in zip(runs.row, runs.length, strict=True) for k in range(c)]
                if tokens != [t for t in held if t >= start] or rows != [held.index(t) for t in held if t >= start]:
                    wrong.add("owned_in_pages")
    return wrong


@pytest.mark.parametrize(("ranks", "block", "page_size"), CELLS)
def test_every_quantity_is_what_dealing_page_by_page_gives(ranks, block, page_size):
    assert disagreements(rotated(ranks, block, page_size)) == set()


@dataclass(frozen=True)
class ByPageAlone(RotatedLayout):
    def shift(self, page):
        return page % self.dcp_size


@dataclass(frozen=True)
class NotRotated(RotatedLayout):
    def shift(self, page):
        return page * 0


@dataclass(frozen=True)
class Backwards(RotatedLayout):
    def shift(self, page):
        return -super().shift(page) % self.dcp_size


@pytest.mark.parametrize("wrong", [ByPageAlone, NotRotated, Backwards])
def test_a_wrong_shift_is_noticed(wrong):
    assert disagreements(wrong(4, 3, page_rows=6)) == {"owner", "turn", "owned_in_pages"}


def test_kinds_of_integers():
    layout = rotated(4, 3, 6)
    slots = np.arange(5 * layout.page_slots)
    owners, turns = layout.owner(slots), layout.turn(1, slots)
    for given in (slots.astype(np.int32), torch.tensor(slots), torch.tensor(slots, dtype=torch.int32)):
        for found, wanted in ((layout.owner(given), owners), (layout.turn(1, given), turns)):
            assert found.dtype == given.dtype and np.array_equal(np.asarray(found), wanted)
    assert [layout.owner(int(v)) for v in slots] == owners.tolist()


def test_a_position_s_rank_is_not_told_without_its_page():
    """What is right without rotation must not be asked by mistake."""
    layout = rotated(4, 3, 6)
    table, vector = torch.zeros(2, 2), torch.zeros(2)
    asked = [
        lambda: layout.local_len(5, 1),
        lambda: layout.interval_len(1, 5, 1),
        lambda: layout.position(5, 1),
        lambda: layout.owned_intervals(0, 5, 1),
        lambda: layout.local_len_(torch.tensor([5]), 1),
        lambda: kernels.shard_rows_from_table(table, vector, vector, vector, vector, layout, 1),
        lambda: kernels.shard_slots_from_stream(vector, vector, vector, vector, vector, layout, 1),
        lambda: guard_empty_shards(table[..., None], table, vector, layout, 1),
    ]
    for ask in asked:
        with pytest.raises(TypeError, match="only with its pages"):
            ask()
    assert layout != layout.plain == DcpLayout(4, 3) and not layout.plain.is_rotated


@pytest.mark.parametrize("page_rows", [0, 5, True])
def test_pages_that_are_no_whole_blocks_are_refused(page_rows):
    with pytest.raises(ValueError, match="page_rows must be"):
        RotatedLayout(4, 3, page_rows=page_rows)
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="rank must be"):
            rotated(4, 3, 3).turn(bad, 0)


# -- on the device -----------------------------------------------------------------------------------------------------


@triton.jit
def every_twin_kernel(x_ptr, out_ptr, n, rank, P: tl.constexpr, B: tl.constexpr, V: tl.constexpr, TILE: tl.constexpr):
    offsets = tl.arange(0, TILE)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=0)
    tl.store(out_ptr + offsets, kernels.owner(x, P, B, V), mask=mask)
    tl.store(out_ptr + n + offsets, kernels.turn(rank, x, P, V), mask=mask)
    tl.store(out_ptr + 2 * n + offsets, kernels.shift(x, P), mask=mask)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "block", "page_size"), FEW)
def test_device_twins(ranks, block, page_size, dtype, device):
    layout = rotated(ranks, block, page_size)
    pages = 2 * ranks + 1
    dealt = deal_pages(pages, ranks, block, layout.page_rows)
    n = len(dealt.owner)
    x = torch.arange(n, dtype=dtype, device=device)
    out = torch.empty((3, n), dtype=dtype, device=device)
    every_twin_kernel[(1,)](x, out, n, 1, P=ranks, B=block, V=layout.page_slots, TILE=triton.next_power_of_2(n))
    owner, turn, shift = out.cpu()
    assert owner.tolist() == dealt.owner.tolist()
    assert turn.tolist() == layout.turn(1, np.arange(n)).tolist()
    assert shift[:pages].tolist() == first_ranks(pages, ranks)
    assert kernels.rotation_constants(layout) == {"V": layout.page_slots} and not kernels.rotation_constants(
        layout.plain
    )


def batch(layout: RotatedLayout, device: str, dtype=torch.int64) -> tuple[list[Request], torch.Tensor, torch.Tensor]:
    """Requests of all edge lengths, the table with canaries behind each, and its rows' numbers."""
    requests = [Request(layout, n, seed) for seed, n in enumerate(lengths(layout))]
    table = torch.full((len(requests) + 1, 3 * layout.page_slots + 2), -77, dtype=dtype)
    order = np.random.default_rng(1).permutation(len(requests) + 1)[: len(requests)]
    for request, row in zip(requests, order, strict=True):
        table[row, : len(request.slots)] = torch.from_numpy(request.slots)
    return requests, table.to(device), torch.tensor(order, device=device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("ranks", "block", "page_size"), FEW)
def test_local_lengths_and_rows_of_a_batch(ranks, block, page_size, dtype, device, no_sync):
    """Which rows a decode reads: with the plain layout's rank 0 every rank's rows have one number."""
    layout = rotated(ranks, block, page_size)
    requests, table, req = batch(layout, device, dtype)
    lens = torch.tensor([len(r.slots) for r in requests], dtype=dtype, device=device)
    uneven = set()
    for rank in range(ranks):
        with no_sync():
            local_lens = kernels.rotated_local_lens(table, req, lens, layout, rank)
            indptr = torch.zeros(len(requests) + 1, dtype=torch.int64, device=device)
            torch.cumsum(local_lens, dim=0, out=indptr[1:])
            rows = torch.full((int(lens.numel()) * 3 * layout.page_rows,), -1, device=device)
            kernels.shard_rows_from_table(table, req, local_lens, indptr, rows, layout.plain, 0)
        assert local_lens.dtype == dtype
        assert local_lens.tolist() == [len(r.held(rank)) for r in requests]
        for request, begin, end in zip(requests, indptr[:-1].tolist(), indptr[1:].tolist(), strict=True):
            assert rows[begin:end].tolist() == [int(request.dealt.row[request.slots[t]]) for t in request.held(rank)]
        uneven.add(tuple(local_lens.tolist()))
    assert len(uneven) > 1, "control: ranks with unlike rows"


@pytest.mark.parametrize(("ranks", "block", "page_size"), FEW)
def test_a_gathered_prefix_is_in_order(ranks, block, page_size, device, no_sync):
    """Every rank sends the rows that any may hold, from a pool in which each row says whose and which it is."""
    layout = rotated(ranks, block, page_size)
    requests, table, req = batch(layout, device)
    lens = torch.tensor([len(r.slots) for r in requests], device=device)
    with no_sync():
        sent = layout.plain.local_len(lens, 0)
        indptr = torch.zeros(len(requests) + 1, dtype=torch.int32, device=device)
        torch.cumsum(sent, dim=0, out=indptr[1:])
    total, tokens = int(indptr[-1]), int(lens.sum())
    rows = torch.empty(total, dtype=torch.int32, device=device)
    kernels.shard_rows_from_table(table, req, sent, indptr, rows, layout.plain, 0)
    with no_sync():
        order = kernels.rotated_gather_order(table, req, lens, indptr, total, tokens, layout)
    dealt = requests[0].dealt
    pools = torch.full((ranks, len(dealt.owner)), -1.0)
    pools[dealt.owner, dealt.row] = torch.arange(len(dealt.owner)).float()
    pools = pools.to(device)

    def all_gather(out, mine):
        assert mine.shape[0] == total
        out.copy_(torch.cat([p[rows.long()][:, None].expand(-1, 3) for p in pools]))

    mine = pools[0][rows.long()][:, None]
    found = gather_rows(mine.expand(-1, 2), mine, total, order, ranks, all_gather)
    wanted = torch.from_numpy(np.concatenate([r.slots for r in requests])).float()
    assert torch.equal(found.cpu(), wanted[:, None].expand(-1, 3))
    other = kernels.rotated_gather_order(
        table, req, lens, indptr, total, tokens, rotated(ranks, block, 2 * layout.page_rows)
    )
    assert not torch.equal(order, other), "control: pages of another size"


@pytest.mark.parametrize(("ranks", "block", "page_size"), FEW)
def test_owned_rows_are_written_and_no_other(ranks, block, page_size, device, no_sync):
    layout = rotated(ranks, block, page_size)
    pages = 2 * ranks + 1
    dealt = deal_pages(pages, ranks, block, layout.page_rows)
    loc = torch.from_numpy(np.random.default_rng(2).permutation(len(dealt.owner)))
    loc[::7] = 0  # SGLang's slot for padding
    slots, value = loc.to(device), loc[:, None].float().to(device)
    nope = value.expand(-1, 2).contiguous()
    plain_differs = False
    for rank in range(ranks):
        pool, plain = (torch.full((pages * layout.page_rows, 3), -1.0, device=device) for _ in range(2))
        with no_sync():
            write_mla_kv(pool, slots, nope, value, layout, rank)
        wanted = torch.full_like(pool, -1.0)
        for slot in loc.tolist():
            if slot and dealt.owner[slot] == rank:
                wanted[dealt.row[slot]] = slot
        assert torch.equal(pool, wanted)
        write_mla_kv(plain, slots, nope, value, layout.plain, rank)
        plain_differs |= not torch.equal(plain, wanted)
    assert plain_differs, "control: without rotation"


class NoReadback(TorchDispatchMode):
    """Fails where the host would ask a GPU for a value; on CPU tensors as well."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def test_a_decode_step_reads_nothing_back(device, no_sync, monkeypatch):
    """The hook of ``TritonAttnBackend._dcp_kv_indices``, with a buffer of its own and with a CUDA graph's."""
    layout = rotated(4, 3, 6)
    requests, table, req = batch(layout, device, torch.int32)
    lens = torch.tensor([len(r.slots) for r in requests], device=device)
    backend = SimpleNamespace(req_to_token=table, max_context_len=table.shape[1], device=device)
    buffer = torch.empty(len(requests) * table.shape[1], dtype=torch.int64, device=device)
    monkeypatch.setattr(runtime, "_layout", layout)
    for rank in range(4):
        monkeypatch.setattr(triton_mla, "active_rank", lambda rank=rank: rank)
        for out in (None, buffer):
            indptr = torch.zeros(len(requests) + 5, dtype=torch.int32, device=device)
            with no_sync(), NoReadback():
                found, rows, local_lens = triton_mla.shard_kv_indices(backend, req, lens, indptr, out)
            held = [r.held(rank) for r in requests]
            assert local_lens.tolist() == [len(h) for h in held]
            wanted = [int(r.dealt.row[r.slots[t]]) for r, h in zip(requests, held, strict=True) for t in h]
            assert rows[: int(found[-1])].tolist() == wanted
        most = dcp_hooks.get_dcp_lens(lens, 4, rank)
        assert (most >= local_lens).all()
    with pytest.raises(NotImplementedError, match="drop --dcp-rotate"):
        triton_mla.shard_kv_indices(backend, req, lens, indptr, None, lens)
    with pytest.raises(AssertionError), NoReadback():
        int(lens.sum())  # control


def test_a_gather_that_was_not_prepared_stops(monkeypatch):
    """The order of the rows comes from the batch that was prepared last."""
    monkeypatch.setattr(runtime, "_layout", rotated(4, 3, 6))
    backend = SimpleNamespace(dcp_block_gather_order=torch.arange(7))
    monkeypatch.setattr(dcp_hooks, "get_attn_backend", lambda: backend)
    parallel = SimpleNamespace(dcp_group=SimpleNamespace(all_gather_into_tensor=None))
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    rows = torch.zeros(2, 1, 3)
    for lens, starts in (([8], None), ([7], torch.tensor([1]))):
        with pytest.raises(RuntimeError, match="prepared"):
            dcp_hooks.all_gather_kv_cache(rows, rows, torch.tensor(lens), starts)


def test_bad_arguments_of_the_kernels(device):
    layout, vector = rotated(2, 3, 3), torch.zeros(2, dtype=torch.int64, device=device)
    table = torch.zeros(2, 6, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="rank must be below"):
        kernels.rotated_local_lens(table, vector, vector, layout, 2)
    with pytest.raises(ValueError, match="req_to_token must be a matrix"):
        kernels.rotated_local_lens(table.t(), vector, vector, layout, 0)
    with pytest.raises(ValueError, match="at least 2 elements"):
        kernels.rotated_local_lens(table, vector[:1], vector, layout, 0)
    with pytest.raises(ValueError, match="at least 2 elements"):
        kernels.rotated_gather_order(table, vector, vector, vector[:1], 0, 0, layout)
    assert kernels.rotated_local_lens(table, vector[:0], vector[:0], layout, 0).shape == (0,)
    assert kernels.rotated_gather_order(table, vector, vector, vector, 0, 0, layout).shape == (0,)
