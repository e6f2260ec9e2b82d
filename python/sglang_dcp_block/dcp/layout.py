"""The rule: which rank owns a token of a request, and in which row it lies there.

P = ``dcp_size``, B = ``block_size``, one cycle is P * B positions. Position t of a request goes to rank
``(t // B) % P``, into the rank's row ``(t // (P * B)) * B + t % B``. B = 1 is SGLang's token round-robin;
B = page_size sends whole KV pages to one rank.

Everything else in this project asks this module (or its device twins in :mod:`sglang_dcp_block.dcp.kernels`).
Slot ids that SGLang's allocator hands out ("widened" ids, P times a rank's rows) obey the same formulas as
positions, because a virtual page is a whole number of cycles.

Values may be Python ints, numpy integer arrays or torch integer tensors (any device, any shape); the result has
the kind, dtype and device of the argument. Arguments are not read back from a GPU, so values inside tensors are not
checked: they must be >= 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

# int | np.ndarray | torch.Tensor; torch itself is not imported here, so the rule loads in milliseconds.
IntLike = TypeVar("IntLike", int, np.ndarray, Any)


def _clamp(x: Any, low: int, high: int) -> Any:
    if isinstance(x, (int, np.integer)):
        return min(max(x, low), high)
    if isinstance(x, np.ndarray):
        return np.clip(x, low, high)
    return x.clamp(low, high)


def _check_index(name: str, value: Any, minimum: int = 0) -> None:
    if isinstance(value, (bool, float)):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if isinstance(value, (int, np.integer)) and value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")


class OwnedIntervals(NamedTuple):
    """The runs of one rank inside [start, start + length), in order of position.

    position: (n,) int64, first position of each run. row: (n,) int64, the rank's row of that position when the
    request begins at row 0. length: (n,) int64, tokens in the run, 1 <= length <= B (a run never spans two blocks,
    except at P = 1, where everything is one run).
    """

    position: np.ndarray
    row: np.ndarray
    length: np.ndarray


@dataclass(frozen=True)
class DcpLayout:
    """Block round-robin over ``dcp_size`` ranks in blocks of ``block_size`` tokens.

    Raises:
        ValueError: a size is not an integer >= 1 (the message names it).
    """

    dcp_size: int
    block_size: int = 1

    def __post_init__(self) -> None:
        for name in ("dcp_size", "block_size"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, got {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def cycle(self) -> int:
        """P * B: positions after which the pattern of owners repeats."""
        return self.dcp_size * self.block_size

    def _check_rank(self, rank: Any) -> None:
        _check_index("rank", rank)
        if isinstance(rank, (int, np.integer)) and rank >= self.dcp_size:
            raise ValueError(f"rank must be below dcp_size={self.dcp_size}, got {rank}")

    # -- where one token lies ------------------------------------------------------------------------------------

    def owner(self, position: IntLike) -> IntLike:
        """Rank that holds ``position`` (or a widened slot id): (t // B) % P."""
        _check_index("position", position)
        return position // self.block_size % self.dcp_size

    def local_index(self, position: IntLike) -> IntLike:
        """Row of ``position`` on its owner: (t // (P*B)) * B + t % B."""
        _check_index("position", position)
        return position // self.cycle * self.block_size + position % self.block_size

    def position(self, row: IntLike, rank: Any) -> IntLike:
        """Inverse of :meth:`local_index` on ``rank``: ((j // B) * P + r) * B + j % B."""
        _check_index("row", row)
        self._check_rank(rank)
        return (row // self.block_size * self.dcp_size + rank) * self.block_size + row % self.block_size

    def perm(self, slot: IntLike) -> IntLike:
        """Token round-robin id of the same rank and row: local_index * P + owner.

        A bijection inside every cycle. Compiled code that can't be replaced and computes ``id % P`` and ``id // P``
        is right when it is fed ``perm(slot)``. Never store the result where ids are kept (``req_to_token``).
        """
        return self.local_index(slot) * self.dcp_size + self.owner(slot)

    # -- how many tokens lie there -------------------------------------------------------------------------------

    def local_len(self, length: IntLike, rank: Any) -> IntLike:
        """Tokens of [0, length) on ``rank``: (N // C) * B + clamp(N % C - r*B, 0, B).

        It is also the row at which position ``length`` or the next one of this rank would lie.
        """
        _check_index("length", length)
        self._check_rank(rank)
        rest = _clamp(length % self.cycle - rank * self.block_size, 0, self.block_size)
        return length // self.cycle * self.block_size + rest

    def interval_len(self, start: IntLike, length: IntLike, rank: Any) -> IntLike:
        """Tokens of [start, start + length) on ``rank``; ``start`` is the position in the request, not in a chunk."""
        _check_index("start", start)
        _check_index("length", length)
        return self.local_len(start + length, rank) - self.local_len(start, rank)

    def local_len_(self, lengths: Any, rank: int) -> Any:
        """:meth:`local_len` written into the torch tensor ``lengths``: a CUDA graph keeps reading the same address."""
        return lengths.copy_(self.local_len(lengths, rank))

    def owned_intervals(self, start: int, length: int, rank: int) -> OwnedIntervals:
        """The runs of ``rank`` inside [start, start + length)."""
        _check_index("start", start)
        _check_index("length", length)
        self._check_rank(rank)
        end = start + length
        if self.dcp_size == 1:
            n = int(length > 0)
            return OwnedIntervals(*(np.full(n, x, np.int64) for x in (start, start, length)))
        # Blocks of this rank are numbered k = 0, 1, ...; block k begins at position(k * B).
        first_row, last_row = self.local_len(start, rank), self.local_len(end, rank)
        if first_row == last_row:
            return OwnedIntervals(*(np.empty(0, np.int64) for _ in range(3)))
        blocks = np.arange(first_row // self.block_size, (last_row - 1) // self.block_size + 1, dtype=np.int64)
        rows = np.maximum(blocks * self.block_size, first_row)
        ends = np.minimum((blocks + 1) * self.block_size, last_row)
        return OwnedIntervals(self.position(rows, rank), rows, ends - rows)

    # -- pages ---------------------------------------------------------------------------------------------------

    def rows_per_virtual_page(self, page_size: int) -> int:
        """Rows that one virtual page takes on each rank: lcm(page_size, B)."""
        _check_index("page_size", page_size, 1)
        return math.lcm(page_size, self.block_size)

    def virtual_page_size(self, page_size: int) -> int:
        """Slots of one virtual page, the unit of SGLang's allocator and radix tree: lcm(page_size, B) * P."""
        return self.rows_per_virtual_page(page_size) * self.dcp_size

    def unused_slots(self, length: IntLike, page_size: int) -> IntLike:
        """Slots that a request of ``length`` tokens takes in its last virtual page and doesn't use: -N mod the page."""
        _check_index("length", length)
        return -length % self.virtual_page_size(page_size)
