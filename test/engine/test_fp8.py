"""FP8 KV (--kv-cache-dtype fp8_e4m3) under a block layout, against an engine without DCP that stores FP8 as well.

A row that is read back is not the row that was computed. So both engines must have had the same history: the same hits
in the radix cache (a page without DCP is the virtual page with it), the same chunks, and the same sums before a row is
rounded (the same TP size). Then the rows are the same bytes. Where float32's own rounding crosses a border of FP8's,
which another CPU may do elsewhere, a value is one step off, and values that depend on it move as little: that is
allowed in one row of a hundred.

SGLang's Triton kernels round queries and softmax weights to FP8, and this project's don't. Its reference therefore
reads the same FP8 rows in float32 (WIDE_KV_VARIABLE); a slow test shows what the rounding does.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_matrix import FEW_SPLITS, PREFIXES, check, prompt

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import Reference, audit_requests, load_requests, one_fp8_step
from sglang_dcp_block.testing.cpu_testbed import SABOTAGE_VARIABLE, WIDE_KV_VARIABLE
from sglang_dcp_block.testing.engine import Case, CaseResult, EngineFailed, EngineSpec, Round, differences, run
from sglang_dcp_block.testing.tiny_model import cached

FP8 = {"kv_cache_dtype": "fp8_e4m3"}
#: Without a crossed border 3e-6 was seen; with one 2e-3.
LOGPROBS = 1e-2


class Cell(NamedTuple):
    backend: str
    dcp: int
    block: int
    comm: str

    @property
    def layout(self) -> DcpLayout:
        return DcpLayout(self.dcp, self.block)


ALWAYS = [Cell("flashinfer", 2, 16, "a2a"), Cell("triton", 2, 16, "ag_rs")]
SLOW = [
    Cell("flashinfer", 2, 64, "ag_rs"),
    Cell("flashinfer", 4, 16, "ag_rs"),
    Cell("flashinfer", 4, 64, "a2a"),
    Cell("triton", 2, 64, "a2a"),
    Cell("triton", 4, 16, "a2a"),
    Cell("triton", 4, 64, "ag_rs"),
]
CELLS = [*ALWAYS, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]


def engine(cell: Cell, **more) -> EngineSpec:
    extra = FP8 | (FEW_SPLITS if cell.backend == "triton" else {})
    fields = {"tp": cell.dcp, "dcp": cell.dcp, "page": cell.block, "extra": extra}
    return EngineSpec(**{**fields, "block": cell.block, "backend": cell.backend, "comm": cell.comm, **more})


def without_dcp(spec: EngineSpec) -> EngineSpec:
    """The same history: TP size, page, chunks."""
    env = {WIDE_KV_VARIABLE: "1"} if spec.backend == "triton" else {}
    return replace(
        spec, dcp=1, block=None, rotate=False, page=spec.page * spec.dcp, env=spec.env | env, comm=EngineSpec.comm
    )


def workload(layout: DcpLayout) -> list[Round]:
    """Prompts around the edges of a block and a cycle, decode over both, cached prefixes cut at and beside them.

    No prompt is asked twice: its last tokens would have two histories, and the audit knows rows by their tokens.
    """
    b, c = layout.block_size, layout.cycle
    long = prompt(3 * c + b // 2)
    return [
        Round([prompt(n) for n in (1, b - 1, b, b + 1, c - 1, c, c + 1)] + [long], 3, "edges"),
        Round([prompt(c - 3, seed=1)], b + 6, "grow"),
        Round([long[:cut] + prompt(7, seed=cut) for cut in (c + b // 2, c + b, 2 * c, 2 * c + 1)], 4, "cached"),
    ]


def near(values: np.ndarray) -> np.ndarray:
    """Rounding that fell the other way, and what depends on it. A wrong row is about 1 away."""
    return one_fp8_step(values) + 1 / 32


def check_fp8(result: CaseResult, layout: DcpLayout, expected: CaseResult, rows: Reference) -> None:
    hits = [[a.cached for a in answers] for answers in result.answers]
    assert hits == [[a.cached for a in answers] for answers in expected.answers], "another history"
    check(result, layout, expected, rows, LOGPROBS, near)
    records = load_requests(result.audit)
    exact = audit_requests(layout, records, rows, 0.0)
    assert exact.mismatches <= exact.compared // 100, str(exact)


@pytest.mark.parametrize("cell", CELLS, ids=lambda c: "-".join(map(str, c)))
def test_rows_and_answers_are_those_without_dcp(cell: Cell, run_engine, reference) -> None:
    rounds = workload(cell.layout)
    expected, rows = reference(rounds, without_dcp(engine(cell)))
    result = run_engine(engine(cell), rounds)
    assert all(a.cached >= cell.layout.cycle for a in result.answers[2])
    check_fp8(result, cell.layout, expected, rows)

    # The control: one row at another scale, and two that changed places.
    for fault in ("scale", "place"):
        records = load_requests(result.audit)
        one = max((r for r in records if r.dcp_rank == 0), key=lambda r: len(r.tokens))
        first = np.flatnonzero(~np.isnan(one.rows).any(axis=(0, 2)))[2]
        rest = slice(first, first + 2)
        one.rows[:, rest] = one.rows[:, rest] * [[[1.25], [1.0]]] if fault == "scale" else one.rows[:, rest][:, ::-1]
        report = audit_requests(cell.layout, records, rows, near)
        assert report.mismatches == {"scale": 1, "place": 2}[fault], (fault, str(report))


class Scenario(NamedTuple):
    spec: EngineSpec
    rounds: list[Round]


_FLASHINFER, _TRITON = (Cell(backend, 2, 16, "a2a") for backend in ("flashinfer", "triton"))
#: Whole prompts come back in PREFIXES, see workload.
_PREFIXES = [PREFIXES[0], replace(PREFIXES[1], prompts=[[*p[:-1], 5, 11] for p in PREFIXES[1].prompts])]
#: One prompt at a time: prompts that share a chunk are cut at pages, which differ here.
_CHUNKED = [Round([prompt(331)], 6, "chunked"), Round([[*prompt(331)[:-1], 5, *[7] * 90]], 4, "more")]
_CHUNKED_KV = {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1", "SGLANG_MAX_KV_CHUNK_CAPACITY": "192"}
SCENARIOS = {
    "chunked-flashinfer": Scenario(engine(_FLASHINFER, chunked=64), _CHUNKED),
    "chunked-triton": Scenario(engine(_TRITON, chunked=64), _CHUNKED),
    # SGLang merges these chunks with the wrong base of the LSE (its issue 40903), on both sides alike.
    "mha-chunked-kv": Scenario(engine(_FLASHINFER, env=_CHUNKED_KV), _PREFIXES),
    "rotated": Scenario(engine(_TRITON, rotate=True), _PREFIXES),
    "tp-beyond-dcp": Scenario(engine(_FLASHINFER, tp=4), _PREFIXES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, run_engine, reference) -> None:
    spec, rounds = SCENARIOS[name]
    expected, rows = reference(rounds, without_dcp(spec))
    result = run_engine(spec, rounds)
    assert all(a.cached for a in result.answers[1])
    check_fp8(result, spec.layout, expected, rows)


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1"}], ids=["absorbed", "one-shot"])
def test_answers_are_those_of_stock_dcp(env: dict[str, str], run_engine) -> None:
    """SGLang's own DCP, without the plugin. Without DCP, one-shot prefill reads its new tokens as FP8: no reference."""
    spec = engine(_FLASHINFER, env=env)
    stock = run_engine(replace(spec, block=None), _PREFIXES)
    result = run_engine(spec, _PREFIXES)
    for answers, wanted in zip(result.answers, stock.answers, strict=True):
        assert not differences(answers, wanted, LOGPROBS)
        assert [a.cached for a in answers] == [a.cached for a in wanted]


