"""The MLA decode kernel under Triton's interpreter, against attention in float64: pieces, empty requests, strides."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_dcp_block.attention import mla_decode as mla_decode_module
from sglang_dcp_block.attention import triton_mla
from sglang_dcp_block.attention.mla_decode import PIECE_ROWS, mla_decode, plan_pieces
from sglang_dcp_block.dcp.layout import DcpLayout

DIM, ROPE = 64, 16
SCALE = 0.11


class Inputs:
    def __init__(self, lens: list[int], heads: int, workers: int = 4, splits: int = 6, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.lens, n = lens, len(lens)
        self.workers, self.slots = workers, n * splits
        self.kv = torch.randn(2400, 1, DIM + ROPE, generator=gen)
        self.rows = torch.randperm(2399, generator=gen)[: sum(lens)] + 1
        self.kv[0] = math.nan  # what an index outside the runs would read
        self.indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
        self.q = torch.randn(n, heads, DIM + ROPE, generator=gen) * 2
        self.partial_out = torch.full((n, heads, splits, DIM), math.nan)
        self.partial_lse = torch.full((n, heads, splits), math.nan)
        self.out = torch.full((n, heads, DIM), math.nan)
        self.lse = torch.full((n, heads), math.nan)

    def run(self) -> None:
        mla_decode(
            self.q[..., :DIM], self.q[..., DIM:], self.kv, self.rows,
            plan_pieces(self.indptr, self.workers, self.slots), SCALE,
            self.partial_out, self.partial_lse, self.out, self.lse,
        )  # fmt: skip

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        outs, lses = [], []
        for i, n in enumerate(self.lens):
            rows = self.kv[self.rows[self.indptr[i] : self.indptr[i + 1]].long(), 0].double()
            scores = self.q[i].double() @ rows.T * SCALE
            lses.append(scores.logsumexp(-1) if n else torch.full((self.q.shape[1],), -math.inf).double())
            outs.append(scores.softmax(-1) @ rows[:, :DIM] if n else torch.zeros(self.q.shape[1], DIM).double())
        return torch.stack(outs), torch.stack(lses)


@pytest.mark.parametrize("heads", [4, 24, 40])
@pytest.mark.parametrize(
    "lens",
    [[1], [150], [0], [31, 32, 33], [0, 1, 64, 0, 65], [200, 1, 1, 1], [5, 0, 90], [1500, 0, 3, 700]],
    ids=lambda lens: "-".join(map(str, lens)),
)
def test_equals_float64(lens: list[int], heads: int) -> None:
    inputs = Inputs(lens, heads)
    inputs.run()
    out, lse = inputs.expected()
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_fp8_rows_are_widened_in_the_kernel() -> None:
    """Neither queries nor weights are rounded to FP8; the control is what rounding the queries alone does."""
    inputs = Inputs([31, 200, 0, 90], 24)
    inputs.kv = inputs.kv.to(torch.float8_e4m3fn)
    out, lse = inputs.expected()
    inputs.run()
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-5, atol=1e-5)
    inputs.q = inputs.q.to(torch.float8_e4m3fn).float()
    inputs.run()
    assert (inputs.out.double() - out).abs().max() > 1e-2


def test_a_row_read_from_elsewhere_is_noticed() -> None:
    inputs = Inputs([40, 70], 16)
    out, _ = inputs.expected()
    inputs.rows[50] = inputs.rows[3]
    inputs.run()
    assert (inputs.out.double() - out).abs().max() > 1e-3


@pytest.mark.parametrize("workers", [1, 3, 132])
@pytest.mark.parametrize("splits", [1, 300])
def test_any_number_of_pieces_gives_the_same(workers: int, splits: int) -> None:
    inputs = Inputs([1800, 3, 0, 500], 16, workers=workers, splits=splits)
    many = int(plan_pieces(inputs.indptr, workers, inputs.slots).counts[0]) > 8
    assert many == (workers == 132 and splits == 300)
    inputs.run()
    out, lse = inputs.expected()
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_a_piece_left_out_is_noticed() -> None:
    inputs = Inputs([1300, 900], 16, workers=8)
    out, _ = inputs.expected()
    plan = plan_pieces(inputs.indptr, inputs.workers, inputs.slots)
    assert plan.joins[0, 2] > 1
    plan.counts[0] -= 1
    with mock.patch(f"{__name__}.plan_pieces", return_value=plan):
        inputs.run()
    assert not (inputs.out.double() - out).abs().max() < 1e-3


def test_scratch_too_small_is_refused() -> None:
    inputs = Inputs([40, 70], 16)
    inputs.partial_out = inputs.partial_out[:, :1]
    with pytest.raises(ValueError, match="partial_out must be contiguous with at least"):
        inputs.run()


def test_another_batchs_plan_is_refused() -> None:
    inputs = Inputs([40, 70], 16)
    inputs.indptr = inputs.indptr[:2]
    with pytest.raises(ValueError, match="the plan is for 1 requests, but out has 2"):
        inputs.run()


def pieces(lens: list[int], workers: int, slots: int = 1 << 20) -> list[tuple[int, int, int, int]]:
    """(request, low, high, slot) of every piece of a plan, checked to cover each row once."""
    starts = [0, *itertools.accumulate(lens)]
    plan = plan_pieces(torch.tensor(starts, dtype=torch.int32), workers, slots)
    count, joined = plan.counts.tolist()
    found = [tuple(piece) for piece in plan.work[:count].tolist()]
    joins = {request: (slot, pieces) for request, slot, pieces, _ in plan.joins[:joined].tolist()}
    assert [row for _, low, high, _ in found for row in range(low, high)] == list(range(sum(lens)))
    used = []
    for i, (start, length) in enumerate(zip(starts, lens, strict=False)):
        mine = [piece for piece in found if piece[0] == i]
        slot, count = joins.pop(i, (0, 1))
        assert count == len(mine) and (count == 0) == (length == 0)
        assert all((low - start) % PIECE_ROWS == 0 for _, low, _, _ in mine)
        assert [p[3] for p in mine] == ([-1] if count == 1 else list(range(slot, slot + count)))
        used += [p[3] for p in mine if p[3] >= 0]
    assert not joins
    assert len(used) == len(set(used)) and all(slot < plan.slots for slot in used)
    return found


@pytest.mark.parametrize("workers", [1, 5, 66, 132])
@pytest.mark.parametrize(
    "lens", [[0], [1], [0, 700, 1, 64, 65, 0, 3000], [4000] * 8, [5000, 3] * 20, list(range(150))], ids=len
)
def test_pieces_cover_every_row_once(lens: list[int], workers: int) -> None:
    for slots in (1, 7, 1 << 20):
        pieces(lens, workers, slots)


@pytest.mark.parametrize(
    "requests, rows, workers, cut",
    [
        (64, 256, 132, False),  # 4 tiles each: two programs for one would save less than the join costs
        (8, 128, 66, False),
        (64, 512, 132, False),
        (64, 2048, 132, True),
        (8, 1024, 66, True),
        (1, 1024, 66, True),
    ],
)
def test_a_request_is_cut_where_it_pays(requests: int, rows: int, workers: int, cut: bool) -> None:
    """The first three are where an H200 took longer with the cut, or as long; the last three the controls."""
    assert (len(pieces([rows] * requests, workers)) > requests) == cut


@pytest.mark.parametrize("workers", [3, 66])
@pytest.mark.parametrize("lens", [[64] * 9, [6400, 64, 700], [2000] * 5, [40000] + [100] * 30], ids=str)
def test_no_way_to_cut_is_cheaper(lens: list[int], workers: int) -> None:
    """The plan against every size that its largest piece could have, by the costs that mla_decode.py states."""

    def cost(size: int) -> float:
        each = [-(-length // PIECE_ROWS // size) for length in lens]
        parts = sum(count for count in each if count > 1)
        work = -(-sum(each) // workers) * (size + 1.5)
        return work + (2.5 + 2.75 * parts / workers if parts else 0)

    most = max(-(-length // PIECE_ROWS) for length in lens)
    allowed = [n for n in range(1, most + 1) if sum(-(-length // PIECE_ROWS // n) for length in lens) <= 4 * workers]
    best = min(cost(size) for size in [*allowed, most])
    found = max(-(-(high - low) // PIECE_ROWS) for _, low, high, _ in pieces(lens, workers))
    # It tries 32 ways.
    assert best <= cost(found) <= 1.1 * best


@pytest.mark.parametrize(
    "requests, rows, workers, most",
    [
        (8, 32768, 132, 33),
        (8, 16384, 66, 33),
        (1, 131072, 132, 17),
        (64, 8192, 132, 65),
        (64, 4096, 66, 65),
        (48, 4096, 66, 54),
    ],
)
def test_the_last_program_is_done_early(requests: int, rows: int, workers: int, most: int) -> None:
    """Tiles that the busiest program has, its pieces taken in turns, and one for each piece."""
    busy = [0] * workers
    for i, (_, low, high, _) in enumerate(pieces([rows] * requests, workers)):
        busy[i % workers] += -(-(high - low) // PIECE_ROWS) + 1
    ideal = requests * rows // PIECE_ROWS / workers
    assert max(busy) <= most and max(busy) <= 1.2 * ideal + 1


def test_only_decode_steps_are_planned(monkeypatch) -> None:
    """Extend steps build indices too. SGLang sizes splits on decode steps alone, after their indices."""
    layout = DcpLayout(2, 4)
    monkeypatch.setattr(triton_mla, "active_layout", lambda: layout)
    monkeypatch.setattr(triton_mla, "active_rank", lambda: 0)
    backend = SimpleNamespace(
        use_mla=True, num_head=4, max_kv_splits=2, max_context_len=64, device="cpu",
        kv_indptr=torch.zeros(9, dtype=torch.int32), req_to_token=torch.arange(2 * 64, dtype=torch.int32).view(2, 64),
        token_to_kv_pool=SimpleNamespace(dtype=torch.float32),
    )  # fmt: skip
    monkeypatch.setattr(mla_decode_module, "_multiprocessors", lambda _device: 4)
    requests, lens = torch.tensor([0, 1]), torch.tensor([5, 30])
    sized = []

    def build() -> torch.Tensor:
        return triton_mla.shard_kv_indices(backend, requests, lens, backend.kv_indptr)[2]

    local = build()
    assert backend.dcp_block_plan is None
    triton_mla.plan_decode(lambda *args: sized.append(args), backend, "splits", local, "uneven")
    assert sized == [(backend, "splits", local, "uneven")]
    assert backend.dcp_block_plan.counts.tolist() == [2, 0]
    build()
    assert backend.dcp_block_plan is None, "the plan of another step was kept"
