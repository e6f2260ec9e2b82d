"""Float16 partial results of FlashInfer: on FlashInfer's own wrapper, with torch in place of its compiled modules."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dcp_block import hooks
from sglang_dcp_block.attention import flashinfer_float16, flashinfer_mla, partials
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.flashinfer_torch import CpuFactories, MlaModule, attention

BF16, F16 = torch.bfloat16, torch.float16
HEADS, LORA, ROPE, SCALE = 4, 128, 64, 0.05
LENS = [3, 5]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(partials, "_model_dtype", None)
    flashinfer_float16.module_on_all_ranks.cache_clear()
    yield
    flashinfer_float16.module_on_all_ranks.cache_clear()


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_float16, "over_dcp_group", lambda mine: [mine])


class Module(MlaModule):
    """As FlashInfer compiles it: counts its runs, and plans nothing but the offsets."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__(*dtypes)
        self.runs = 0

    def plan_with_staged_workspace_bytes(self, *args: Any) -> tuple[Any, int]:
        return (args[3].tolist(), args[4].tolist()), 0

    def run(self, *args: Any) -> None:
        self.runs += 1
        super().run(*args)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, Module]:
    """FlashInfer's planning and checks as on a Hopper GPU, on CPU tensors; its modules by the dtype of the results."""
    import flashinfer.jit
    from flashinfer.mla._batch_mla import _auto_policy
    from flashinfer.mla._batch_mla._backends import _fa_common, fa2_backend, fa3_backend

    made: dict[torch.dtype, Module] = {}

    def get(backend: str, q: torch.dtype, kv: torch.dtype, out: torch.dtype, *_dims: Any) -> Module:
        assert backend == "fa3"
        return made.setdefault(out, Module(q, kv, out))

    for module in (_fa_common, fa2_backend, fa3_backend):
        monkeypatch.setattr(module, "get_batch_mla_module", get)
    monkeypatch.setattr(
        flashinfer.jit, "gen_batch_mla_module", lambda *a: SimpleNamespace(build_and_load=lambda: get(*a))
    )
    monkeypatch.setattr(_fa_common, "torch", CpuFactories(torch))
    monkeypatch.setattr(_fa_common, "get_compute_capability", lambda _device: (9, 0))
    monkeypatch.setattr(_fa_common, "is_sm90a_supported", lambda _device: True)
    monkeypatch.setattr(_fa_common, "_get_fa_shared_memory_limits", lambda _device: (233472, 232448))
    monkeypatch.setattr(_fa_common, "get_device_sm_count", lambda _device: 132)
    monkeypatch.setattr(_auto_policy, "_get_compute_capability", lambda _device: (9, 0))
    monkeypatch.setattr(_auto_policy, "is_sm90a_supported", lambda _device: True)
    return made


def updater(dtype: torch.dtype = BF16) -> SimpleNamespace:
    """What the hook reads of SGLang's FlashInferMLAIndicesUpdaterDecode."""
    return SimpleNamespace(data_type=dtype, kv_lora_rank=LORA, qk_rope_head_dim=ROPE)


def plan(updater: Any, wrapper: Any, lens: list[int] = LENS) -> None:
    """SGLang's plan of a decode step, with the positional arguments of its call_begin_forward."""
    n, dtype = len(lens), updater.data_type
    indptr = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).to(torch.int32)
    qo, kv_lens = torch.arange(n + 1, dtype=torch.int32), torch.tensor(lens, dtype=torch.int32)
    rows = torch.arange(int(indptr[-1]), dtype=torch.int32)
    wrapper.plan(qo, indptr, rows, kv_lens, HEADS, LORA, ROPE, 1, False, SCALE, dtype, dtype)


def new_wrapper(**graph: Any) -> Any:
    from flashinfer import BatchMLAPagedAttentionWrapper

    return BatchMLAPagedAttentionWrapper(torch.empty(64, dtype=torch.uint8), backend="auto", **graph)


