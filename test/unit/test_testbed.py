"""The CPU test bed's own parts: inert for everybody else, and right where engines rely on them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

from sglang_dcp_block.testing import cpu_testbed, host_copies
from sglang_dcp_block.testing.engine import Answer, Case, EngineSpec, Round, case_from_json, differences
from sglang_dcp_block.testing.flashinfer_torch import (
    EMPTY_SHARD_VARIABLE,
    BatchMLAPagedAttentionWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    CpuFactories,
    attention,
)
from sglang_dcp_block.testing.tiny_model import TinyMla, cached, config, write

# -- entry points ----------------------------------------------------------------------------------------------------


def test_nothing_happens_without_the_variable() -> None:
    """Everybody who installs the package loads both entry points in every process: neither may import a thing."""
    code = (
        "from sglang_dcp_block.testing.cpu_testbed import activate, register; import sys;"
        "assert activate() is None; register();"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'numpy')])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


def test_the_platform_answers_to_its_name_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "some_other_platform")
    assert cpu_testbed.activate() is None
    monkeypatch.setenv("SGLANG_PLATFORM", cpu_testbed.NAME)
    assert cpu_testbed.activate() == cpu_testbed.PLATFORM_CLASS


def test_a_missing_target_stops_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    shim = cpu_testbed.Shim("never", "json", "JSONEncoder.no_such_method", lambda x: x, "")
    monkeypatch.setattr(cpu_testbed, "SHIMS", (shim,))
    with pytest.raises(SystemExit, match="no_such_method"):
        cpu_testbed.install("never")


# -- Triton's interpreter --------------------------------------------------------------------------------------------


@triton.jit
def _convert(source, target, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(target + i, tl.load(source + i).to(target.dtype.element_ty))


@pytest.mark.parametrize("wide", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_interpreter_widens_every_fp8_value(wide: torch.dtype, device: str) -> None:
    fp8 = torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    got = torch.zeros(256, dtype=wide, device=device)
    _convert[(1,)](fp8, got, N=256)
    torch.testing.assert_close(got, fp8.to(wide), rtol=0, atol=0, equal_nan=True)
    assert got.isnan().sum() == 2


def test_the_interpreter_rounds_to_fp8(device: str) -> None:
    """Every border between two values, what lies around it, and what is beyond the largest."""
    values = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    borders = (values[1:] + values[:-1]) / 2
    odd = torch.tensor([1e6, 448.0, 464.0, 470.0, 500.0, 1e-9, 0.0, math.inf])
    some = torch.cat([values, borders, borders * (1 + 2**-20), borders * (1 - 2**-20), odd])
    n = 2048
    padded = torch.zeros(n, device=device)
    padded[: 2 * len(some)] = torch.cat([some, -some])
    got = torch.zeros(n, dtype=torch.float8_e4m3fn, device=device)
    _convert[(1,)](padded, got, N=n)
    want = padded.clamp(-448, 448).to(torch.float8_e4m3fn)  # torch makes NaN of what is beyond, a GPU 448
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


# -- stand-ins -------------------------------------------------------------------------------------------------------


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool):
    """Softmax attention in float64, one query and head at a time."""
    queries, heads, _ = q.shape
    out = torch.zeros(queries, heads, v.shape[-1], dtype=torch.float64)
    lse = torch.zeros(queries, heads, dtype=torch.float64)
    for i in range(queries):
        seen = len(k) - queries + i + 1 if causal else len(k)
        for h in range(heads):
            kh, vh = (x[:seen, min(h, x.shape[1] - 1)].double() for x in (k, v))
            weights = [math.exp(scale * float(q[i, h].double() @ row)) for row in kh]
            out[i, h] = sum(w * row for w, row in zip(weights, vh, strict=True)) / sum(weights)
            lse[i, h] = math.log2(sum(weights))
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "kv_heads"), [(1, 7, 1), (3, 3, 2), (4, 9, 2)])
def test_attention(queries: int, keys: int, kv_heads: int, causal: bool) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(queries, 2, 8), torch.randn(keys, kv_heads, 8), torch.randn(keys, kv_heads, 5)
    for got, want in zip(attention(q, k, v, 0.3, causal), exact(q, k, v, 0.3, causal), strict=True):
        assert torch.allclose(got.double(), want, atol=1e-5)


def planned(lengths: list[int], indices: list[int], **changes) -> BatchMLAPagedAttentionWrapper:
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(0))
    indptr = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    arguments = {
        "qo_indptr": torch.arange(len(lengths) + 1),
        "kv_indptr": indptr,
        "kv_indices": torch.tensor(indices, dtype=torch.int32),
        "kv_len_arr": torch.tensor(lengths),
        "num_heads": 2,
        "head_dim_ckv": 4,
        "head_dim_kpe": 2,
        "page_size": 1,
        "causal": False,
        "sm_scale": 0.5,
        "q_data_type": torch.float32,
        "kv_data_type": torch.float32,
    }
    wrapper.plan(**{**arguments, **changes})
    return wrapper


def test_paged_mla_reads_the_planned_rows() -> None:
    torch.manual_seed(0)
    q_nope, q_pe, latent, rope = (torch.randn(*s) for s in ((2, 2, 4), (2, 2, 2), (9, 1, 4), (9, 1, 2)))
    out, lse = planned([3, 2], [8, 1, 4, 0, 7]).run(q_nope, q_pe, latent, rope, return_lse=True)
    for i, rows in enumerate(([8, 1, 4], [0, 7])):
        query = torch.cat([q_nope[i : i + 1], q_pe[i : i + 1]], -1)
        key = torch.cat([latent[rows], rope[rows]], -1)
        want, want_lse = exact(query, key, latent[rows], 0.5, False)
        assert torch.allclose(out[i].double(), want[0], atol=1e-5)
        assert torch.allclose(lse[i].double(), want_lse[0], atol=1e-5)


def test_an_empty_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = planned([0, 1], [3])
    arguments = (torch.randn(2, 2, 4), torch.randn(2, 2, 2), torch.randn(9, 1, 4), torch.randn(9, 1, 2))
    out, lse = wrapper.run(*arguments, return_lse=True)
    assert (out[0] == 0).all()
    assert (lse[0] == -math.inf).all()
    assert out[1].isfinite().all()
    monkeypatch.setenv(EMPTY_SHARD_VARIABLE, "garbage")
    out, lse = wrapper.run(*arguments, return_lse=True)
    assert out[0].isnan().all()
    assert (lse[0] == 0).all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_size": 64}, "page_size"),
        ({"kv_len_arr": torch.tensor([3, 1])}, "disagrees"),
        ({"kv_indices": torch.tensor([1])}, "kv_indices needed"),
        ({"kv_indptr": torch.tensor([1, 3, 5])}, "rise from 0"),
        ({"qo_indptr": torch.tensor([0, 1])}, "query requests"),
    ],
)
def test_a_wrong_plan_is_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned([3, 2], [8, 1, 4, 0, 7], **changes)


@pytest.mark.parametrize("index", [-1, 9])
def test_a_row_outside_the_pool_is_refused(index: int) -> None:
    wrapper = planned([1], [index])
    with pytest.raises(IndexError, match="leave the pool"):
        wrapper.run(torch.randn(1, 2, 4), torch.randn(1, 2, 2), torch.randn(9, 1, 4), torch.randn(9, 1, 2))


def test_a_wrong_head_count_is_refused() -> None:
    with pytest.raises(ValueError, match="planned"):
        planned([1], [3]).run(torch.randn(1, 4, 4), torch.randn(1, 4, 2), torch.randn(9, 1, 4), torch.randn(9, 1, 2))


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="CUDA graphs"):
        BatchMLAPagedAttentionWrapper(torch.empty(0), use_cuda_graph=True)


def test_ragged_attention() -> None:
    torch.manual_seed(0)
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(0))
    wrapper.begin_forward(torch.tensor([0, 2, 3]), torch.tensor([0, 5, 6]), 2, 2, 8, 5)
    q, k, v = torch.randn(3, 2, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 5)
    out, lse = wrapper.forward_return_lse(q, k, v, causal=True, sm_scale=0.2)
    for queries, keys in ((slice(0, 2), slice(0, 5)), (slice(2, 3), slice(5, 6))):
        want, want_lse = exact(q[queries], k[keys], v[keys], 0.2, True)
        assert torch.allclose(out[queries].double(), want, atol=1e-5)
        assert torch.allclose(lse[queries].double(), want_lse, atol=1e-5)
    with pytest.raises(ValueError, match="planned"):
        wrapper.forward(q, k[:5], v)


def test_cuda_literals_become_cpu() -> None:
    factories = CpuFactories(torch)
    assert factories.zeros(3, device="cuda", pin_memory=True).device.type == "cpu"
    assert factories.Tensor is torch.Tensor


def test_a_load_happens_when_its_layer_is_waited_for() -> None:
    done, event = [], SimpleNamespace()
    load = host_copies.deferred(done.append)
    for layer in range(3):
        load(layer)
        host_copies.complete(event, layer)
    assert done == []
    host_copies.wait(event, 1)
    assert done == [0, 1]
    host_copies.wait(event, 2)
    host_copies.wait(event, 2)
    assert done == [0, 1, 2]


def test_copies_by_pages_take_whole_pages() -> None:
    rows = [torch.arange(8.0).view(8, 1, 1)]
    for indices in ([1, 2], [0, 2], [0, 1, 3, 2]):
        with pytest.raises(ValueError, match="not whole pages of 2"):
            host_copies.transfer_kv_direct(rows, rows, torch.tensor(indices), torch.arange(len(indices)), 2)


# -- engine runner ---------------------------------------------------------------------------------------------------


def answer(tokens: list[int], logprobs: list[float]) -> Answer:
    return Answer(tokens, logprobs, 0, 0)


@pytest.mark.parametrize(
    ("got", "words"),
    [
        (answer([1, 3], [-1.0, -2.0]), "tokens part at 1"),
        (answer([1], [-1.0]), "tokens part at the end"),
        (answer([1, 2], [-1.0, -2.1]), "logprob 1"),
        (answer([1, 2], [math.nan, -2.0]), "logprob 0"),
    ],
)
def test_differences_are_found(got: Answer, words: str) -> None:
    want = answer([1, 2], [-1.0, -2.0])
    assert differences([want], [want], 1e-3) == []
    assert words in differences([got], [want], 1e-3)[0]
    assert "0 answers" in differences([], [want], 1e-3)[0]


def test_ranks_share_the_cores() -> None:
    cores = sorted(os.sched_getaffinity(0))
    bound = EngineSpec(tp=len(cores) + 1).environment()["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert [int(core) for core in bound] == [*cores, cores[0]]


def test_stock_means_without_our_plugin() -> None:
    assert EngineSpec().environment()["SGLANG_PLUGINS"] == cpu_testbed.NAME
    assert "dcp_block_size" not in EngineSpec(dcp=2).engine_arguments()
    assert EngineSpec(dcp=2, block=1).engine_arguments()["dcp_block_size"] == 1


def test_a_case_survives_json() -> None:
    from dataclasses import asdict

    case = Case(EngineSpec(tp=2, env={"A": "b"}), [Round([[1, 2]], 3, "name", flush=True)])
    assert case_from_json(json.dumps(asdict(case))) == case


# -- tiny model ------------------------------------------------------------------------------------------------------


def test_the_tiny_model_is_the_same_every_time(tmp_path) -> None:
    first, second = write(tmp_path / "a"), write(tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    other = write(tmp_path / "c", TinyMla(seed=1))
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert json.loads((first / "config.json").read_text()) == config(TinyMla())


def test_cached_models_differ_by_size() -> None:
    four, eight = cached(TinyMla(heads=4)), cached(TinyMla(heads=8))
    assert four != eight
    assert cached(TinyMla(heads=4)) == four
    assert json.loads((eight / "config.json").read_text())["num_attention_heads"] == 8
