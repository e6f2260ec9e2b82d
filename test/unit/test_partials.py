"""Partial results on their way through SGLang's merges: natural-log LSE is Triton's, base 2 is FlashInfer's."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dcp_block.attention import partials
from sglang_dcp_block.testing.exchange import Exchange


@pytest.fixture
def merge_by(monkeypatch):
    monkeypatch.setattr(partials, "_model_dtype", None)
    return lambda how: monkeypatch.setattr(partials, "comm_backend", lambda: how)


@pytest.mark.parametrize(
    ("how", "model", "want"),
    [
        ("a2a", torch.bfloat16, torch.float16),
        ("a2a", torch.float16, torch.float16),
        ("a2a", torch.float32, torch.float32),
        ("ag_rs", torch.bfloat16, torch.float32),
        ("ag_rs", torch.float16, torch.float32),
    ],
)
def test_dtype_of_partial_results(merge_by, how: str, model: torch.dtype, want: torch.dtype) -> None:
    merge_by(how)
    assert partials.partial_dtype(model) == want


def test_nothing_changes_where_nothing_is_merged(merge_by, monkeypatch) -> None:
    from sglang.srt.layers import logits_processor

    merge_by("a2a")
    monkeypatch.setattr(logits_processor, "get_in_autotune_dummy_run", lambda: True)
    assert partials.partial_dtype(torch.bfloat16) == torch.bfloat16


def unreachable(*_args, **_kwargs):
    raise AssertionError("SGLang's own merge was called")


@pytest.mark.parametrize("base_e", [True, False])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_combine_against_float64(merge_by, monkeypatch, ranks: int, base_e: bool) -> None:
    gen = torch.Generator().manual_seed(ranks)
    n, heads, dim = 4, 3, 64
    # As they arrive from the all-to-all: a slice of a wider buffer.
    parts = torch.randn(ranks, n, heads, dim + 2, generator=gen).half()[..., :dim]
    lses = torch.randn(ranks, n, heads, generator=gen) * 5
    parts[0, 1], lses[0, 1] = 0, -math.inf  # an empty shard
    parts[:, 3], lses[:, 3] = 0, -math.inf  # a padding row
    monkeypatch.setattr(partials, "_model_dtype", torch.float32)
    got, lse = partials.lse_combine(unreachable, parts, lses, is_lse_base_on_e=base_e)
    by_base = [torch.softmax(lses[:, :3].double() * scale, dim=0) for scale in (math.log(2), 1)]
    want = (by_base[base_e][..., None] * parts[:, :3].double()).sum(0)
    assert lse is None and got.dtype == torch.float32
    torch.testing.assert_close(got[:3].double(), want, rtol=1e-5, atol=1e-6)
    assert (got[3] == 0).all()
    other = (by_base[not base_e][..., None] * parts[:, :3].double()).sum(0)
    assert not torch.allclose(got[:3].double(), other, rtol=1e-2)


def test_partial_results_in_the_models_dtype_are_sglangs(merge_by, monkeypatch) -> None:
    monkeypatch.setattr(partials, "_model_dtype", torch.float32)
    parts, lses = torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1)
    assert partials.lse_combine(lambda *args: args, parts, lses) == (parts, lses, True, False)


def test_combine_refuses_what_it_does_not_compute(merge_by, monkeypatch) -> None:
    monkeypatch.setattr(partials, "_model_dtype", torch.bfloat16)
    parts, lses = torch.zeros(2, 1, 1, 4).half(), torch.zeros(2, 1, 1)
    with pytest.raises(NotImplementedError, match=r"torch\.float16 partial results gives no LSE"):
        partials.lse_combine(unreachable, parts, lses, return_lse=True)


def test_reduce_scatter_ends_in_the_models_dtype(merge_by) -> None:
    part, group = torch.ones(2, 3), object()
    assert partials.gather_lse_reduce_scatter(lambda out, _lse, _group: out * 2, part, None, group).dtype == part.dtype
    merge_by("ag_rs")
    partials.partial_dtype(torch.bfloat16)
    merged = partials.gather_lse_reduce_scatter(lambda out, _lse, _group: out * 2, part, None, group)
    assert merged.dtype == torch.bfloat16 and (merged == 2).all()


def test_two_models_do_not_share_a_merge(merge_by) -> None:
    partials.keep_model_dtype(torch.bfloat16)
    with pytest.raises(RuntimeError, match="two models in one server"):
        partials.keep_model_dtype(torch.float16)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("how", ["a2a", "ag_rs"])
def test_through_sglangs_merges(merge_by, monkeypatch, how: str, backend: str) -> None:
    """Partial results in the dtype that forward_decode gives them, through SGLang's own merges, in bfloat16."""
    from contextlib import nullcontext

    from sglang.srt.layers.dcp import comm

    ranks, n, heads, dim = 2, 3, 4, 64
    gen = torch.Generator().manual_seed(1)
    exact = torch.randn(ranks, n, heads, dim, generator=gen, dtype=torch.float64)
    lses = torch.randn(ranks, n, heads, generator=gen) * 3
    want = (torch.softmax(lses.double(), dim=0)[..., None] * exact).sum(0)
    base_e = backend == "triton"
    if not base_e:
        lses = lses / math.log(2)
    merge_by(how)
    monkeypatch.setattr(comm, "use_symmetric_memory", lambda _group: nullcontext())
    combine, scatter = comm.dcp_lse_combine_triton, comm.cp_lse_ag_out_rs_mla
    monkeypatch.setattr(comm, "dcp_lse_combine_triton", lambda *a, **k: partials.lse_combine(combine, *a, **k))

    def merged(dtype: torch.dtype, lses: torch.Tensor) -> torch.Tensor:
        group = Exchange(ranks)

        def work(rank: int) -> torch.Tensor:
            part, lse = exact[rank].to(dtype), lses[rank].clone()
            if how == "a2a":
                return comm.dcp_a2a_lse_reduce(part, lse, group, is_lse_base_on_e=base_e)
            merge = partials.gather_lse_reduce_scatter
            return merge(scatter, part, lse, group, is_lse_base_on_e=base_e).transpose(0, 1)

        return torch.cat(group.run(work), dim=1)

    def error(got: torch.Tensor) -> float:
        return float((got.double() - want).norm() / want.norm())

    ours = partials.partial_dtype(torch.bfloat16) if base_e else torch.float16
    partials.keep_model_dtype(torch.bfloat16)
    got = merged(ours, lses)
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    # Triton's interpreter cuts a float32 to bfloat16 instead of rounding it.
    once = error(want.bfloat16()) * (2 if how == "a2a" else 1)
    assert error(got) < 1.1 * once
    assert error(merged(torch.float16, lses.flip(0))) > 0.1
    if how == "ag_rs":
        assert error(merged(torch.bfloat16, lses)) > 1.2 * once, "the check can't tell a second rounding"
