"""The MLA decode kernel under Triton's interpreter, against attention in float64: pieces, empty requests, strides."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dcp_block.attention import mla_decode as module
from sglang_dcp_block.attention.mla_decode import mla_decode

DIM, ROPE = 64, 16
SCALE = 0.11


class Inputs:
    def __init__(self, lens: list[int], heads: int, splits: int = 6, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.lens, n = lens, len(lens)
        self.kv = torch.randn(400, 1, DIM + ROPE, generator=gen)
        self.rows = torch.randperm(399, generator=gen)[: sum(lens)] + 1
        self.kv[0] = math.nan  # what an index outside the runs would read
        self.indptr = torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32)
        self.q = torch.randn(n, heads, DIM + ROPE, generator=gen) * 2
        self.partial_out = torch.full((n, heads, splits, DIM), math.nan)
        self.partial_lse = torch.full((n, heads, splits), math.nan)
        self.out = torch.full((n, heads, DIM), math.nan)
        self.lse = torch.full((n, heads), math.nan)

    def run(self) -> None:
        mla_decode(
            self.q[..., :DIM], self.q[..., DIM:], self.kv, self.indptr, self.rows, SCALE,
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


@pytest.mark.parametrize("heads", [4, 16, 24, 40])
@pytest.mark.parametrize(
    "lens",
    [[1], [150], [0], [31, 32, 33], [0, 1, 64, 0, 65], [200, 1, 1, 1], [5, 0, 90]],
    ids=lambda lens: "-".join(map(str, lens)),
)
def test_equals_float64(lens: list[int], heads: int) -> None:
    inputs = Inputs(lens, heads)
    inputs.run()
    out, lse = inputs.expected()
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_a_row_read_from_elsewhere_is_noticed() -> None:
    inputs = Inputs([40, 70], 16)
    out, _ = inputs.expected()
    inputs.rows[50] = inputs.rows[3]
    inputs.run()
    assert (inputs.out.double() - out).abs().max() > 1e-3


@pytest.mark.parametrize("processors", [1, 4, 132])
def test_any_number_of_pieces_gives_the_same(processors: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "_multiprocessors", lambda device: processors)
    inputs = Inputs([230, 3, 0, 100], 16, splits=300)
    inputs.run()
    out, lse = inputs.expected()
    torch.testing.assert_close(inputs.out.double(), out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(inputs.lse.double(), lse, rtol=1e-5, atol=1e-5)


def test_scratch_too_small_is_refused() -> None:
    inputs = Inputs([40, 70], 16)
    inputs.partial_out = inputs.partial_out[:, :1]
    with pytest.raises(ValueError, match="partial_out must be contiguous with at least"):
        inputs.run()
