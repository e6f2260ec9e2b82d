"""Long prefixes in the radix cache of a scheduler without computing them: ``SGLANG_DCP_BLOCK_PRELOAD=1``.

For timing decode at long contexts, where prefill would take most of the time: ``engine.collective_rpc(
"dcp_block_preload", ...)`` allocates pages for whole prompts, as the scheduler does, and inserts them into the radix
cache. The KV rows are random, so answers mean nothing; which rows a rank reads, and how many, is the real thing.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from random import Random
from typing import Any


def random_prompts(lengths: Sequence[int], seed: int, vocab: int) -> list[list[int]]:
    """Token ids of one prompt per length: the same ones for the same arguments."""
    rng = Random(seed)
    return [[rng.randrange(10, vocab - 10) for _ in range(n)] for n in lengths]


def install() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    Scheduler.dcp_block_preload = _preload  # found by name: SGLang's RPC is getattr(scheduler, method)


def _preload(scheduler: Any, lengths: list[int], seed: int, vocab: int) -> None:
    """Whole pages of each of :func:`random_prompts`; what is cached already is dropped first.

    Raises:
        ValueError: the pool is too small for all of them.
    """
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    if not scheduler.flush_cache():
        raise ValueError("dcp_block_preload needs an idle scheduler: wait for the running requests")
    allocator, tree = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    for buffer in allocator._kvcache.kv_buffer:
        buffer.normal_()
    for tokens in random_prompts(lengths, seed, vocab):
        length = len(tokens) // allocator.page_size * allocator.page_size
        slots = allocator.alloc(length)
        if slots is None:
            raise ValueError(
                f"the pool has {allocator.available_size()} free slots, a prompt needs {length}: "
                "raise max_total_tokens or preload less"
            )
        tree.insert(InsertParams(key=RadixKey(array("q", tokens[:length])), value=slots.long()))
