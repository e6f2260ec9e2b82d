"""The judge itself: right pools pass, and each way of being wrong fails. Pools are simulated token by token, without
the layout module; only the judge uses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import (
    PoolRecord,
    Reference,
    RequestRecord,
    audit_pools,
    audit_requests,
    one_fp8_step,
)

LAYERS, WIDTH = 2, 3


def kv_row(tokens: list[int], position: int) -> np.ndarray:
    """Stands for a model: depends on every token up to ``position``. (LAYERS, WIDTH)"""
    seed = hash(tuple(tokens[: position + 1])) % 2**32
    return np.random.default_rng(seed).normal(size=(LAYERS, WIDTH)).astype(np.float32)


class Engine:
    """DCP-P pools of ``pages`` virtual pages; ``place(slot)`` says which rank and row a slot gets."""

    def __init__(self, dcp: int, block: int, page: int, pages: int = 60) -> None:
        self.dcp, self.block, self.page_rows = dcp, block, page
        self.pools = np.full((dcp, LAYERS, pages * page, WIDTH), np.nan, np.float32)
        self.free = list(range(pages - 1, 0, -1))
        self.requests: list[tuple[list[int], list[int]]] = []

    def place(self, slot: int) -> tuple[int, int]:
        """Deal blocks out like cards."""
        block, offset = divmod(slot, self.block)
        turn, rank = divmod(block, self.dcp)
        return rank, turn * self.block + offset

    def serve(self, tokens: list[int]) -> None:
        page_slots = self.page_rows * self.dcp
        slots: list[int] = []
        while len(slots) < len(tokens):
            first = self.free.pop() * page_slots
            slots += range(first, first + page_slots)
        slots = slots[: len(tokens)]
        for position, slot in enumerate(slots):
            rank, row = self.place(slot)
            self.pools[rank, :, row] = kv_row(tokens, position)
        self.requests.append((tokens, slots))

    def request_records(self) -> list[RequestRecord]:
        page_slots = self.page_rows * self.dcp
        records = []
        for rank in range(self.dcp):
            for number, (tokens, slots) in enumerate(self.requests):
                pages = sorted({s // page_slots for s in slots})
                rows = [r for p in pages for r in range(p * self.page_rows, (p + 1) * self.page_rows)]
                records.append(
                    RequestRecord(
                        f"request-{number}", True, np.array(tokens), np.array(slots), np.array(pages),
                        self.pools[rank][:, rows], self.dcp, rank, page_slots, self.page_rows,
                    )
                )  # fmt: skip
        return records

    def pool_records(self) -> list[PoolRecord]:
        return [
            PoolRecord(
                self.pools[rank], np.array(self.free), self.requests, {}, self.dcp, rank,
                self.page_rows * self.dcp, self.page_rows,
            )
            for rank in range(self.dcp)
        ]  # fmt: skip


PROMPTS = [[5], [1, 2, 3], list(range(40)), [*range(20), *range(50, 63)], [9] * 8]


def served(dcp: int, block: int, page: int, kind: type[Engine] = Engine) -> Engine:
    engine = kind(dcp, block, page)
    for prompt in PROMPTS:
        engine.serve(prompt)
    return engine


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(served(1, 1, 4).request_records())


CELLS = [(2, 1, 4), (2, 4, 4), (4, 2, 4), (4, 4, 8), (8, 8, 8)]


@pytest.mark.parametrize(("dcp", "block", "page"), CELLS)
def test_right_pools_pass(reference: Reference, dcp: int, block: int, page: int) -> None:
    engine = served(dcp, block, page)
    layout = DcpLayout(dcp, block)
    requests = audit_requests(layout, engine.request_records(), reference)
    pools = audit_pools(layout, engine.pool_records(), reference)
    assert requests.ok, str(requests)
    assert pools.ok, str(pools)
    assert requests.compared == pools.compared == sum(map(len, PROMPTS))
    assert requests.uncovered == 0


class WrongRank(Engine):
    def place(self, slot: int) -> tuple[int, int]:
        rank, row = super().place(slot)
        return rank ^ 1, row


class WrongRow(Engine):
    """Two neighbouring rows of a block swapped."""

    def place(self, slot: int) -> tuple[int, int]:
        rank, row = super().place(slot)
        return rank, row ^ 1


class SwappedBlocks(Engine):
    """Blocks of every second cycle dealt in reverse order of ranks."""

    def place(self, slot: int) -> tuple[int, int]:
        rank, row = super().place(slot)
        return (self.dcp - 1 - rank if row // self.block % 2 else rank), row


class TokenRoundRobin(Engine):
    def place(self, slot: int) -> tuple[int, int]:
        return slot % self.dcp, slot // self.dcp


class EverywhereWritten(Engine):
    """The owner is right, and another rank writes the row too."""

    def serve(self, tokens: list[int]) -> None:
        super().serve(tokens)
        rank, row = self.place(self.requests[-1][1][0])
        self.pools[rank - 1, :, row + 1] = 0.0


class LastRowMissing(Engine):
    def serve(self, tokens: list[int]) -> None:
        super().serve(tokens)
        rank, row = self.place(self.requests[-1][1][-1])
        self.pools[rank, :, row] = np.nan


WRONG = [WrongRank, WrongRow, SwappedBlocks, TokenRoundRobin, LastRowMissing]


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_pools_fail(reference: Reference, kind: type[Engine]) -> None:
    engine = served(4, 4, 8, kind)
    layout = DcpLayout(4, 4)
    for report in (
        audit_requests(layout, engine.request_records(), reference),
        audit_pools(layout, engine.pool_records(), reference),
    ):
        assert not report.ok
        assert report.mismatches > 0, str(report)
        assert report.complaints


def test_a_row_written_by_a_rank_that_does_not_own_it_fails(reference: Reference) -> None:
    engine = EverywhereWritten(2, 4, 8)
    engine.serve([1, 2, 3])  # rank 1 owns nothing of it
    report = audit_requests(DcpLayout(2, 4), engine.request_records(), reference)
    assert (report.mismatches, report.written) == (0, 1)
    assert not report.ok


def test_a_written_free_page_fails(reference: Reference) -> None:
    engine = served(2, 4, 4)
    engine.pools[1, 0, engine.free[0] * engine.page_rows] = 1.0
    report = audit_pools(DcpLayout(2, 4), engine.pool_records(), reference)
    assert (report.mismatches, report.written) == (0, 1)


def test_page_0_may_be_written(reference: Reference) -> None:
    engine = served(2, 4, 4)
    engine.pools[:, :, 0] = 1.0
    assert audit_pools(DcpLayout(2, 4), engine.pool_records(), reference).ok


def test_a_leaked_page_fails(reference: Reference) -> None:
    engine = served(2, 4, 4)
    engine.free.pop()
    report = audit_pools(DcpLayout(2, 4), engine.pool_records(), reference)
    assert not report.ok
    assert "in use by nobody" in str(report)


def test_the_wrong_block_size_fails_at_even_lengths_too(reference: Reference) -> None:
    engine = Engine(2, 1, 4)
    engine.serve(list(range(40)))
    for block in (2, 4):
        assert not audit_requests(DcpLayout(2, block), engine.request_records(), reference).ok


def test_tokens_that_part_from_the_reference_are_uncovered(reference: Reference) -> None:
    engine = Engine(2, 4, 4)
    engine.serve([*range(10), 77, 78])
    report = audit_requests(DcpLayout(2, 4), engine.request_records(), reference)
    assert (report.compared, report.uncovered, report.mismatches) == (10, 2, 0)
    assert not report.ok


def test_a_missing_rank_and_a_wrong_size_are_errors(reference: Reference) -> None:
    records = served(2, 4, 4).request_records()
    with pytest.raises(ValueError, match="some rank left none"):
        audit_requests(DcpLayout(2, 4), [r for r in records if r.dcp_rank == 0], reference)
    with pytest.raises(ValueError, match="dcp_size"):
        audit_requests(DcpLayout(4, 4), records, reference)
    with pytest.raises(ValueError, match="DCP1"):
        Reference(records)


def test_a_reference_with_an_unwritten_row_is_an_error() -> None:
    engine = served(1, 1, 4, LastRowMissing)
    with pytest.raises(ValueError, match="unwritten"):
        Reference(engine.request_records())


def test_one_fp8_step_reaches_both_neighbours_and_no_further_up() -> None:
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # 0 to 448, ascending
    step = one_fp8_step(values)
    assert (np.diff(values) <= step[:-1]).all() and (np.diff(values) <= step[1:]).all()
    assert (values[2:] - values[:-2] > step[:-2]).all()


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, 0), (1.1, 0), (1.3, 1), (float("nan"), 1)])
def test_a_tolerance_by_value(reference: Reference, factor: float, wrong: int) -> None:
    engine = served(2, 4, 4)
    records = engine.request_records()
    rank, row = engine.place(engine.requests[2][1][9])
    index = np.searchsorted(records[2].pages, row // 4) * 4 + row % 4
    record = records[rank * len(PROMPTS) + 2]
    record.rows[1, index, 0] *= factor
    report = audit_requests(DcpLayout(2, 4), records, reference, one_fp8_step)
    assert report.mismatches == wrong and (report.ok is not bool(wrong)), str(report)
