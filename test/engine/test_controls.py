"""Layouts broken on purpose must not pass. Each fault runs in a real engine; see testing/sabotage.py.

Two of the faults answer with the right tokens: the audit alone sees them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_matrix import LOGPROB_TOLERANCE, dcp, prompt

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import audit_requests, load_pools, load_requests
from sglang_dcp_block.testing.cpu_testbed import SABOTAGE_VARIABLE
from sglang_dcp_block.testing.engine import EngineSpec, Round, differences
from sglang_dcp_block.testing.flashinfer_torch import EMPTY_SHARD_VARIABLE
from sglang_dcp_block.testing.sabotage import FAULTS

# Even lengths and whole blocks, the last token included: nothing to see from outside.
EVEN = [Round([prompt(63), prompt(31, seed=5)], 2, "even")]
SHORT = [Round([prompt(1), prompt(20)], 4, "short")]
GARBAGE = {EMPTY_SHARD_VARIABLE: "garbage"}


def _sabotaged(fault: str, backend: str = "flashinfer", **env: str) -> EngineSpec:
    return dcp(2, 16, backend, env={SABOTAGE_VARIABLE: fault, **env})


@pytest.mark.parametrize(("fault", "tokens_show_it"), [("mirrored-ranks", False), ("swapped-rows", False)])
def test_only_the_audit_sees_it(fault: str, tokens_show_it: bool, run_engine, reference) -> None:
    expected, rows = reference(EVEN)
    result = run_engine(_sabotaged(fault), EVEN)
    assert bool(differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)) == tokens_show_it
    report = audit_requests(DcpLayout(2, 16), load_requests(result.audit), rows)
    assert not report.ok
    assert report.mismatches > 0, str(report)


def test_a_dropped_row_shows(run_engine, reference) -> None:
    """NaN pools: a row that was never written can't be hidden by an earlier request's right one."""
    expected, rows = reference(EVEN)
    result = run_engine(_sabotaged("dropped-row"), EVEN)
    assert differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)
    report = audit_requests(DcpLayout(2, 16), load_requests(result.audit), rows)
    assert "was never written" in str(report)


def test_the_guard_keeps_garbage_of_empty_shards_out(run_engine, reference) -> None:
    expected, _ = reference(SHORT)
    result = run_engine(dcp(2, 16, "flashinfer", env=GARBAGE), SHORT)
    assert not differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(_sabotaged("unguarded-merge", **GARBAGE), id="plugin"),
        pytest.param(EngineSpec(tp=4, dcp=4, backend="flashinfer", comm="a2a", env=GARBAGE), id="stock"),
    ],
)
def test_a_merge_without_the_guard_shows(spec: EngineSpec, run_engine, reference) -> None:
    expected, _ = reference(SHORT)
    result = run_engine(spec, SHORT)
    assert differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)


MERGES = {
    "a2a": "sglang.kernels.ops.attention.dcp_kernels:dcp_lse_combine_triton",
    "ag_rs": "sglang.srt.layers.dcp.comm:cp_lse_ag_out_rs_mla",
}
PLAN = "sglang.srt.layers.attention.flashinfer_mla_backend:FlashInferMLAIndicesUpdaterDecode.call_begin_forward"


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("comm", ["a2a", "ag_rs"])
def test_float16_partials_reach_the_layer_in_the_models_dtype(comm: str, backend: str, run_engine, reference) -> None:
    """No more than rounding: an engine's way from bfloat16 through our merge, which float32 tests don't take."""
    rounds = [Round([prompt(n) for n in (1, 33, 70)], 5, "float16")]
    expected, _ = reference(rounds)
    result = run_engine(replace(_sabotaged("float16-partials", backend), comm=comm), rounds)
    calls = load_pools(result.audit)[-1].call_counts
    assert calls[MERGES[comm]] and (PLAN in calls) == (backend == "flashinfer")
    assert not differences(result.answers[0], expected.answers[0], 5e-3)
    assert differences(result.answers[0], expected.answers[0], 1e-4), "nothing was rounded to float16"


@pytest.mark.slow
def test_rows_that_are_written_without_rotation_show(run_engine, reference) -> None:
    rounds = [Round([prompt(9), prompt(12), prompt(70)], 3, "rotated")]
    expected, rows = reference(rounds)
    spec = replace(_sabotaged("unrotated-writes", "triton"), rotate=True)
    result = run_engine(spec, rounds)
    assert differences(result.answers[0], expected.answers[0], LOGPROB_TOLERANCE)
    assert audit_requests(spec.layout, load_requests(result.audit), rows).mismatches


def test_every_fault_is_tried() -> None:
    """Here, and the last four in test_accuracy.py, test_hicache.py (two) and test_fp8.py."""
    here = {"mirrored-ranks", "swapped-rows", "dropped-row", "unguarded-merge", "unrotated-writes", "float16-partials"}
    assert set(FAULTS) == here | {"lost-rows", "blind-store", "pages-astray", "half-scale"}
