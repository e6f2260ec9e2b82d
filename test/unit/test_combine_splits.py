"""Joining the KV splits of a shard: against float64 attention over the whole shard, with garbage where nothing lies."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dcp_block.attention.combine_splits import combine_splits

SPLITS, DIM = 4, 64


def shard(rows: list[int], heads: int, device: str, seed: int = 0):
    """Scores and values of random shards -> (partial_out, partial_lse, indptr, out, lse); the last two in float64."""
    gen = torch.Generator().manual_seed(seed)
    n = len(rows)
    # What a kernel leaves where it stores nothing: NaN in the output, and -inf only where the caller filled it in.
    partial_out = torch.full((n + 1, heads, SPLITS, DIM), math.nan)
    partial_lse = torch.full((n + 1, heads, SPLITS), -math.inf)
    out, lse = torch.zeros(n, heads, DIM, dtype=torch.float64), torch.full((n, heads), -math.inf, dtype=torch.float64)
    for i, count in enumerate(rows):
        scores = 8 * torch.randn(heads, count, generator=gen, dtype=torch.float64)
        values = torch.randn(heads, count, DIM, generator=gen, dtype=torch.float64)
        if count == 0:
            partial_lse[i] = 5.0  # an empty shard may find another request's LSE
            continue
        lse[i] = scores.logsumexp(-1)
        out[i] = torch.einsum("hr,hrd->hd", scores.softmax(-1), values)
        for s, part in enumerate(torch.arange(count).tensor_split(min(SPLITS, count))):
            partial_lse[i, :, s] = scores[:, part].logsumexp(-1).float()
            partial_out[i, :, s] = torch.einsum("hr,hrd->hd", scores[:, part].softmax(-1), values[:, part]).float()
    indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return tuple(t.to(device) for t in (partial_out, partial_lse, indptr)) + (out, lse)


def combine(partial_out, partial_lse, indptr, heads: int, dtype=torch.float32):
    out = torch.full((len(indptr) - 1, heads, DIM), math.nan, dtype=dtype, device=indptr.device)
    lse = torch.full((len(indptr) - 1, heads), math.nan, device=indptr.device)
    combine_splits(partial_out, partial_lse, indptr, out, lse)
    return out.double().cpu(), lse.double().cpu()


@pytest.mark.parametrize("rows", [[1], [0], [3, 0, 64, 65, 1, 0], [0, 0, 200]], ids=str)
def test_equals_attention_over_the_whole_shard(rows, device):
    partial_out, partial_lse, indptr, out, lse = shard(rows, 3, device)
    found = combine(partial_out, partial_lse, indptr, 3)
    torch.testing.assert_close(found[0], out, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found[1], lse, atol=1e-6, rtol=1e-6)


def test_an_empty_shard_gives_exactly_zero_and_minus_infinity(device):
    partial_out, partial_lse, indptr, *_ = shard([0, 7], 2, device)
    out, lse = combine(partial_out, partial_lse, indptr, 2)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()


def test_controls(device):
    partial_out, partial_lse, indptr, out, lse = shard([9, 30], 2, device)
    for broken in (partial_lse + torch.arange(SPLITS, device=device), partial_lse.flip(0)):
        wrong, _ = combine(partial_out, broken, indptr, 2)
        assert not torch.allclose(wrong.nan_to_num(9.0), out, atol=1e-2), "weights of other splits must show"
    filled = indptr.clone()
    filled[1:] -= int(filled[1])  # the first request claims no rows
    wrong, _ = combine(partial_out, partial_lse, filled, 2)
    assert not torch.allclose(wrong, out, atol=1e-2)


def test_no_request():
    combine_splits(torch.empty(0, 2, SPLITS, DIM), torch.empty(0, 2, SPLITS), torch.zeros(1, dtype=torch.int32),
                   torch.empty(0, 2, DIM), torch.empty(0, 2))  # fmt: skip
