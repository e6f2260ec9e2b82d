"""DCP engines against an engine without DCP: tokens, logprobs, and every KV row.

Each cell starts one engine and sends it all rounds of its workload. A cell passes when

- the greedy tokens are those of the DCP1 engine and the logprobs differ by at most LOGPROB_TOLERANCE (float32; two
  engines add in another order);
- the audit finds each rank's KV rows where the layout puts them, equal to the DCP1 engine's, and nothing written
  elsewhere, for every request as it ended and for the whole pool after each round;
- the same records fail the audit under another layout (the audit's own negative control).

The full product {flashinfer, triton} x P {2, 4} x B {1, 16, 64} x {ag_rs, a2a} is 24 cells. The 12 in which every
(backend, P, B), every (backend, merge), (P, merge) and (B, merge) pair occurs run always; the other 12 are marked slow.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import audit_pools, audit_requests, load_pools, load_requests
from sglang_dcp_block.testing.engine import CaseResult, EngineSpec, Round, differences

LOGPROB_TOLERANCE = 1e-3
PAGE = 64


class Cell(NamedTuple):
    backend: str
    dcp: int
    block: int
    comm: str
    slow: bool = False

    @property
    def spec(self) -> EngineSpec:
        extra = {"triton_attention_num_kv_splits": 2} if self.backend == "triton" else {}  # fewer interpreted programs
        return EngineSpec(
            tp=self.dcp, dcp=self.dcp, block=self.block, backend=self.backend, comm=self.comm, page=PAGE, extra=extra
        )


def _cells() -> list[Cell]:
    cells = []
    for backend in ("flashinfer", "triton"):
        for dcp in (2, 4):
            for number, block in enumerate((1, 16, 64)):
                for comm in ("ag_rs", "a2a"):
                    even = (number + dcp // 2 + (backend == "triton")) % 2 == 0
                    cells.append(Cell(backend, dcp, block, comm, slow=even != (comm == "a2a")))
    return cells


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens; unlike lengths share no prefix. 0 and 1 are BOS and EOS of the model."""
    generator = random.Random(f"{seed}/{length}")
    return [generator.randrange(2, 250) for _ in range(length)]


def lengths(dcp: int) -> list[int]:
    """1, B-1, B, B+1, P*B-1, P*B, P*B+1 for each B of the matrix, and a few hundred, odd and even."""
    edges = {1, 331, 420}
    for block in (16, 64):
        for edge in (block, dcp * block):
            edges |= {edge - 1, edge, edge + 1}
    return sorted(edges)


def workload(backend: str, dcp: int) -> list[Round]:
    """The rounds of every cell of a backend and P: the reference runs them once."""
    short = 2 if backend == "triton" else 6
    long = prompt(420)
    return [
        Round([prompt(n) for n in lengths(dcp)], short, "lengths"),
        # 110 tokens cross blocks of 64 and, from 200 on, cycles of 128 and 256
        Round([prompt(200, seed=1), prompt(37, seed=1)][: 1 if backend == "triton" else 2], 110, "long"),
        # cached prefixes: the whole prompt, all but one token, cuts in mid-block and mid-cycle, then new tokens
        Round(
            [prompt(331), long[:-1], *(long[:cut] + prompt(9, seed=cut) for cut in (70, 128, 150, 200, 300))],
            short,
            "cached",
        ),
    ]


def check(result: CaseResult, layout: DcpLayout, expected: CaseResult, rows) -> None:
    """Tokens, logprobs and rows of every round; raises AssertionError with what differs."""
    for number, (answers, wanted) in enumerate(zip(result.answers, expected.answers, strict=True)):
        assert not (found := differences(answers, wanted, LOGPROB_TOLERANCE)), (f"round {number}", found)
    requests, pools = load_requests(result.audit), load_pools(result.audit)
    finished = sum(r.finished and r.dcp_rank == 0 for r in requests)
    assert finished >= sum(map(len, result.answers)), "a request left no record"
    assert (report := audit_requests(layout, requests, rows)).ok, str(report)
    for number in range(len(result.answers)):
        after = load_pools(result.audit, f"{number:02d}")
        assert (report := audit_pools(layout, after, rows)).ok, str(report)
    other = DcpLayout(layout.dcp_size, 1 if layout.block_size > 1 else 16)
    assert not audit_requests(other, requests, rows).ok, "the audit accepts a wrong layout"
    assert not audit_pools(other, pools, rows).ok, "the audit accepts a wrong layout"


@pytest.mark.parametrize(
    "cell",
    [pytest.param(c, id="-".join(map(str, c[:4])), marks=[pytest.mark.slow] * c.slow) for c in _cells()],
)
def test_matrix(cell: Cell, run_engine, reference) -> None:
    rounds = workload(cell.backend, cell.dcp)
    expected, rows = reference(rounds)
    result = run_engine(cell.spec, rounds)
    check(result, DcpLayout(cell.dcp, cell.block), expected, rows)
    assert result.server["max_total_num_tokens"] == cell.dcp * cell.spec.max_total_tokens
    assert [a.cached for a in result.answers[2]] == [
        a.cached // (PAGE * cell.dcp) * PAGE * cell.dcp for a in expected.answers[2]
    ], "the radix cache must hit whole virtual pages"


def test_stock_round_robin(run_engine, reference) -> None:
    """Without our plugin: the test bed itself is right, and the audit knows token round-robin."""
    rounds = workload("flashinfer", 2)
    expected, rows = reference(rounds)
    result = run_engine(EngineSpec(tp=2, dcp=2, backend="flashinfer", comm="a2a", page=PAGE), rounds)
    check(result, DcpLayout(2, 1), expected, rows)


def test_two_references(run_engine, reference) -> None:
    """DCP1 through Triton's own kernels agrees with DCP1 through the FlashInfer stand-in, the reference."""
    rounds = [Round([prompt(n) for n in (1, 17, 64, 130)], 3, "lengths")]
    expected, rows = reference(rounds)
    result = run_engine(EngineSpec(backend="triton"), rounds)
    assert not differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)
    assert (report := audit_requests(DcpLayout(1), load_requests(result.audit), rows)).ok, str(report)
