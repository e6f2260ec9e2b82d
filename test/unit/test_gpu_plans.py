"""What the GPU scripts would start: every engine has a reference that it can be judged by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import eight_gpus
import gpu_stages
import one_gpu
import two_gpus
import typer

PLANS = [script.PLAN for script in (one_gpu, two_gpus, eight_gpus)]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.title)
def test_names_are_told_apart_and_references_take_equal_prefixes(plan) -> None:
    for stage in plan.stages:
        names = [engine.name for engine in stage.engines()]
        assert len(set(names)) == len(names) > 1
        if isinstance(stage, gpu_stages.Answers):
            references = {e.name: e for e in stage.references}
            for engine, name in stage.others:
                if engine.dcp > 1:
                    assert references[name].page == engine.page * engine.dcp, (stage.name, engine.name)


def test_every_layout_is_tried() -> None:
    tried = {(e.backend, e.block, e.comm) for e, _ in gpu_stages.every_layout(two_gpus.DCP2)}
    wanted = {(b, block, c) for b in ("triton", "flashinfer") for block in (1, 16, 64) for c in ("a2a", "ag_rs")}
    assert tried == wanted | {("flashinfer", None, "a2a")}


def test_cells() -> None:
    assert gpu_stages.parse_cell("64x8192") == (64, 8192, "")
    assert gpu_stages.parse_cell("1x128=tri|fi-b64") == (1, 128, "tri|fi-b64")
    with pytest.raises(typer.BadParameter, match="64x8192, say"):
        gpu_stages.parse_cell("64")
