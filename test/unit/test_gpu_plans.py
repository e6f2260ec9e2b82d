"""What the GPU scripts would start: every engine has a reference that it can be judged by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import eight_gpus
import gpu_run
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


def test_kinds_are_merges_fp8_and_rotation_on_what_runs_them() -> None:
    stage = two_gpus.kinds()
    kinds = {(e.backend, e.block, e.comm, *sorted(e.extra)) for e, _ in stage.others if e.dcp > 1}
    merges = {(b, block, c) for b in ("triton", "flashinfer") for block in (1, 64) for c in ("a2a", "ag_rs")}
    fp8 = {(b, 64, "a2a", "kv_cache_dtype") for b in ("triton", "flashinfer")}
    assert kinds == merges | fp8 | {("triton", 64, "a2a", "dcp_rotate")}
    assert [e.name for e, _ in stage.others if e.dcp == 1] == ["fi-fp8-tp1"]
    references = {e.name: e for e in stage.references}
    for engine, name in stage.others:  # FP8 rows are compared with FP8 rows
        assert references[name].extra.get("kv_cache_dtype") == engine.extra.get("kv_cache_dtype")
    assert {name for pair in stage.beside for name in pair} <= {e.name for e in stage.engines()}


def test_blocks_are_divided_by_packing_with_the_same_settings() -> None:
    stage = two_gpus.pd()
    by_name = {pair.name: pair for pair in stage.pairs}
    for pair in stage.pairs:
        other = by_name[pair.against or stage.against]
        assert pair.prefill.env == pair.decode.env
        assert pair.decode.block is None or (pair.prefill.env, pair.decode.env) == (other.prefill.env, other.decode.env)
        assert (pair.prefill.base_gpu, pair.decode.base_gpu) == (other.prefill.base_gpu, other.decode.base_gpu)
        assert other.decode.block is None
        pool = pair.decode.max_tokens * pair.decode.dcp
        assert not gpu_run.pool_complaint("decode", pool, max(stage.lengths))


def test_a_pool_that_is_too_small_is_named() -> None:
    assert gpu_run.pool_complaint("decode", 131_072 + 1024, 131_072) == ""
    found = gpu_run.pool_complaint("decode", 99_072, 131_072)
    assert (
        "the decode server's pool holds 99,072 tokens, and a prompt of 131,072 needs 132,096: raise max_tokens" in found
    )


def test_rows_of_pairs_are_medians_over_those_of_their_own_pair() -> None:
    def costs(*seconds: float) -> dict:
        return {"costs": [{"prompt": 5, "total_s": s, "segments": 8} for s in seconds]}

    found = {"pairs": {"a": costs(1.0, 3.0, 2.0), "b": costs(4.0), "c": costs(1.0, 1.0)}}
    rows = gpu_run.pd_rows(found, {"a": "a", "b": "a", "c": "b"})
    assert [(r["pair"], r["against"], r["total_over"], r["samples"]) for r in rows] == [
        ("a", "a", 1.0, 3), ("b", "a", 2.0, 1), ("c", "b", 0.25, 2)
    ]  # fmt: skip


def test_answers_of_pairs_are_compared_by_prompt() -> None:
    def answer(prompt: int, *ids: int) -> dict:
        return {"prompt": prompt, "ids": ids, "logprobs": [-1.0 - prompt / 1e4] * len(ids), "gaps": [0.5] * len(ids)}

    stage = two_gpus.pd()
    answers = {"stock": [answer(65, 1, 2), answer(150, 3, 4)], "block64": [answer(150, 3, 9), answer(7, 1)]}
    found = stage._judged({"pairs": {name: {"costs": [], "answers": a} for name, a in answers.items()}, "failed": {}})
    by_pair = {name: data["partings"] for name, data in found["pairs"].items()}
    assert [(p["prompt"], p["at"], p["gap"], p["before"]) for p in by_pair["block64"]] == [(150, 1, 0.5, 0.0)]
    assert gpu_stages.partings_line(by_pair["block64"]) == "0.000 before a parting, gap 0.500, 0/1 without one"
    assert gpu_stages.partings_line(by_pair["stock"]) == "0.000 before a parting, gap 0.000, 2/2 without one"


GOOD_AUDIT = {"ok": True, "control_noticed": True}
GOOD_ENGINE = {"failure": "", "verdicts": {"fresh": {"wrong": []}}, "audit": GOOD_AUDIT}
GOOD_SOAK = {"wrong": [], "stuck": 0, "wrong_length": 0, "control_noticed": 3}


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({}, ""),
        ({"audit": None}, ""),
        ({"failure": "exit 1; log ends with:\nlast line"}, "tri-b64 failed: exit 1; log ends with:"),
        ({"failure": "not run: needs about 90 s"}, "tri-b64 failed: not run: needs about 90 s"),
        ({"verdicts": {"fresh": {"wrong": []}, "again": {"wrong": ["a", "b"]}}}, "tri-b64 again: 2 answers outside"),
        ({"audit": GOOD_AUDIT | {"ok": False}}, "tri-b64: KV rows are not where the layout says"),
        ({"audit": {"ok": False, "complaints": ["no records"]}}, "tri-b64: KV rows are not where the layout says"),
        ({"audit": GOOD_AUDIT | {"control_noticed": False}}, "tri-b64: the audit did not notice another layout"),
    ],
)
def test_complaints_about_answers(changed: dict, complaint: str) -> None:
    found = {"engines": {"tri-dcp1": {"failure": ""}, "tri-b64": GOOD_ENGINE | changed}}
    lines = two_gpus.answers().complaints(found)
    assert len(lines) == bool(complaint) and all(line.startswith(complaint) for line in lines), lines


@pytest.mark.parametrize(
    ("found", "complaints"),
    [
        ({"failed": {}, "soak": GOOD_SOAK}, []),
        ({"failed": {}, "soak": GOOD_SOAK | {"wrong": ["a"], "stuck": 2}}, ["1 answers outside", "2 requests: stuck"]),
        ({"failed": {}, "soak": GOOD_SOAK | {"wrong_length": 1}}, ["1 requests: wrong_length"]),
        ({"failed": {}, "soak": GOOD_SOAK | {"control_noticed": 0}}, ["answers to other prompts were not noticed"]),
        ({"failed": {"tri-b64": "exit 1\nlog"}}, ["tri-b64 failed: exit 1", "no answer was compared"]),
    ],
)
def test_complaints_about_a_soak(found: dict, complaints: list[str]) -> None:
    lines = two_gpus.SOAK.complaints(found)
    assert len(lines) == len(complaints) and all(map(str.startswith, lines, complaints)), lines


@pytest.mark.parametrize("stage", [two_gpus.speed(), two_gpus.pd()], ids=lambda stage: stage.name)
def test_complaints_about_what_failed(stage) -> None:
    assert stage.complaints({"failed": {}, "rows": []}) == []
    assert stage.complaints({"failed": {"time": "stopped before round 3"}}) == ["time failed: stopped before round 3"]


def test_cells() -> None:
    assert gpu_stages.parse_cell("64x8192") == (64, 8192, "")
    assert gpu_stages.parse_cell("1x128=tri|fi-b64") == (1, 128, "tri|fi-b64")
    with pytest.raises(typer.BadParameter, match="64x8192, say"):
        gpu_stages.parse_cell("64")
