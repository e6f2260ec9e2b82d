"""The layout by simulation: tokens are handed out one by one, with counters and no formula.

This is the reference of the unit tests. It knows nothing of sglang_dcp_block.
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
    owner, row = [], []
    held: list[list[int]] = [[] for _ in range(ranks)]
    rank = taken = 0
    for t in range(n):
        owner.append(rank)
        row.append(len(held[rank]))
        held[rank].append(t)
        taken += 1
        if taken == block:
            rank, taken = rank + 1, 0
            if rank == ranks:
                rank = 0
    return Dealt(np.array(owner, np.int64), np.array(row, np.int64), tuple(np.array(h, np.int64) for h in held))


def between(dealt: Dealt, rank: int, start: int, length: int) -> list[int]:
    """Positions of [start, start + length) that ``rank`` holds."""
    return [int(t) for t in dealt.held[rank] if start <= t < start + length]


def edge_lengths(ranks: int, block: int) -> list[int]:
    """Lengths around every border of the rule."""
    cycle = ranks * block
    around = {0, 1, block - 1, block, block + 1, cycle - 1, cycle, cycle + 1, 2 * cycle, 2 * cycle + block + 1}
    return sorted(around)
