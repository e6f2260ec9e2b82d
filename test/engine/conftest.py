"""Engine tests start real SGLang engines on the CPU test bed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_dcp_block.testing.audit import Reference, load_requests
from sglang_dcp_block.testing.engine import REFERENCE, Case, CaseResult, EngineSpec, Round, run

if TYPE_CHECKING:
    from sglang_dcp_block.testing.warm import WarmServer

Run = Callable[[EngineSpec, list[Round]], CaseResult]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def run_engine(warm: WarmServer, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Run:
    """Run rounds on an engine; progress goes past pytest's capture, because a session takes minutes."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def start(spec: EngineSpec, rounds: list[Round]) -> CaseResult:
        with capture.global_and_fixture_disabled():
            print(flush=True)
            return run(Case(spec, rounds), tmp_path_factory.mktemp(spec.name), warm=warm, timeout_s=900)

    return start


@pytest.fixture(scope="session")
def reference(run_engine: Run) -> Callable[..., tuple[CaseResult, Reference]]:
    """Answers and KV rows of a DCP1 engine for some rounds; each pair of both is run once per session."""
    known: dict[str, tuple[CaseResult, Reference]] = {}

    def of(rounds: list[Round], spec: EngineSpec = REFERENCE) -> tuple[CaseResult, Reference]:
        key = json.dumps(asdict(Case(spec, rounds)))
        if key not in known:
            result = run_engine(spec, rounds)
            assert result.audit is not None
            known[key] = result, Reference(load_requests(result.audit))
        return known[key]

    return of
