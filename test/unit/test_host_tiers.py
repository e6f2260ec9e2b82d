"""KV rows on their way to host memory, to a store and back: SGLang's pools and file store, our row lists and keys.

Each rank has a device pool with the rows of a request, as dealt out one by one. Whatever way they take, every row must
come back into the place where its token's new slot lies.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from brute_force import deal

from sglang_dcp_block import dcp_hooks, runtime
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.host_rows import rows_of_run
from sglang_dcp_block.mem_cache.storage_key import storage_config, storage_name
from sglang_dcp_block.server_args import TESTED_HOST_COPIES, DcpBlockError
from sglang_dcp_block.testing import host_copies

LAYERS, PAGES = 2, 7
#: (P, B, page in force)
CELLS = [(2, 1, 4), (2, 4, 4), (3, 2, 4), (4, 16, 16), (2, 16, 64), (2, 3, 6)]


@pytest.fixture
def host_pools(monkeypatch: pytest.MonkeyPatch):
    """SGLang's modules of both pools with our row lists, and torch where a copy kernel needs a GPU."""
    from sglang.srt.mem_cache import memory_pool
    from sglang.srt.mem_cache.pool_host import base, mla

    for module in (memory_pool, mla):
        monkeypatch.setattr(module, "maybe_dcp_kernel_indices", dcp_hooks.maybe_dcp_kernel_indices)
    monkeypatch.setattr(base, "HICACHE_HOST_MEMORY_RESERVE_BYTES", 0)
    for name in [n for n in vars(host_copies) if n.startswith("transfer_kv")]:
        monkeypatch.setattr(mla, name, getattr(host_copies, name), raising=False)
    return mla


class Rank:
    """One rank's device pool and host pool. A row holds 1000 * (layer + 1) + its token, and NaN when unwritten."""

    def __init__(self, mla, cell: tuple[int, int, int], rank: int, memory_layout: str, dtype=torch.float32) -> None:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        self.ranks, self.block, self.page = cell
        self.rank = rank
        rows = PAGES * self.page
        self.device = MLATokenToKVPool(rows, self.page, dtype, 3, 1, LAYERS, "cpu", False)
        for buffer in self.device.kv_buffer:
            buffer.fill_(float("nan"))
        self.host = mla.MLATokenToKVPoolHost(
            self.device.get_device_pool_infos()[0].buffer_info,
            2.0,
            0,
            self.page * self.ranks,
            memory_layout,
            pin_memory=False,
            dcp_size=self.ranks,
            dcp_rank=rank,
            device_capacity_tokens=rows,
            start_layer=0,
            end_layer=LAYERS - 1,
            target_layer_num=LAYERS,
        )
        self.host.kv_buffer.fill_(float("nan"))

    def mine(self, slots: list[int]) -> tuple[list[int], list[int]]:
        """Positions of a request in ``slots`` that lie here, and their rows, by dealing the slots out."""
        dealt = deal((PAGES + 1) * self.page * self.ranks, self.ranks, self.block)
        positions = [t for t, v in enumerate(slots) if dealt.owner[v] == self.rank]
        return positions, [int(dealt.row[slots[t]]) for t in positions]

    def write(self, slots: list[int]) -> None:
        positions, rows = self.mine(slots)
        for layer, buffer in enumerate(self.device.kv_buffer):
            buffer[rows] = (torch.tensor(positions, dtype=buffer.dtype) + 1000 * (layer + 1))[:, None, None]

    def holds(self, slots: list[int]) -> bool:
        """The request lies in ``slots``, and every other row is unwritten."""
        positions, rows = self.mine(slots)
        for layer, buffer in enumerate(self.device.kv_buffer):
            want = torch.full_like(buffer, float("nan"))
            want[rows] = (torch.tensor(positions, dtype=buffer.dtype) + 1000 * (layer + 1))[:, None, None]
            if not torch.equal(buffer.nan_to_num(-1), want.nan_to_num(-1)):
                return False
        return True

    def forget(self) -> None:
        for buffer in self.device.kv_buffer:
            buffer.fill_(float("nan"))

    def back_up(self, host: torch.Tensor, slots: list[int], io: str) -> None:
        self.host.backup_from_device_all_layer(self.device, host, torch.tensor(slots), io)

    def load(self, host: torch.Tensor, slots: list[int], io: str) -> None:
        for layer in range(LAYERS):
            self.host.load_to_device_per_layer(self.device, host, torch.tensor(slots), layer, io)


def pages_of(cell: tuple[int, int, int], pages: list[int]) -> list[int]:
    """Slots of whole virtual pages, one after another."""
    ranks, _, page = cell
    return [p * page * ranks + i for p in pages for i in range(page * ranks)]