def inputs(lens: list[int] = LENS, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(sum(lens))
    q = torch.randn(len(lens), HEADS, LORA + ROPE, generator=gen).to(dtype)
    kv = torch.randn(sum(lens), 1, LORA + ROPE, generator=gen).to(dtype)
    return q[..., :LORA], q[..., LORA:], kv[..., :LORA], kv[..., LORA:]


def run(wrapper: Any, return_lse: bool = True, lens: list[int] = LENS) -> tuple[torch.Tensor, Any]:
    """As SGLang runs it: what it gets back is the buffer that it gave."""
    args = inputs(lens)
    out = torch.full(args[0].shape, -7.0, dtype=args[0].dtype)
    result = wrapper.run(*args, out=out, return_lse=return_lse)
    assert (result[0] if return_lse else result) is out
    return out, result[1] if return_lse else None


def exact(lens: list[int] = LENS) -> torch.Tensor:
    q_nope, q_rope, latent, rope = (x.double() for x in inputs(lens))
    outs, start = [], 0
    for i, n in enumerate(lens):
        keys, values = torch.cat([latent, rope], -1)[start : start + n, 0], latent[start : start + n, 0]
        scores = torch.cat([q_nope[i], q_rope[i]], -1) @ keys.T * SCALE
        outs.append(scores.softmax(-1) @ values)
        start += n
    return torch.stack(outs)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want).norm(dim=-1) / want.norm(dim=-1)).max())


def test_flashinfers_wrapper_runs_the_float16_module(modules, one_rank) -> None:
    wrapper = new_wrapper()
    flashinfer_mla.call_begin_forward(plan, updater(), wrapper)
    assert wrapper._backend == "fa3" and set(modules) == {BF16, F16}
    out, lse = run(wrapper)
    assert (out == -7.0).all(), "the planned module ran as well"
    partial = flashinfer_float16.partial_result(wrapper, out)
    assert partial.dtype == F16 and partials._model_dtype == BF16
    assert (modules[F16].runs, modules[BF16].runs) == (1, 0)
    assert error(partial, exact()) < 2**-11 and lse.isfinite().all()


def test_the_bound_tells_bfloat16_from_float16(modules) -> None:
    """The control: the same wrapper without the hook."""
    wrapper = new_wrapper()
    plan(updater(), wrapper)
    out, _ = run(wrapper)
    assert flashinfer_float16.partial_result(wrapper, out) is out and modules[BF16].runs == 1
    assert error(out, exact()) > 2**-10


def test_what_goes_to_no_merge_stays_in_the_queries_dtype(modules, one_rank) -> None:
    wrapper = new_wrapper()
    flashinfer_mla.call_begin_forward(plan, updater(), wrapper)
    out, _ = run(wrapper, return_lse=False)
    assert modules[BF16].runs == 1 and modules[F16].runs == 0 and error(out, exact()) < 2**-8
    with pytest.raises(RuntimeError, match="did not run"):
        flashinfer_float16.partial_result(wrapper, out)


def test_results_are_taken_once(modules, one_rank) -> None:
    """A layer whose run went elsewhere must not get the results of the layer before it."""
    wrapper = new_wrapper()
    flashinfer_mla.call_begin_forward(plan, updater(), wrapper)
    out, _ = run(wrapper)
    flashinfer_float16.partial_result(wrapper, out)
    with pytest.raises(RuntimeError, match="did not run"):
        flashinfer_float16.partial_result(wrapper, out)


