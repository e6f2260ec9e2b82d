"""Grouped-query models on the Triton backend: DCP engines with blocks against an engine without DCP.

As in test_matrix.py: tokens, logprobs, and each rank's rows of K and V, for every request as it ended and for the whole
pool after each round. What differs: a DCP group holds one KV head of the model, so with two heads each of two groups is
judged against its own head of the reference. The stock cases run without the plugin; they show on which shapes SGLang's
own path is right, and that it is wrong, without an error, on those that a block layout is refused with.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from test_matrix import CROWD, FEW_SPLITS, LOGPROB_TOLERANCE, Scenario, _retracted_and_evicted, _small_pool, prompt

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.plugin import HOOKS
from sglang_dcp_block.server_args import TESTED_GQA_ARCHITECTURES
from sglang_dcp_block.testing.audit import Reference, audit_pools, audit_requests, load_pools, load_requests
from sglang_dcp_block.testing.cpu_testbed import SABOTAGE_VARIABLE
from sglang_dcp_block.testing.engine import CaseResult, EngineSpec, Round, differences
from sglang_dcp_block.testing.tiny_model import TinyGqa

LLAMA, QWEN2, QWEN3 = TESTED_GQA_ARCHITECTURES
HOOKED = {h.target for h in HOOKS if h.scope == "gqa"} | {
    "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._dcp_kv_indices",
    "sglang.srt.layers.dcp.layout:get_dcp_lens",
}


def gqa(size: int, block: int | None, architecture: str = LLAMA, **more) -> EngineSpec:
    defaults = {"tp": size, "page": block or 16, "extra": FEW_SPLITS}
    return EngineSpec(dcp=size, block=block, architecture=architecture, **{**defaults, **more})


def reference_of(spec: EngineSpec) -> EngineSpec:
    """Without DCP and without the plugin, on the same backend."""
    return EngineSpec(
        architecture=spec.architecture, heads=spec.heads, kv_heads=spec.kv_heads, context=spec.context, extra=FEW_SPLITS
    )


def edges(size: int, block: int) -> list[int]:
    """1 and both sides of each edge of the first block, the first cycle and the block after it."""
    cycle = size * block
    return sorted({1, *(edge + d for edge in (block, cycle, cycle + block) for d in (-1, 0, 1))})


def workload(size: int, block: int) -> list[Round]:
    """Prompts of every length at an edge, decode over an edge; prefixes cached to every edge, a hit of nearly all."""
    cycle = size * block
    base = prompt(3 * cycle + 5)
    cuts = [cut for cut in edges(size, block) if cut > 1]
    return [
        Round([prompt(n) for n in edges(size, block)] + [base], 3, "lengths"),
        Round([prompt(cycle - 2, seed=1)], block + 4, "over edges"),
        Round([*(base[:cut] + prompt(5, seed=cut) for cut in cuts), base[:-1]], 3, "cached"),
    ]


#: One request of several chunks and a cached prefix: what every architecture and shape passes.
SHORT = [
    Round([prompt(75), prompt(17)], 3, "fill"),
    Round([prompt(75)[:70] + [7] * 9, prompt(33, seed=1)], 3, "extend"),
]
EVEN = [Round([prompt(63), prompt(31, seed=5)], 2, "even")]

SCENARIOS = [
    # Chunks of 48 tokens end in mid-cycle, and a chunk of 16 of the first cycle leaves rank 1's prefix empty.
    Scenario("llama-2", gqa(2, 16, chunked=48), workload(2, 16)),
    Scenario("qwen3-2-groups", gqa(2, 16, QWEN3, tp=4, kv_heads=2, chunked=16), SHORT),
    Scenario("qwen2-2", gqa(2, 16, QWEN2, chunked=16), SHORT, slow=True),
    Scenario("qwen3-2", gqa(2, 16, QWEN3, chunked=48), workload(2, 16), slow=True),
    Scenario("llama-2-one-chunk", gqa(2, 16), workload(2, 16), slow=True),
    Scenario("llama-2-block-64", gqa(2, 64, chunked=64), workload(2, 64), slow=True),
    Scenario("llama-4", gqa(4, 16, chunked=16), workload(4, 16), slow=True),
    Scenario("llama-4-block-64", gqa(4, 64, chunked=64), workload(4, 64), slow=True),
    Scenario("llama-2-page-larger", gqa(2, 4, page=16, chunked=48), workload(2, 16), slow=True),
    Scenario("llama-2-block-larger", gqa(2, 32, page=16, chunked=32), workload(2, 32), slow=True),
    Scenario("evict", gqa(2, 16, **_small_pool(144)), CROWD, _retracted_and_evicted, slow=True),
    # SGLang's own layout, without the plugin.
    Scenario("stock-2", gqa(2, None, chunked=48), workload(2, 16), slow=True),
    Scenario("stock-4", gqa(4, None), SHORT, slow=True),
    Scenario("stock-2-groups", gqa(2, None, QWEN3, tp=4, kv_heads=2, chunked=16), SHORT, slow=True),
]


class Group(NamedTuple):
    """One DCP group of an engine: its TP ranks and the columns of a reference row that it holds."""

    ranks: range
    columns: slice


def groups(spec: EngineSpec) -> list[Group]:
    sharing = spec.tp // spec.kv_heads  # ranks that hold one head
    width = TinyGqa.head_dim
    return [
        Group(range(first, first + spec.dcp), slice(first // sharing * width, (first // sharing + 1) * width))
        for first in range(0, spec.tp, spec.dcp)
    ]


def check_rows(result: CaseResult, spec: EngineSpec, expected: CaseResult) -> None:
    """Every rank's rows of K and V, of each request and of the pool after each round."""
    layout, wrong = DcpLayout(spec.dcp, spec.block or 1), DcpLayout(spec.dcp, 1 if spec.block else 16)
    for group in groups(spec):
        rows = Reference(load_requests(expected.audit), group.columns)
        requests = load_requests(result.audit, group.ranks)
        finished = sum(r.finished and r.dcp_rank == 0 for r in requests)
        assert finished >= sum(map(len, result.answers)), "a request left no record"
        assert (report := audit_requests(layout, requests, rows)).ok, (group, str(report))
        assert not audit_requests(wrong, requests, rows).ok, "the audit accepts a wrong layout"
        for number in range(len(result.answers)):
            pools = load_pools(result.audit, f"{number:02d}", group.ranks)
            assert (report := audit_pools(layout, pools, rows)).ok, (group, str(report))