def all_ranks(monkeypatch: pytest.MonkeyPatch, mla, cell, memory_layout: str) -> list[Rank]:
    monkeypatch.setattr(runtime, "_layout", DcpLayout(*cell[:2]))
    return [Rank(mla, cell, rank, memory_layout) for rank in range(cell[0])]


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize(("io", "memory_layout"), TESTED_HOST_COPIES)
def test_to_the_host_and_back_into_other_pages(host_pools, monkeypatch, cell, io, memory_layout):
    ranks = all_ranks(monkeypatch, host_pools, cell, memory_layout)
    there, back = pages_of(cell, [5, 1, 4]), pages_of(cell, [2, 6, 3])
    for rank in ranks:
        rank.host.alloc(2 * cell[0] * cell[2])
        host = torch.cat([rank.host.alloc(cell[0] * cell[2]) for _ in range(3)]).roll(cell[0] * cell[2])
        rank.write(there)
        assert rank.holds(there)
        rank.back_up(host, there, io)
        rank.forget()
        rank.load(host, back, io)
        assert rank.holds(back)
        rank.forget()  # control: the same pages in another order
        rank.load(host.roll(cell[0] * cell[2]), back, io)
        assert not rank.holds(back)


@pytest.mark.parametrize("cell", [*CELLS, (8, 64, 64), (2, 1024, 1024), (4, 48, 192)])
def test_whole_virtual_pages_are_the_rows_that_sglang_copies(cell):
    """A virtual page is the same rows of each rank in any layout, so copy kernels get what they get at B = 1."""
    from sglang.srt.layers.dcp import layout as stock

    size = cell[0] * cell[2]
    run = torch.tensor(pages_of(cell, [5, 1, 4]))
    for rank in range(cell[0]):
        theirs = stock.maybe_dcp_kernel_indices(run, cell[0], rank)
        assert torch.equal(rows_of_run(run, DcpLayout(*cell[:2]), rank), theirs)
    if cell[1] > 1:  # control: not for a request's last page, which retraction copies
        part = run[: size + cell[1]]
        assert len(rows_of_run(part, DcpLayout(*cell[:2]), 0)) == cell[2] + cell[1]
        assert len(stock.maybe_dcp_kernel_indices(part, cell[0], 0)) < cell[2] + cell[1]