def test_every_eager_plan_gets_it_and_a_replay_keeps_it(modules, one_rank) -> None:
    """FlashInfer makes a new backend with every plan, SGLang's plan of a replay keeps the captured one."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import fast_mla_decode_plan

    wrapper = new_wrapper()
    for lens in (LENS, [2, 9]):
        flashinfer_mla.call_begin_forward(lambda u, w, lens=lens: plan(u, w, lens), updater(), wrapper)
        out, _ = run(wrapper, lens=lens)
        assert error(flashinfer_float16.partial_result(wrapper, out), exact(lens)) < 2**-11
    module = wrapper._planned_backend._cached_module
    planned: list[Any] = []
    wrapper._cached_module.plan = lambda *args: planned.append(args)

    def replan(_updater: Any, wrapper: Any) -> None:
        cpu = torch.tensor([0, 1, 2], dtype=torch.int32)
        fast_mla_decode_plan(wrapper, cpu, cpu, cpu, cpu[1:], HEADS, LORA, ROPE, 1, False, SCALE, BF16, BF16)

    flashinfer_mla.call_begin_forward(replan, updater(), wrapper)
    assert planned and wrapper._planned_backend._cached_module is module


def test_nothing_to_gain_nothing_done(modules, monkeypatch) -> None:
    monkeypatch.setattr(flashinfer_float16, "module_on_all_ranks", functools.cache(lambda *_: pytest.fail("loaded")))
    for dtype in (F16, torch.float32):
        wrapper = SimpleNamespace(_planned_backend=SimpleNamespace(_backend="fa3", _cached_module=object()))
        before = wrapper._planned_backend._cached_module
        flashinfer_float16.use_float16(wrapper, dtype, LORA, ROPE)
        assert wrapper._planned_backend._cached_module is before
        out = torch.zeros(1, dtype=dtype)
        assert flashinfer_float16.partial_result(wrapper, out) is out


def test_a_plan_without_a_float16_module_stops_the_server(one_rank) -> None:
    other = SimpleNamespace(_planned_backend=SimpleNamespace(_backend="trtllm-gen"))
    with pytest.raises(RuntimeError, match="planned trtllm-gen"):
        flashinfer_float16.use_float16(other, BF16, LORA, ROPE)


def test_without_the_module_results_stay_in_bfloat16(modules, one_rank, monkeypatch, caplog) -> None:
    def no_compiler(*_args: Any) -> Any:
        raise RuntimeError("nvcc is not there")

    monkeypatch.setattr(flashinfer_float16, "load_module", no_compiler)
    wrapper = new_wrapper()
    with caplog.at_level(logging.INFO, flashinfer_float16.logger.name):
        for _ in range(2):
            flashinfer_mla.call_begin_forward(plan, updater(), wrapper)
    assert [r.message for r in caplog.records] == [
        "FlashInfer's partial results go to the DCP merge in torch.bfloat16, rounded once more than in float16: "
        "rank 0: RuntimeError: nvcc is not there"
    ]
    out, _ = run(wrapper)
    assert flashinfer_float16.partial_result(wrapper, out) is out and error(out, exact()) < 2**-8
    assert partials._model_dtype is None


def test_ranks_agree_on_one_dtype(monkeypatch, caplog) -> None:
    """A merge of float16 and bfloat16 results would take the bits of one for the other."""
    monkeypatch.setattr(flashinfer_float16, "load_module", lambda *_: "module")
    monkeypatch.setattr(flashinfer_float16, "over_dcp_group", lambda mine: [mine, "RuntimeError: no nvcc", mine])
    with caplog.at_level(logging.INFO, flashinfer_float16.logger.name):
        assert flashinfer_float16.module_on_all_ranks("fa3", BF16, LORA, ROPE) is None
    assert "rank 1: RuntimeError: no nvcc" in caplog.text and "rank 0" not in caplog.text
    flashinfer_float16.module_on_all_ranks.cache_clear()
    monkeypatch.setattr(flashinfer_float16, "over_dcp_group", lambda mine: [mine] * 3)
    with caplog.at_level(logging.INFO, flashinfer_float16.logger.name):
        assert flashinfer_float16.module_on_all_ranks("fa3", BF16, LORA, ROPE) == "module"
    assert caplog.records[-1].message == "FlashInfer's partial results go to the DCP merge in float16 (fa3)"


def test_only_the_flashinfer_that_this_is_written_for(modules, monkeypatch) -> None:
    import flashinfer
    from flashinfer.mla._batch_mla._backends._fa_common import _BatchMLAGeneratedFaMechanics

    assert hooks.source_hash(_BatchMLAGeneratedFaMechanics._run_generated_fa) == flashinfer_float16._RUN_HASH
    assert flashinfer_float16.load_module("fa3", BF16, LORA, ROPE)._dtypes == (BF16, BF16, F16)
    monkeypatch.setattr(flashinfer_float16, "_RUN_HASH", "0123456789abcdef")
    with pytest.raises(hooks.HookError, match="_run_generated_fa has changed"):
        flashinfer_float16.load_module("fa3", BF16, LORA, ROPE)
    monkeypatch.setattr(flashinfer, "__version__", "0.7.3")
    with pytest.raises(hooks.HookError, match=r"flashinfer 0\.7\.3 is installed, not 0\.7\.2"):
        flashinfer_float16.module_on_all_ranks("fa3", BF16, LORA, ROPE)  # not taken for a missing compiler


def test_a_plan_is_the_same_for_either_module() -> None:
    """FlashInfer plans room for pieces of 16 bits whatever the dtype of the results, in a module's own plan."""
    from pathlib import Path

    import flashinfer

    data = Path(flashinfer.__file__).parent / "data"
    for name in ("batch_mla_plan.cu", "batch_mla_sm90_plan.cu"):
        assert "DTypeO" not in (data / "csrc" / name).read_text()
    scheduler = (data / "include/flashinfer/attention/scheduler.cuh").read_text()
    function = scheduler[scheduler.index("cudaError_t MLAPlan(") :]
    assert "sizeof_dtype_o = 2;" in function[: function.index("\n}")]


