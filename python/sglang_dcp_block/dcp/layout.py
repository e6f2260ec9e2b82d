"""The rule: which rank owns a token of a request, and in which row it lies there.

P = ``dcp_size``, B = ``block_size``, one cycle is P * B positions. Position t of a request goes to rank
``(t // B) % P``, into the rank's row ``(t // (P * B)) * B + t % B``. B = 1 is SGLang's token round-robin;
B = page_size sends whole KV pages to one rank.

Everything else in this project asks this module (or its device twins in :mod:`sglang_dcp_block.dcp.kernels`).
Slot ids that SGLang's allocator hands out ("widened" ids, P times a rank's rows) obey the same formulas as
positions, because a virtual page is a whole number of cycles. :class:`RotatedLayout` starts each virtual page at
another rank: there the slot tells the owner, and a position tells it only together with its page.

Values may be Python ints, numpy integer arrays or torch integer tensors (any device, any shape); the result has
the kind, dtype and device of the argument. Arguments are not read back from a GPU, so values inside tensors are not
checked: they must be >= 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, TypeVar

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
    #: Whether the owner of a position depends on its page (:class:`RotatedLayout`).
    is_rotated: ClassVar[bool] = False

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

    @property
    def plain(self) -> DcpLayout:
        """The same blocks without rotation."""
        return self

    def rotated(self, page_size: int) -> RotatedLayout:
        """The same blocks, each virtual page of :meth:`virtual_page_size` slots beginning at a rank of its own."""
        rows = self.rows_per_virtual_page(page_size)
        return RotatedLayout(self.dcp_size, self.block_size, page_rows=rows)

    def check_rank(self, rank: Any) -> None:
        """Raise ValueError for a rank outside the group (values inside tensors are not read)."""
        _check_index("rank", rank)
        if isinstance(rank, (int, np.integer)) and rank >= self.dcp_size:
            raise ValueError(f"rank must be below dcp_size={self.dcp_size}, got {rank}")

    def _check_share(self, rank: Any) -> None:
        """Before a rank's share of positions is told from the rank alone."""
        self.check_rank(rank)

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
        self._check_share(rank)
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
        self._check_share(rank)
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
        self._check_share(rank)
        if self.dcp_size == 1:
            n = int(length > 0)
            return OwnedIntervals(*(np.full(n, x, np.int64) for x in (start, start, length)))
        rows, n_rows = self._blocks(self.local_len(start, rank), self.local_len(start + length, rank))
        return OwnedIntervals(self.position(rows, rank), rows, n_rows)

    def owned_in_pages(self, start: int, length: int, rank: int, pages: np.ndarray, first: int) -> OwnedIntervals:
        """:meth:`owned_intervals` of a request whose virtual pages from position ``first`` on are ``pages``.

        Args:
            pages: (n,) int page ids, as many as [start, start + length) needs. Read under rotation only.
            first: a whole number of virtual pages, at most ``start``.
        """
        return self.owned_intervals(start, length, rank)

    def _blocks(self, first_row: int, last_row: int) -> tuple[np.ndarray, np.ndarray]:
        """First row and length of each block, or part of one, in rows [first_row, last_row) of a rank."""
        if first_row == last_row:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        # Blocks of a rank are numbered k = 0, 1, ...; block k begins at row k * B.
        blocks = np.arange(first_row // self.block_size, (last_row - 1) // self.block_size + 1, dtype=np.int64)
        rows = np.maximum(blocks * self.block_size, first_row)
        return rows, np.minimum((blocks + 1) * self.block_size, last_row) - rows

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


@dataclass(frozen=True)
class RotatedLayout(DcpLayout):
    """Block round-robin in which each virtual page is dealt out from another rank on, which the page's id gives.

    Every request that begins at position 0 would otherwise put its first block on rank 0. V = P * ``page_rows`` slots
    make a virtual page, g = slot // V is its id, and rank r's *turn* in it is the rank whose part of the page it would
    hold without rotation:

        shift(g) = (g + g // P) % P        owner(slot) = (slot // B + shift(g)) % P        turn = (r - shift(g)) % P

    Rows stay as they are (:meth:`local_index`), and all ranks have the same rows of a full page, so only the last page
    of a request is uneven: ``plain.local_len(N, turn(r, slot of position N - 1))`` is its length on rank r. A function
    of the slot alone: whoever shares a page agrees on its owners. g // P keeps requests of a multiple of P pages each,
    one after another in an unused pool, from ending in pages of one shift.

    What :class:`DcpLayout` tells from a position and a rank raises TypeError here. Ask :attr:`plain` with a turn.

    Args:
        page_rows: rows of a virtual page on each rank, a multiple of B (:meth:`DcpLayout.rotated` makes it).

    Raises:
        ValueError: page_rows is not a multiple of B that is >= 1; later, a page size is asked for that makes another.
    """

    page_rows: int = field(kw_only=True)
    is_rotated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_index("page_rows", self.page_rows, 1)
        if self.page_rows % self.block_size:
            raise ValueError(f"page_rows must be a multiple of block_size={self.block_size}, got {self.page_rows}")

    @property
    def plain(self) -> DcpLayout:
        return DcpLayout(self.dcp_size, self.block_size)

    @property
    def page_slots(self) -> int:
        """V, the slots of a virtual page."""
        return self.page_rows * self.dcp_size

    def _check_share(self, rank: Any) -> None:
        raise TypeError(f"{self} tells a rank's share of a request only with its pages: ask plain with the rank's turn")

    def rows_per_virtual_page(self, page_size: int) -> int:
        rows = super().rows_per_virtual_page(page_size)
        if rows != self.page_rows:
            raise ValueError(f"{self} rotates pages of {self.page_rows} rows, but page size {page_size} makes {rows}")
        return rows

    def shift(self, page: IntLike) -> IntLike:
        """Rank at which a virtual page begins: (g + g // P) % P."""
        _check_index("page", page)
        return (page + page // self.dcp_size) % self.dcp_size

    def turn(self, rank: Any, slot: IntLike) -> IntLike:
        """The rank whose part of ``slot``'s page ``rank`` would hold without rotation: (r - shift(g)) % P."""
        _check_index("slot", slot)
        return self._turn_in(rank, slot // self.page_slots)

    def _turn_in(self, rank: Any, page: IntLike) -> IntLike:
        self.check_rank(rank)
        return (rank + self.dcp_size - self.shift(page)) % self.dcp_size

    def owner(self, slot: IntLike) -> IntLike:
        """Rank that holds a widened slot id: (v // B + shift(g)) % P. A position has no owner without its page."""
        _check_index("slot", slot)
        return (slot // self.block_size + self.shift(slot // self.page_slots)) % self.dcp_size

    def owned_in_pages(self, start: int, length: int, rank: int, pages: np.ndarray, first: int) -> OwnedIntervals:
        _check_index("start", start)
        _check_index("length", length)
        if length == 0:
            return OwnedIntervals(*(np.empty(0, np.int64) for _ in range(3)))
        turns = self._turn_in(rank, np.asarray(pages, np.int64))
        of_start, of_last = (turns[(t - first) // self.page_slots] for t in (start, start + length - 1))
        # At the end of a page all ranks have the same rows, so the turn in the last token's page serves for the end.
        rows, n_rows = self._blocks(
            int(self.plain.local_len(start, of_start)), int(self.plain.local_len(start + length, of_last))
        )
        turn = turns[rows // self.page_rows - first // self.page_slots]
        return OwnedIntervals(self.plain.position(rows, turn), rows, n_rows)
