"""The engine runner itself: a crash and a hang are reported, with the log, and leave no process behind."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from test_matrix import prompt

from sglang_dcp_block.testing.engine import Case, EngineFailed, EngineSpec, Round, run

HELLO = [Round([prompt(5)], 400, "hello")]


def _processes_of(workdir: Path) -> list[str]:
    """Processes that write to the engine's log: it and all its children."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "fd" / "1").readlink() == workdir / "log.txt":
                found.append(process.name)
    return found


def test_a_crash_is_reported_with_the_log(warm, tmp_path) -> None:
    """Stock SGLang can't decode MLA under DCP on its Triton backend; its scheduler dies at the first step."""
    spec = EngineSpec(tp=2, dcp=2, backend="triton")
    with pytest.raises(EngineFailed, match="no DCP-aware write path"):
        run(Case(spec, HELLO), tmp_path, warm=warm, timeout_s=300)
    assert not _processes_of(tmp_path)


def test_a_hang_is_reported_and_killed(warm, tmp_path) -> None:
    with pytest.raises(EngineFailed, match="no answer within"):
        run(Case(EngineSpec(), HELLO), tmp_path, warm=warm, timeout_s=3)
    assert not _processes_of(tmp_path)


def test_a_session_that_ends_takes_its_engine_along(warm, tmp_path) -> None:
    spec = EngineSpec()
    (tmp_path / "case.json").write_text(json.dumps(asdict(Case(spec, HELLO))))
    process = warm.start(
        "sglang_dcp_block.testing.run_case",
        [str(tmp_path / "case.json"), str(tmp_path / "result.json")],
        spec.environment(tmp_path),
        tmp_path / "log.txt",
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    assert _processes_of(tmp_path)
    process.close()
    deadline = time.monotonic() + 30
    while _processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not _processes_of(tmp_path)
