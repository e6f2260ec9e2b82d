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


def between(dealt: Dealt, rank: int, start: int, length: int) -> list[int]:
    """Positions of [start, start + length) that ``rank`` holds."""
    return [int(t) for t in dealt.held[rank] if start <= t < start + length]


def edge_lengths(ranks: int, block: int) -> list[int]:
    """Lengths around every border of the rule."""
    cycle = ranks * block
    around = {0, 1, block - 1, block, block + 1, cycle - 1, cycle, cycle + 1, 2 * cycle, 2 * cycle + block + 1}
    return sorted(around)