@pytest.mark.slow
def test_rounding_queries_to_fp8_shows(run_engine, reference) -> None:
    """What SGLang's Triton kernels do without DCP. Also the control of WIDE_KV_VARIABLE."""
    rounds = workload(_TRITON.layout)[:1]
    exact, _ = reference(rounds, without_dcp(engine(_TRITON)))
    rounded, _ = reference(rounds, replace(without_dcp(engine(_TRITON)), env={}))
    found = [
        abs(a - b)
        for one, other in zip(exact.answers[0], rounded.answers[0], strict=True)
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
    ]
    assert max(found) > LOGPROBS


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["half-scale", "swapped-rows"])
def test_a_wrong_scale_and_a_wrong_place_show(fault: str, run_engine, reference) -> None:
    rounds = workload(_FLASHINFER.layout)
    expected, rows = reference(rounds, without_dcp(engine(_FLASHINFER)))
    result = run_engine(engine(_FLASHINFER, env={SABOTAGE_VARIABLE: fault}), rounds)
    report = audit_requests(_FLASHINFER.layout, load_requests(result.audit), rows, near)
    assert report.mismatches > report.compared // 2 and "differs by" in str(report), str(report)
    seen = [differences(*pair, LOGPROBS) for pair in zip(result.answers, expected.answers, strict=True)]
    assert all(seen) or fault == "swapped-rows"


# -- a checkpoint that names FP8 for its KV ----------------------------------------------------------------------------


def checkpoint(folder: Path, scale: float | None = None) -> dict[str, str]:
    """No layer is quantized, and --kv-cache-dtype stays auto. scale: of keys and values, as quantizers write it.

    ModelOpt's loader takes 16-bit activations only, and Triton's interpreter has no bfloat16.
    """
    shutil.copytree(cached(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "kv_cache_scheme": {"type": "float", "num_bits": 8},
        "ignore": ["*"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    if scale is not None:
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        for layer in range(config["num_hidden_layers"]):
            for side in "kv":
                name = f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale"
                weights[name] = torch.tensor(scale)
        save_file(weights, file, metadata={"format": "pt"})
    return {"model_path": str(folder), "dtype": "float16"}


def test_a_checkpoint_that_scales_its_kv_stops_the_server(warm, tmp_path) -> None:
    spec = engine(_FLASHINFER, extra=checkpoint(tmp_path / "model", scale=0.5))
    with pytest.raises(EngineFailed):
        run(Case(spec, [Round([prompt(5)], 2, "never")]), tmp_path / "engine", warm=warm, timeout_s=300)
    log = (tmp_path / "engine/log.txt").read_text()
    assert "the checkpoint scales its FP8 KV by 0.5 in model.layers.0.self_attn.attn_mqa, which" in log


@pytest.mark.slow
def test_a_checkpoint_may_ask_for_fp8(run_engine, reference, tmp_path) -> None:
    """In float16, whose rounding crosses FP8's borders more often."""
    spec = engine(_FLASHINFER, extra=checkpoint(tmp_path / "model"))
    rounds = workload(_FLASHINFER.layout)
    expected, rows = reference(rounds, without_dcp(spec))
    result = run_engine(spec, rounds)
    check(result, _FLASHINFER.layout, expected, rows, 5e-2, lambda values: 2 * near(values))