def check_calls(result: CaseResult) -> None:
    """Each hook ran on every rank, equally often."""
    counts = [record.call_counts for record in load_pools(result.audit, f"{len(result.answers) - 1:02d}")]
    for target in HOOKED:
        assert len({c.get(target, 0) for c in counts}) == 1 and counts[0].get(target), (target, counts)


def _parameters(scenarios: list[Scenario]) -> list:
    return [pytest.param(s, id=s.name, marks=[pytest.mark.slow] * s.slow) for s in scenarios]


@pytest.mark.parametrize("scenario", _parameters(SCENARIOS))
def test_gqa(scenario: Scenario, run_engine, reference) -> None:
    spec = scenario.spec
    expected, _ = reference(scenario.rounds, reference_of(spec))
    result = run_engine(spec, scenario.rounds)
    for number, (answers, wanted) in enumerate(zip(result.answers, expected.answers, strict=True)):
        assert not (found := differences(answers, wanted, LOGPROB_TOLERANCE)), (f"round {number}", found)
    check_rows(result, spec, expected)
    page = DcpLayout(spec.dcp, spec.block or 1).virtual_page_size(spec.page)
    for got, want in zip(result.answers[-1], expected.answers[-1], strict=True):
        assert got.cached == want.cached // page * page or got.retracted or scenario.name == "evict"
    if spec.block:
        check_calls(result)
    assert scenario.holds(result), result.answers


def test_every_tested_architecture_and_a_group_with_its_own_head_are_in_a_scenario() -> None:
    mine = [s.spec for s in SCENARIOS if s.spec.block]
    assert {spec.architecture for spec in mine} == set(TESTED_GQA_ARCHITECTURES)
    assert any(len(groups(spec)) > 1 and spec.kv_heads > 1 for spec in mine)


@pytest.mark.parametrize(
    ("fault", "tokens_show_it"),
    [
        ("mirrored-ranks", False),
        pytest.param("swapped-rows", False, marks=pytest.mark.slow),
        pytest.param("dropped-row", True, marks=pytest.mark.slow),
    ],
)
def test_a_wrong_owner_or_row_is_noticed(fault: str, tokens_show_it: bool, run_engine, reference) -> None:
    spec = gqa(2, 16, env={SABOTAGE_VARIABLE: fault})
    expected, _ = reference(EVEN, reference_of(spec))
    result = run_engine(spec, EVEN)
    assert bool(differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)) == tokens_show_it
    with pytest.raises(AssertionError, match="wrong, largest difference"):
        check_rows(result, spec, expected)


@pytest.mark.slow
def test_stock_answers_wrongly_where_the_ranks_of_a_group_hold_other_heads(run_engine, reference) -> None:
    """Two KV heads on two ranks: without the flag SGLang starts, and its answers are wrong. With blocks: refused."""
    spec = gqa(2, None, kv_heads=2)
    expected, _ = reference(SHORT, reference_of(spec))
    result = run_engine(spec, SHORT)
    assert len(differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)) == 2