@pytest.mark.parametrize("cell", CELLS)
def test_host_slots_stay_in_whole_pages(host_pools, monkeypatch, cell):
    """Rows are chosen by count, so a run must begin at a page's first slot: also after many frees of parts."""
    (pool, *_) = (rank.host for rank in all_ranks(monkeypatch, host_pools, cell, "layer_first"))
    size, generator, held = cell[0] * cell[2], random.Random(0), []
    for _ in range(300):
        if held and generator.random() < 0.5:
            run = held.pop(generator.randrange(len(held)))
            # HiCacheController gives back what a cancelled prefetch took in pieces of a rank's page, and all at once.
            pool.free(torch.cat(run.split(pool.page_size)) if generator.random() < 0.5 else run)
        elif (run := pool.alloc(size * generator.randrange(1, 4))) is not None:
            pages = run.view(-1, size)
            assert torch.equal(pages, pages[:, :1] // size * size + torch.arange(size))
            held.append(run)


# -- a decode server's retracted requests ------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_retracted_requests_come_back_into_other_pages(host_pools, monkeypatch, cell):
    """Copies of any length; ranks without a row of the request copy nothing."""
    from sglang.srt.mem_cache import memory_pool

    size = cell[0] * cell[2]
    for rank in all_ranks(monkeypatch, host_pools, cell, "layer_first"):
        here = SimpleNamespace(attn_dcp_size=cell[0], attn_dcp_rank=rank.rank)
        monkeypatch.setattr(memory_pool, "get_parallel", lambda here=here: here)
        rank.device.cpu_offloading_chunk_size = 5
        for length in {1, cell[1], cell[1] + 1, cell[0] * cell[1], size - 1, size, size + 1, 2 * size + cell[1] + 1}:
            there, back = pages_of(cell, [5, 1, 4])[:length], pages_of(cell, [2, 6, 3])[:length]
            rank.forget()
            rank.write(there)
            copy = rank.device.get_cpu_copy(torch.tensor(there))
            rank.forget()
            rank.device.load_cpu_copy(copy, torch.tensor(back))
            assert rank.holds(back), (rank.rank, length)


def test_sglangs_own_rows_lose_a_retracted_request(host_pools, monkeypatch):
    """The control: with the rows of token round-robin the last page is copied from the wrong places."""
    from sglang.srt.layers.dcp import layout as stock
    from sglang.srt.mem_cache import memory_pool

    cell = (2, 4, 4)
    ranks = all_ranks(monkeypatch, host_pools, cell, "layer_first")
    monkeypatch.setattr(memory_pool, "maybe_dcp_kernel_indices", stock.maybe_dcp_kernel_indices)
    there, back = pages_of(cell, [5, 1])[:13], pages_of(cell, [2, 6])[:13]
    found = []
    for rank in ranks:
        here = SimpleNamespace(attn_dcp_size=cell[0], attn_dcp_rank=rank.rank)
        monkeypatch.setattr(memory_pool, "get_parallel", lambda here=here: here)
        rank.write(there)
        copy = rank.device.get_cpu_copy(torch.tensor(there))
        rank.forget()
        rank.device.load_cpu_copy(copy, torch.tensor(back))
        found.append(rank.holds(back))
    assert not all(found)


# -- a store -----------------------------------------------------------------------------------------------------------


def store(pool, cell: tuple[int, int, int], rank: int, folder, model: str | None = "org/model"):
    """SGLang's file store of one rank, described by SGLang and by our hook."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    def described(_controller):
        return HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=cell[0],
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=True,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=model,
            dcp_size=cell[0],
            dcp_rank=rank,
            logical_page_size=cell[0] * cell[2],
            extra_config={"file_storage_path": str(folder)},
        )

    return HiCacheFile(storage_config(described, SimpleNamespace(storage_backend_type="file", storage_host_pool=pool)))


def test_keys_tell_all_layouts_apart(monkeypatch, tmp_path):
    keys, made = set(), 0
    for block in (1, 2, 16, 64):
        for page in (64, 128):
            for ranks in (2, 4):
                monkeypatch.setattr(runtime, "_layout", DcpLayout(ranks, block))
                for rank in range(ranks):
                    for memory_layout, dtype in [("page_first", torch.bfloat16), ("layer_first", torch.bfloat16)]:
                        pool = SimpleNamespace(layout=memory_layout, dtype=dtype)
                        keys.add(store(pool, (ranks, block, page), rank, tmp_path)._get_suffixed_key("abc"))
                        made += block > 1 or memory_layout == "page_first"  # B = 1: SGLang's keys
    assert len(keys) == made
    assert storage_name("m", 16, "page_first", torch.float16) != storage_name("m", 16, "page_first", torch.bfloat16)
    assert storage_name(None, 16, "page_first", torch.float16) == "-dcpblock16-page_first-float16"


def test_a_block_size_of_one_keeps_sglangs_keys(monkeypatch):
    monkeypatch.setattr(runtime, "_layout", DcpLayout(2, 1))
    described = SimpleNamespace(model_name="m")
    assert storage_config(lambda _: described, SimpleNamespace(storage_backend_type="mooncake")) is described


def test_another_store_is_refused_when_it_is_attached(monkeypatch):
    monkeypatch.setattr(runtime, "_layout", DcpLayout(2, 16))
    controller = SimpleNamespace(storage_backend_type="mooncake")
    with pytest.raises(DcpBlockError, match="not tested with HiCache storage mooncake: attach file"):
        storage_config(lambda _: None, controller)
    assert controller.storage_backend_type is None


@pytest.mark.parametrize("memory_layout", sorted({layout for _, layout in TESTED_HOST_COPIES}))
def test_stored_pages_come_back_and_others_are_not_found(host_pools, monkeypatch, tmp_path, memory_layout):
    """Written with B = 4. With B = 4 all is there; with B = 2, which has pages of the same size, nothing is."""
    io = next(io for io, layout in TESTED_HOST_COPIES if layout == memory_layout)
    written, other = (2, 4, 8), (2, 2, 8)
    size, keys = 16, ["page-a", "page-b"]
    there, back = pages_of(written, [5, 1]), pages_of(written, [2, 6])
    for rank in all_ranks(monkeypatch, host_pools, written, memory_layout):
        host = rank.host.alloc(2 * size)
        rank.write(there)
        rank.back_up(host, there, io)
        pages = [rank.host.get_data_page(int(p)) for p in host[::size]]
        assert store(rank.host, written, rank.rank, tmp_path).batch_set(keys, pages)

    def read(cell, name_of) -> list[bool]:
        """Whether each rank of a server with this layout has the request after reading the store."""
        found = []
        for rank in all_ranks(monkeypatch, host_pools, cell, memory_layout):
            monkeypatch.setattr("sglang_dcp_block.mem_cache.storage_key.storage_name", name_of)
            shelf = store(rank.host, cell, rank.rank, tmp_path)
            host = rank.host.alloc(2 * size)
            pages = shelf.batch_get(keys, [rank.host.get_dummy_flat_data_page() for _ in keys])
            if None in pages:
                assert not shelf.exists(keys[0])
                found.append(None)
                continue
            for index, page in zip(host[::size], pages, strict=True):
                rank.host.set_from_flat_data_page(int(index), page)
            rank.load(host, back, io)
            found.append(rank.holds(back))
        return found

    assert read(written, storage_name) == [True, True]
    assert read(other, storage_name) == [None, None]
    blind = lambda model, _block, *rest: storage_name(model, 4, *rest)  # noqa: E731
    assert read(other, blind) == [False, False], "the control: a key without the block size finds wrong rows"
