"""Blocks of any size in SGLang's own allocator, KV pool and radix tree.

A page is raised to whole blocks, SGLang multiplies it by dcp_size, and that is the virtual page in which the rule holds
for slot ids. Here SGLang's real classes allocate, grow, share, free and evict requests; where every token may lie is
known from dealing the tokens out one by one.
"""

from __future__ import annotations

import random
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from brute_force import deal

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.allocator import take_any_page_size
from sglang_dcp_block.plugin import check_virtual_page, tail_text
from sglang_dcp_block.server_args import Launch, whole_blocks

#: (B, --page-size): blocks of several pages, not dividing a page in either direction, and blocks inside a page.
SIZES = [(2, 1), (4, 1), (1024, 1), (32, 16), (64, 16), (1024, 16), (128, 64), (1024, 64), (48, 64), (48, 32), (96, 64)]
SIZES += [(64, 64), (16, 64), (3, 2)]


def served_page(block: int, page: int, ranks: int) -> int:
    """The page after the resolution step."""
    cfg = SimpleNamespace(dcp_size=ranks, page_size=page, chunked_prefill_size=-1, disaggregation_mode="null")
    return whole_blocks(Launch(cfg, None, block)).get("page_size", page)


class Server:
    """SGLang's allocator, pool and tree of one rank, sized as its KVCacheConfigurator does, and running requests."""

    def __init__(self, ranks: int, block: int, page: int, rows: int) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.layout, self.page = DcpLayout(ranks, block), page
        rows = rows // page * page
        self.pool = MLATokenToKVPool(rows, page, torch.float32, 1, 1, 1, "cpu", False)
        size, self.slots = rows * ranks, page * ranks
        self.allocator = PagedTokenToKVPoolAllocator(size, self.slots, torch.float32, "cpu", self.pool, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=self.allocator.page_size,
            enable_kv_cache_events=True,
        )
        params.tree_components = (ComponentType.FULL,)
        self.tree = UnifiedRadixCache(params)
        self.running: dict[int, tuple[list[int], torch.Tensor, int]] = {}  # tokens, slots, slots that the tree holds

    def match(self, tokens: list[int]) -> torch.Tensor:
        """Slots of the cached prefix."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        found = self.tree.match_prefix(MatchPrefixParams(key=RadixKey(array("q", tokens))))
        if not found.device_prefix_len:
            return torch.empty(0, dtype=torch.int64)
        return self.tree.path_device_indices(found.last_device_node).clone()

    def extend(self, number: int, tokens: list[int], length: int) -> bool:
        """The request's first ``length`` tokens get slots; False when the pool is full."""
        known, slots, held = self.running.get(number, (tokens, None, 0))
        if slots is None:
            slots = self.match(tokens[:-1])
            held = len(slots)
        before, after = torch.tensor([len(slots)]), torch.tensor([length])
        last = slots[-1:] if len(slots) else torch.tensor([-1])
        new = self.allocator.alloc_extend(before, before, after, after, last, length - len(slots))
        if new is None:
            return False
        self.running[number] = (known, torch.cat([slots, new]), held)
        return True

    def decode(self, number: int, token: int) -> bool:
        tokens, slots, held = self.running[number]
        lens = torch.tensor([len(slots) + 1])
        new = self.allocator.alloc_decode(lens, lens, slots[-1:])
        if new is None:
            return False
        self.running[number] = ([*tokens, token], torch.cat([slots, new]), held)
        return True

    def finish(self, number: int, cache: bool) -> None:
        """Give the slots back; whole virtual pages go to the tree first, if ``cache``."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tokens, slots, held = self.running.pop(number)
        whole = len(slots) // self.slots * self.slots if cache else held
        if whole:
            key = RadixKey(array("q", tokens[:whole]))
            # The tree frees what of [held, whole) it has from another request already.
            self.tree.insert(InsertParams(key=key, value=slots[:whole], prev_prefix_len=held))
        self.allocator.free_segment(slots[whole:], start_pos=whole)

    def evict(self, tokens: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        self.tree.evict(EvictParams(num_tokens=tokens))


def violations(server: Server) -> list[str]:
    """What is wrong with where the running requests lie; nothing when the rule holds."""
    layout, found = server.layout, []
    where, content = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for number, (tokens, slots, _) in server.running.items():
        at = slots.numpy()
        dealt = deal(len(at), layout.dcp_size, layout.block_size)
        owner, row = np.asarray(layout.owner(at)), np.asarray(layout.local_index(at))
        if not np.array_equal(owner, dealt.owner):
            found.append(f"request {number}: a slot belongs to another rank than its position")
        if row.size and not (server.page <= row.min() and row.max() < server.pool.kv_buffer[0].shape[0]):
            found.append(f"request {number}: rows {row.min()} to {row.max()} leave the pool")
        # A whole block lies in consecutive rows: that is what makes it one segment of a transfer.
        same = np.diff(np.arange(len(at)) // layout.block_size) == 0
        if not np.array_equal(np.diff(row)[same], np.ones(same.sum(), np.int64)):
            found.append(f"request {number}: a block is torn apart")
        where.append(owner * 2**32 + row)
        content.append(np.array(tokens[: len(at)]) * 2**32 + np.arange(len(at)))
    pairs = np.unique(np.stack([np.concatenate(where), np.concatenate(content)]), axis=1)
    if len(np.unique(pairs[0])) < pairs.shape[1]:
        found.append("two tokens share a row")
    return found


def play(server: Server, steps: int, seed: int) -> int:
    """Random requests that share prefixes, grow, finish and are evicted; the number of cached prefix tokens used."""
    generator = random.Random(seed)
    trunk = [generator.randrange(1000) for _ in range(5 * server.slots)]
    assert server.extend(0, trunk[: 2 * server.slots + 1], 2 * server.slots + 1)
    server.finish(0, cache=True)
    number = hits = 0
    for _ in range(steps):
        action = (
            "start"
            if not number
            else generator.choice(["start", "start", "grow", "decode", "finish", "finish", "evict"])
        )
        if action == "start":
            cut = generator.choice([0, 1, server.slots, 2 * server.slots]) + generator.randrange(-1, 2)
            cut = cut if number else server.slots
            own = [generator.randrange(1000, 2000) for _ in range(generator.randrange(1, 2 * server.slots))]
            tokens = [*trunk[: max(cut, 0)], *own]
            number += 1
            first = generator.randrange(1, len(tokens) // server.page + 2) * server.page  # a chunk: whole pages
            started = server.extend(number, tokens, max(min(first, len(tokens)), len(server.match(tokens[:-1])) + 1))
            hits += server.running[number][2] if started else 0
        elif server.running:
            chosen = generator.choice(list(server.running))
            tokens, slots, _ = server.running[chosen]
            if len(slots) < len(tokens) and action in ("grow", "decode"):
                server.extend(chosen, tokens, len(tokens))
            elif action == "decode":
                for _ in range(generator.randrange(1, 40)):
                    if not server.decode(chosen, generator.randrange(2000)):
                        break
            elif action == "finish":
                server.finish(chosen, cache=len(slots) == len(tokens))
            elif action == "evict" and not any(held for *_, held in server.running.values()):
                server.evict(generator.randrange(1, 3) * server.slots)  # a running request locks what it shares
        assert violations(server) == []
    return hits


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("block", "page"), SIZES)
def test_slots_obey_the_rule_of_positions(block, page, ranks):
    served = served_page(block, page, ranks)
    assert served % block == 0 and served % page == 0 and served <= block * page
    server = Server(ranks, block, served, rows=24 * served + 1)
    check_virtual_page(server.layout, served, server.allocator.page_size)
    steps = max(20, min(120, 60_000 // server.slots))
    assert play(server, steps, seed=block) > 0, "no prefix was ever shared"
    for number in list(server.running):
        server.finish(number, cache=True)
    server.evict(10**9)
    assert server.allocator.available_size() == server.allocator.size, "slots were lost"


@pytest.mark.parametrize(("block", "page"), [(4, 1), (48, 64), (64, 16)])
def test_pages_of_part_blocks_break_the_rule(block, page):
    """Without the raised page SGLang's allocator gives slots whose owner is not that of their position."""
    server = Server(2, block, page, rows=400 * page)
    with pytest.raises(SystemExit, match="the allocator's pages have"):
        check_virtual_page(server.layout, page, server.allocator.page_size)
    with pytest.raises(AssertionError, match=r"belongs to another rank|torn apart"):
        play(server, 60, seed=1)


