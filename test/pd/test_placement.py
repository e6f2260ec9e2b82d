"""Pages of a prefill server without DCP, in the order of decode's ranks: SGLang's own allocator, managers and threads.

Whatever the order, a request gets the pages that SGLang would give it, and every row arrives where it belongs; how many
segments that takes is counted.
"""

import numpy as np
import pytest
import torch
from brute_force import deal
from harness import LAYERS, NO_DCP, CopyEngine, Prefill, assert_all_rows, wait_until
from test_mooncake_hooks import Request, peers_of, run_request, succeeded

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import placement
from sglang_dcp_block.disaggregation.common import PeerDcpSize, described_peer
from sglang_dcp_block.disaggregation.wire import KvGeometry, encode
from sglang_dcp_block.hooks import call_counts

pytestmark = pytest.mark.usefixtures("mooncake")
HOOK = placement.PLACEMENT_HOOKS[0].target


@pytest.fixture(autouse=True)
def nobody_registered(monkeypatch):
    monkeypatch.setattr(placement, "_expected", None)


def peer_with(layout: DcpLayout, page_size: int = 64) -> PeerDcpSize:
    frame = encode(KvGeometry(layout.dcp_size, layout.block_size, page_size, "bfloat16"))
    return described_peer(layout.dcp_size, 0, layout.dcp_size, frame)


