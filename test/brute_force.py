"""The layout by simulation: blocks are dealt to ranks like cards, with counters and no formula.

This is the reference of unit, GPU and PD tests. It knows nothing of sglang_dcp_block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

SIZES = (1, 2, 3, 4, 8)
BLOCKS = (1, 2, 3, 16, 64, 128)


class Dealt(NamedTuple):
    """owner, row: (n,) int64 by position. held: for each rank the positions it holds, in order of row."""

    owner: np.ndarray
    row: np.ndarray
    held: tuple[np.ndarray, ...]


@lru_cache(maxsize=64)
def deal(n: int, ranks: int, block: int) -> Dealt:
    owner, row = np.empty(n, np.int64), np.empty(n, np.int64)
    held: list[list[np.ndarray]] = [[np.empty(0, np.int64)] for _ in range(ranks)]
    filled = [0] * ranks
    rank = 0
    for first in range(0, n, block):
        tokens = np.arange(first, min(first + block, n))
        owner[tokens] = rank
        row[tokens] = np.arange(filled[rank], filled[rank] + len(tokens))
        held[rank].append(tokens)
        filled[rank] += len(tokens)
        rank = rank + 1 if rank + 1 < ranks else 0
    return Dealt(owner, row, tuple(map(np.concatenate, held)))


def first_ranks(pages: int, ranks: int) -> list[int]:
    """Ranks at which virtual pages 0, 1, ... begin under rotation: one further each, two further after P pages."""
    found, turn, counted = [], 0, 0
    for _ in range(pages):
        found.append(turn)
        counted += 1
        steps = 1
        if counted == ranks:
            counted, steps = 0, 2
        for _ in range(steps):
            turn = turn + 1 if turn + 1 < ranks else 0
    return found


@lru_cache(maxsize=64)
def deal_pages(pages: int, ranks: int, block: int, page_rows: int) -> Dealt:
    """All slots of ``pages`` virtual pages, each dealt out from its own first rank on: slots in place of positions."""
    size = page_rows * ranks
    owner, row = np.empty(pages * size, np.int64), np.empty(pages * size, np.int64)
    held: list[list[int]] = [[] for _ in range(ranks)]
    for page, rank in enumerate(first_ranks(pages, ranks)):
        left = block
        for slot in range(page * size, (page + 1) * size):
            if left == 0:
                rank, left = rank + 1 if rank + 1 < ranks else 0, block
            owner[slot], row[slot] = rank, len(held[rank])
            held[rank].append(slot)
            left -= 1
    return Dealt(owner, row, tuple(np.array(h, np.int64) for h in held))


def between(dealt: Dealt, rank: int, start: int, length: int) -> list[int]:
    """Positions of [start, start + length) that ``rank`` holds."""
    return [int(t) for t in dealt.held[rank] if start <= t < start + length]


def edge_lengths(ranks: int, block: int) -> list[int]:
    """Lengths around every border of the rule."""
    cycle = ranks * block
    around = {0, 1, block - 1, block, block + 1, cycle - 1, cycle, cycle + 1, 2 * cycle, 2 * cycle + block + 1}
    return sorted(around)