@pytest.mark.parametrize("merged", [True, False])
def test_sglangs_decode_gives_guarded_float16(modules, one_rank, monkeypatch, merged: bool) -> None:
    """FlashInferMLAAttnBackend.forward_decode itself, on a rank that holds nothing of the second request."""
    from sglang.srt.layers import logits_processor
    from sglang.srt.layers.attention import flashinfer_mla_backend as stock

    layout, lens = DcpLayout(2, 4), [3, 0]
    monkeypatch.setattr(flashinfer_mla, "active_layout", lambda: layout)
    monkeypatch.setattr(flashinfer_mla, "active_rank", lambda: 1)
    monkeypatch.setattr(stock, "get_parallel", lambda: SimpleNamespace(dcp_enabled=True))
    monkeypatch.setattr(logits_processor, "get_in_autotune_dummy_run", lambda: not merged)
    wrapper = new_wrapper()
    flashinfer_mla.call_begin_forward(lambda u, w: plan(u, w, lens), updater(), wrapper)
    q_nope, q_rope, latent, rope = inputs(lens)
    pool = torch.cat([latent, rope], -1)
    backend = SimpleNamespace(
        forward_metadata=SimpleNamespace(decode_wrapper=wrapper),
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _layer: pool),
    )
    layer = SimpleNamespace(tp_q_head_num=HEADS, v_head_dim=LORA, head_dim=LORA + ROPE, layer_id=0)
    mode = SimpleNamespace(is_decode=lambda: True)
    batch = SimpleNamespace(forward_mode=mode, seq_lens=torch.tensor([4 + lens[0], 2]))
    decode = stock.FlashInferMLAAttnBackend.forward_decode
    out, lse = flashinfer_mla.forward_decode(decode, backend, q_nope, None, None, layer, batch, q_rope=q_rope)
    assert out.dtype == (F16 if merged else BF16) and out.shape == (2, HEADS * LORA)
    assert (out[1] == 0).all() and (lse[1] == -torch.inf).all()
    want, _ = attention(torch.cat([q_nope[0], q_rope[0]], -1)[None], pool, latent, SCALE, False)
    assert error(out[0].view(1, HEADS, LORA), want.double()) < (2**-11 if merged else 2**-8)