class Pool:
    """SGLang's allocator as a PD server has it, and requests that hold slots."""

    def __init__(self, pages: int, page_size: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        size = pages * page_size
        self.page_size = page_size
        self.allocator = PagedTokenToKVPoolAllocator(size, page_size, torch.float32, "cpu", None, need_sort=True)
        self.slots: dict[int, torch.Tensor] = {}

    def extend(self, lengths: dict[int, int]) -> bool:
        """Requests, by number, up to these lengths in one batch; False when the pool is full."""
        held = [self.slots.get(i, torch.empty(0, dtype=torch.int64)) for i in lengths]
        before, after = torch.tensor([len(h) for h in held]), torch.tensor(list(lengths.values()))
        last = torch.tensor([int(h[-1]) if len(h) else -1 for h in held])
        new = self.allocator.alloc_extend(before, before, after, after, last, int((after - before).sum()))
        if new is None:
            return False
        for i, old, mine in zip(lengths, held, new.split((after - before).tolist()), strict=True):
            self.slots[i] = torch.cat((old, mine))
        return True

    def finish(self, number: int) -> None:
        self.allocator.free(self.slots.pop(number))

    def pages(self, number: int) -> np.ndarray:
        """In order of position. The slots of a page are its rows, in order."""
        slots = self.slots[number].numpy()
        heads = slots[:: self.page_size]
        rest = np.arange(slots.size) % self.page_size
        np.testing.assert_array_equal(slots, np.repeat(heads, self.page_size)[: slots.size] + rest)
        return heads // self.page_size

    def free(self) -> list[int]:
        return sorted(self.allocator.get_all_free_pages().tolist())


@pytest.mark.parametrize("ranks,block,page", [(2, 64, 64), (4, 64, 16), (3, 48, 16), (8, 16, 16), (2, 256, 64)])
def test_order_is_rank_by_rank(ranks, block, page):
    layout, rng = DcpLayout(ranks, block), np.random.default_rng(ranks * block)
    owner = deal(40 * page + 1, ranks, block).owner
    for _ in range(20):
        before = rng.integers(0, 20 * page, 4)
        after = before + rng.integers(1, 20 * page, 4)
        want: list[int] = []  # each new page's place among the free ones
        for b, a in zip(before.tolist(), after.tolist(), strict=True):
            new = range(-(-b // page), -(-a // page))
            taken = [p for rank in range(ranks) for p in new if owner[p * page] == rank]
            want += [len(want) + taken.index(p) for p in new]
        assert placement.page_order(layout, page, before, after).tolist() == want


def test_only_pages_of_one_rank_are_ordered():
    assert placement.whole_pages(DcpLayout(2, 64), 64) and placement.whole_pages(DcpLayout(2, 256), 64)
    assert not placement.whole_pages(DcpLayout(2, 16), 64), "each page has rows of both ranks"
    assert not placement.whole_pages(DcpLayout(2, 48), 32), "a page may cross a border of blocks"
    assert not placement.whole_pages(DcpLayout(2), 64) and not placement.whole_pages(NO_DCP, 1)


@pytest.mark.parametrize("layout", [DcpLayout(2, 32), DcpLayout(2, 32).rotated(32)])
def test_requests_get_the_pages_they_would_get(layout):
    """600 steps of a small pool, beside one where nobody registered: full, worn, in batches, prefixes inside a page."""
    placed, plain = Pool(48, 16), Pool(48, 16)
    rng, refused, moved, ran = np.random.default_rng(7), 0, 0, call_counts[HOOK]
    for step in range(600):
        if len(placed.slots) > 2 and rng.random() < 0.4:
            gone = int(rng.choice(list(placed.slots)))
            placed.finish(gone), plain.finish(gone)
            continue
        known = [int(i) for i in rng.permutation(list(placed.slots))[:1]]
        wanted = {i: len(placed.slots.get(i, ())) + int(rng.integers(1, 100)) for i in [*known, step]}
        placement._expected = layout
        fits = placed.extend(wanted)
        placement._expected = None
        assert plain.extend(wanted) == fits
        refused += not fits
        for i in placed.slots:
            ours, theirs = placed.pages(i), plain.pages(i)
            assert sorted(ours) == sorted(theirs)
            moved += (ours != theirs).any()
        assert placed.free() == plain.free()
        assert len(np.unique(torch.cat(list(placed.slots.values())))) == sum(map(len, placed.slots.values()))
    assert refused > 10 and moved > 10 and call_counts[HOOK] - ran > 600


@pytest.mark.parametrize("ranks,block,page", [(2, 16, 16), (4, 16, 16), (2, 64, 16)])
@pytest.mark.parametrize("chunk", [1 << 20, 160])
def test_a_chunk_is_one_segment_for_each_rank_and_layer(ranks, block, page, chunk):
    """As long as the free pages of both servers adjoin; a server without the order needs a segment for each block."""
    layout, length = DcpLayout(ranks, block), 617
    engine = CopyEngine()
    prefill, peers = Prefill(engine, 64, page), peers_of(layout, page, 48)
    chunks = -(-length // chunk)
    runs = []
    for room, known in enumerate((False, True), 1):
        for peer in peers if known else ():
            peer.clear()
            peer.tell(prefill.endpoint, peer.registration())
        if known:
            wait_until(lambda: placement._expected == layout, "the registration is read")
        pool = Pool(60, page)
        for end in [*range(chunk, length, chunk), length]:
            assert pool.extend({0: end})
        pages = pool.pages(0), np.arange(3, 48)
        engine.batches.clear()
        verdicts, want = run_request(prefill, peers, Request(length, 0, chunk), room, register=not known, pages=pages)
        assert succeeded(verdicts)
        assert_all_rows(peers, want)
        runs.append(sum(map(len, engine.kv_batches())))
        if not known:  # run_request registered after the pages were taken
            placement._expected = None
    alone, ordered = runs
    assert ordered == LAYERS * ranks * chunks
    blocks = sum(-(-min(chunk, length - at) // block) for at in range(0, length, chunk))
    assert alone == LAYERS * blocks


def test_the_peer_that_registered_last_is_expected():
    placement.expect(peer_with(DcpLayout(2, 64)))
    assert placement._expected == DcpLayout(2, 64)
    placement.expect(peer_with(DcpLayout(4, 16)))
    assert placement._expected == DcpLayout(4, 16)
    placement.expect(described_peer(2, 0, 2, None))  # SGLang's own decode server
    pool = Pool(20, 16)
    assert pool.extend({0: 200}) and pool.pages(0).tolist() == list(range(1, 14))