@pytest.mark.parametrize(("block", "page"), [(4, 1), (64, 16), (48, 32), (48, 64), (16, 64)])
def test_prefix_hits_and_kv_events_at_every_edge(block, page):
    """A prefix is found up to the last whole virtual page, whatever edge it is cut at; events name that page."""
    from sglang.srt.arg_groups.overrides import kv_event_block_size_of
    from sglang.srt.disaggregation.kv_events import BlockStored

    served = served_page(block, page, 2)
    server = Server(2, block, served, rows=40 * served)
    prompt = [random.Random(0).randrange(1000) for _ in range(3 * server.slots + 7)]
    assert server.extend(0, prompt, len(prompt))
    kept = server.running[0][1].clone()
    server.finish(0, cache=True)
    events = [e for e in server.tree.take_events() if isinstance(e, BlockStored)]
    cfg = SimpleNamespace(page_size=served, dcp_size=2)
    assert {e.block_size for e in events} == {kv_event_block_size_of(cfg)} == {server.layout.virtual_page_size(page)}
    edges = {k * step + d for step in (page, block, served, server.slots) for k in range(1, 8) for d in (-1, 0, 1)}
    for cut in sorted(e for e in edges if 0 < e < len(prompt)):
        found = server.match([*prompt[:cut], 5000])
        assert len(found) == cut // server.slots * server.slots
        assert torch.equal(found, kept[: len(found)])


@pytest.mark.parametrize(("block", "page"), [(48, 64), (64, 16)])
def test_pages_that_are_no_power_of_two_allocate(block, page):
    """SGLang's Triton kernels can't; told so, the allocator takes its torch ones, and only then."""
    served = served_page(block, page, 2)
    server = Server(2, block, served, rows=40 * served)
    server.allocator.use_triton_kernels = True  # as on a GPU
    if served == 192:
        with pytest.raises(Exception, match="must be a power of 2"):
            server.extend(0, list(range(9)), 9)
    take_any_page_size(server.allocator)
    assert server.allocator.use_triton_kernels == (served == 64)
    assert play(server, 30, seed=0) > 0


def test_unused_slots_by_counting():
    for ranks, block, page in [(2, 4, 1), (8, 1024, 16), (4, 48, 64), (2, 1, 1)]:
        layout = DcpLayout(ranks, block)
        server = Server(ranks, block, layout.rows_per_virtual_page(page), rows=4 * layout.rows_per_virtual_page(page))
        for length in (1, server.slots - 1, server.slots, server.slots + 1):
            before = server.allocator.available_size()
            assert server.extend(length, list(range(length)), length)
            taken = before - server.allocator.available_size()
            assert layout.unused_slots(length, page) == taken - length
            server.finish(length, cache=False)


def test_the_start_log_tells_the_tail():
    text = tail_text(DcpLayout(8, 1024), 1, 1_048_576)
    assert "virtual pages of 8,192 slots" in text and "up to 8,191 of them unused" in text
    assert text.endswith("1,048,576 slots hold at most 128 requests at once.")
