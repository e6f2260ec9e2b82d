"""Empty shards: whatever garbage attention left, the merge must not see it."""

import pytest
import torch
from brute_force import between, deal

from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp.layout import DcpLayout

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
GARBAGE = {"nan": float("nan"), "inf": float("inf"), "stale": 3.0}


def bits(x):
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strides", ["contiguous", "padded rows", "heads first"])
@pytest.mark.parametrize("cell", [(1, 1), (2, 1), (4, 16), (8, 64)])
def test_empty_rows_are_cleared_and_the_others_keep_every_bit(device, no_sync, garbage, dtype, strides, cell):
    layout = DcpLayout(*cell)
    ranks, block = cell
    lengths = sorted({0, 1, block, block + 1, (ranks - 1) * block, (ranks - 1) * block + 1, 3 * ranks * block})
    n, heads, dim = len(lengths), 19, 10
    if strides == "contiguous":
        out, lse = torch.empty(n, heads, dim), torch.empty(n, heads)
    elif strides == "padded rows":
        out, lse = torch.empty(n, heads + 2, dim + 6)[:, 1:-1, :dim], torch.empty(n, heads, 2)[..., 0]
    else:
        out, lse = torch.empty(heads, n, dim).transpose(0, 1), torch.empty(heads, n).T
    seq_lens = torch.tensor(lengths, dtype=torch.int32 if dtype == torch.bfloat16 else torch.int64, device=device)
    for rank in {0, ranks // 2, ranks - 1}:
        mine, mine_lse = out.fill_(GARBAGE[garbage]).to(device, dtype), lse.fill_(GARBAGE[garbage]).to(device)
        assert mine.stride() == out.to(dtype).stride()
        before = bits(mine).clone()
        with no_sync():
            guard_empty_shards(mine, mine_lse, seq_lens, layout, rank)
        for i, length in enumerate(lengths):
            if between(deal(length, *cell), rank, 0, length):
                assert torch.equal(bits(mine)[i], before[i])
                assert torch.equal(bits(mine_lse[i]), bits(torch.full((heads,), GARBAGE[garbage], device=device)))
            else:
                assert not bits(mine)[i].any()
                assert torch.equal(mine_lse[i].cpu(), torch.full((heads,), -torch.inf))


def test_memory_beside_a_view_is_left_alone(device):
    whole, whole_lse = torch.full((3, 6, 8), 7.0, device=device), torch.full((3, 6), 7.0, device=device)
    view, view_lse = whole[1:2, 2:4, 1:4], whole_lse[1:2, 2:4]
    guard_empty_shards(view, view_lse, torch.zeros(1, dtype=torch.int32, device=device), DcpLayout(2, 4), 0)
    assert not view.any() and torch.isneginf(view_lse).all()
    assert whole.sum() == 7 * (whole.numel() - view.numel()) and (whole_lse == 7).sum() == 18 - 2


def test_no_request_is_no_work(device):
    none = torch.empty(0, 4, 8, device=device)
    guard_empty_shards(none, none[..., 0], torch.empty(0, dtype=torch.int32, device=device), DcpLayout(2, 4), 0)


# -- what it is for: the merge ---------------------------------------------------------------------------------------

CELL, LENGTHS, HEADS, DIM = (4, 16), [1, 15, 16, 17, 33, 64, 65, 150], 3, 8


def partials(guarded, device, guard_rank=lambda r: r):
    """Each rank's attention over its own tokens in float64; rows without a token are NaN, as kernels leave them."""
    gen = torch.Generator().manual_seed(5)
    q = torch.randn(len(LENGTHS), HEADS, DIM, generator=gen, dtype=torch.float64)
    k = [torch.randn(n, DIM, generator=gen, dtype=torch.float64) for n in LENGTHS]
    v = [torch.randn(n, DIM, generator=gen, dtype=torch.float64) for n in LENGTHS]
    whole = torch.stack([torch.softmax(q[i] @ k[i].T, -1) @ v[i] for i in range(len(LENGTHS))])
    outs, lses = [], []
    for rank in range(CELL[0]):
        out = torch.full((len(LENGTHS), HEADS, DIM), float("nan"), dtype=torch.float64)
        lse = torch.full((len(LENGTHS), HEADS), float("nan"))
        for i, n in enumerate(LENGTHS):
            mine = between(deal(n, *CELL), rank, 0, n)
            if mine:
                scores = q[i] @ k[i][mine].T
                out[i], lse[i] = torch.softmax(scores, -1) @ v[i][mine], torch.logsumexp(scores, -1)
        out, lse = out.to(device), lse.to(device)
        if guarded:
            guard_empty_shards(out, lse, torch.tensor(LENGTHS, device=device), DcpLayout(*CELL), guard_rank(rank))
        outs.append(out)
        lses.append(lse)
    outs, lses = torch.stack(outs), torch.stack(lses).double()
    merged = (outs * torch.exp(lses - torch.logsumexp(lses, 0)).unsqueeze(-1)).sum(0)
    return merged.cpu(), whole


def test_guarded_shards_merge_to_the_whole_attention(device):
    merged, whole = partials(True, device)
    torch.testing.assert_close(merged, whole, atol=1e-6, rtol=1e-6)  # lse is float32


def test_without_the_guard_or_with_a_wrong_rank_the_merge_is_wrong(device):
    merged, whole = partials(False, device)
    assert merged.isnan().any(-1).any(-1).tolist() == [n <= 48 for n in LENGTHS]
    merged, whole = partials(True, device, lambda rank: (rank + 1) % 4)
    assert not torch.allclose(merged, whole, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("out", "lse", "lens", "message"),
    [
        ((2, 3, 4), (2, 4), 2, "out must be"),
        ((2, 3, 4), (2, 3), 3, "out must be"),
        ((2, 12), (2, 12), 2, "out must be"),
    ],
)
def test_shapes_must_fit(device, out, lse, lens, message):
    lens = torch.zeros(lens, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=message):
        guard_empty_shards(torch.zeros(out, device=device), torch.zeros(lse, device=device), lens, DcpLayout(2, 4), 0)


def test_lse_must_be_float32_and_the_rank_in_the_group(device):
    out, lse, lens = (
        torch.zeros(1, 3, 4, device=device),
        torch.zeros(1, 3, device=device),
        torch.zeros(1, device=device),
    )
    with pytest.raises(ValueError, match=r"lse must be float32, got torch.float16"):
        guard_empty_shards(out, lse.half(), lens.long(), DcpLayout(2, 4), 0)
    with pytest.raises(ValueError, match="rank must be below dcp_size=2, got 2"):
        guard_empty_shards(out, lse, lens.long(), DcpLayout(2, 4), 2)
