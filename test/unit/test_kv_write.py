"""The KV write against the simulation, with canaries in every row that must not change."""

import mmap
import multiprocessing
import signal

import numpy as np
import pytest
import torch
from brute_force import deal
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.kv_write import check_pool_rows, write_mla_kv

NOPE, ROPE = 10, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]


def values(shape, dtype, device, seed=0):
    x = torch.randint(1, 120, shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to(device)


def expected_pool(pool, loc, nope, rope, cell, rank, skip=0):
    """The pool after the write, row by row: the slots of a rank are its rows in order."""
    ranks, block = cell
    dealt = deal(pool.shape[0] * ranks, ranks, block)
    want = pool.clone()
    for i, v in enumerate(loc.tolist()):
        if v >= 0 and v != skip and dealt.owner[v] == rank:
            row = want[int(dealt.row[v])].view(-1)
            row[:NOPE] = nope[i].reshape(-1)
            if rope is not None:
                row[NOPE : NOPE + rope.shape[-1]] = rope[i].reshape(-1)
    return want


cells = st.sampled_from([(1, 1), (2, 1), (3, 2), (2, 16), (4, 3), (8, 64), (4, 128)])


@given(
    cells,
    st.integers(1, 40),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.int32, torch.int64]),
    st.booleans(),
    st.data(),
)
def test_owned_rows_are_written_and_no_other(device, no_sync, cell, tokens, dtype, loc_dtype, flat, data):
    """Sources are views of one wider tensor, as the model's projections are; the pool is 2-D or 3-D."""
    layout, rank = DcpLayout(*cell), data.draw(st.integers(0, cell[0] - 1))
    rows = 2 * cell[1] * (64 // cell[1] + 1)
    slots = np.random.default_rng(tokens).permutation(rows * cell[0] - 1)[:tokens] + 1
    slots[:: data.draw(st.integers(2, 9))] = data.draw(st.sampled_from([0, -1, -100]))
    loc = torch.tensor(slots, dtype=loc_dtype, device=device)
    fused = values((tokens, 1, 4 + NOPE + 3 + ROPE), dtype, device)
    nope, rope = fused[..., 4 : 4 + NOPE], fused[..., -ROPE:]
    pool = values((rows, 1, NOPE + ROPE + 2), dtype, device, seed=1)
    if flat:
        nope, rope, pool = nope.squeeze(1), rope.squeeze(1), pool.squeeze(1)
    want = expected_pool(pool, loc, nope, rope, cell, rank)
    with no_sync():
        write_mla_kv(pool, loc, nope, rope, layout, rank)
    assert torch.equal(pool, want)


@pytest.mark.parametrize("cell", [(2, 1), (4, 16), (8, 8)])
def test_the_ranks_together_hold_every_token_once(device, cell):
    ranks, block = cell
    layout, rows = DcpLayout(*cell), 2 * block
    loc = torch.arange(1, rows * ranks, device=device)
    nope = loc[:, None].expand(-1, NOPE).float()
    rope = -loc[:, None].expand(-1, ROPE).float()
    seen = []
    for rank in range(ranks):
        pool = torch.zeros(rows, NOPE + ROPE, device=device)
        write_mla_kv(pool, loc, nope.contiguous(), rope.contiguous(), layout, rank)
        assert torch.equal(pool[:, :1].expand(-1, NOPE), pool[:, :NOPE])
        assert torch.equal(-pool[:, :1].expand(-1, ROPE), pool[:, NOPE:])
        seen += [int(v) for v in pool[:, 0] if v]
    assert sorted(seen) == loc.tolist()


@pytest.mark.parametrize("wrong", ["rank", "block", "size", "slot"])
def test_a_wrong_rule_is_noticed(device, wrong):
    loc = torch.arange(1, 200, device=device)
    nope, rope = values((199, NOPE), torch.float32, device), values((199, ROPE), torch.float32, device, seed=2)
    pool = torch.zeros(64, NOPE + ROPE, device=device)
    want = expected_pool(pool, loc, nope, rope, (4, 16), 1)
    layout = {"block": DcpLayout(4, 32), "size": DcpLayout(2, 16)}.get(wrong, DcpLayout(4, 16))
    if wrong == "size":
        pool = torch.zeros(128, NOPE + ROPE, device=device)
    write_mla_kv(pool, loc + (wrong == "slot"), nope, rope, layout, 2 if wrong == "rank" else 1)
    assert not torch.equal(pool[:64], want)


@pytest.mark.parametrize("skip", [0, 5, -1])
def test_the_reserved_slot_is_the_callers_choice(device, skip):
    loc = torch.tensor([0, 5, 6], device=device)
    nope, rope = values((3, NOPE), torch.float32, device), values((3, ROPE), torch.float32, device, seed=2)
    for rank in range(2):
        pool = torch.full((8, NOPE + ROPE), -9.0, device=device)
        want = expected_pool(pool, loc, nope, rope, (2, 4), rank, skip)
        write_mla_kv(pool, loc, nope, rope, DcpLayout(2, 4), rank, reserved_skip_index=skip)
        assert torch.equal(pool, want)


@pytest.mark.parametrize("no_rope", [None, torch.empty(3, 1, 0)])
def test_rows_without_a_rope_part_obey_the_rule_too(device, no_rope):
    loc, nope = torch.tensor([0, 5, 6], device=device), values((3, 1, NOPE), torch.float32, device)
    rope = None if no_rope is None else no_rope.to(device)
    for rank in range(2):
        pool = torch.full((8, 1, NOPE + 1), -9.0, device=device)
        want = expected_pool(pool, loc, nope, None, (2, 4), rank)
        write_mla_kv(pool, loc, nope, rope, DcpLayout(2, 4), rank)
        assert torch.equal(pool, want)


def test_no_token_is_no_work(device):
    pool, none = torch.ones(8, 3, device=device), torch.empty(0, device=device)
    write_mla_kv(pool, none.long(), none.view(0, 2), none.view(0, 1), DcpLayout(2, 4), 0)
    assert torch.equal(pool, torch.ones(8, 3, device=device))


def _write_from_guarded_memory(protected_token: int) -> None:
    """Child process: token i's source lies in its own page; a page of one token can't be read."""
    import ctypes
    import faulthandler

    faulthandler.disable()  # the fault is what the control waits for, not news
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 4 * page)
    x = torch.frombuffer(memory, dtype=torch.float32).view(4, page // 4)
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(x[protected_token].data_ptr()), page, 0) == 0
    # The interpreter copies each argument's storage onto itself, so the kernel gets a one-row head of the memory.
    head = torch.frombuffer(memory, dtype=torch.float32, count=NOPE + ROPE)
    from sglang_dcp_block.mem_cache import kv_write

    loc = torch.tensor([1, 2, 3, 4])  # P = 2, B = 2: rank 1 owns slots 2 and 3 only
    kv_write._write_mla_kv_kernel[(4,)](
        torch.zeros(8, NOPE + ROPE),
        loc,
        head[:NOPE],
        head[NOPE:],
        0,
        NOPE + ROPE,
        page // 4,
        page // 4,
        NOPE_DIM=NOPE,
        ROPE_DIM=ROPE,
        NOPE_TILE=16,
        ROPE_TILE=8,
        RANK=1,
        P=2,
        B=2,
    )


@pytest.mark.parametrize(("token", "owned"), [(3, False), (1, True), (2, True)])
def test_sources_of_other_ranks_tokens_are_not_even_read(device, token, owned):
    """Unreadable memory under one token: harmless if another rank owns it, and (control) fatal if this rank does."""
    if device == "cuda":
        pytest.skip("memory protection is the host's; the kernel's text is the same")
    child = multiprocessing.get_context("fork").Process(target=_write_from_guarded_memory, args=(token,))
    child.start()
    child.join(60)
    assert child.exitcode == (-signal.SIGSEGV if owned else 0)


# -- the bound that SGLang checks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", [(2, 1), (3, 2), (8, 64), (4, 16)])
def test_slots_inside_sglangs_bound_are_rows_inside_the_pool(device, monkeypatch, cell):
    """SGLang checks slots against rows * P. Just below it is the last row; at it, the check raises."""
    from sglang.srt.utils.async_probe import maybe_detect_oob

    monkeypatch.setenv("SGLANG_ENABLE_ASYNC_ASSERT", "1")
    ranks, block = cell
    rows = 128 if 128 % block == 0 else 6 * block
    bound = rows * ranks
    last = torch.tensor([bound - 1])
    maybe_detect_oob(last, 0, bound, "pool")
    for bad in (bound, -1):
        with pytest.raises(RuntimeError):
            maybe_detect_oob(torch.tensor([bad]), 0, bound, "pool")
    pool = torch.zeros(rows, NOPE + ROPE, device=device)
    one = torch.ones(1, NOPE, device=device), torch.ones(1, ROPE, device=device)
    write_mla_kv(pool, last.to(device), *one, DcpLayout(*cell), ranks - 1)
    assert pool[-1].all() and not pool[:-1].any()


@pytest.mark.parametrize("cell", [(1, 1), (2, 1), (3, 2), (2, 16), (8, 64)])
def test_pools_whose_bound_would_not_hold_are_refused(cell):
    ranks, block = cell
    for rows in range(1, 3 * block + 2):
        past_the_end = int(deal(rows * ranks, ranks, block).row.max()) >= rows
        assert past_the_end == bool(rows % block and ranks > 1)
        if past_the_end:
            with pytest.raises(ValueError, match=f"a KV pool of {rows} rows must be a multiple of .*{block}"):
                check_pool_rows(rows, DcpLayout(*cell))
        else:
            check_pool_rows(rows, DcpLayout(*cell))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nope": torch.zeros(2, 2, NOPE)}, "k_nope must be"),
        ({"nope": torch.zeros(NOPE, 2).T}, "last stride 1"),
        ({"rope": torch.zeros(1, ROPE)}, r"k_rope must be \(2, D\)"),
        ({"rope": torch.zeros(2, ROPE).half()}, "must have the pool's dtype torch.float32"),
        ({"rope": torch.zeros(2, ROPE + 1)}, "must fit a pool row of 15"),
        ({"loc": torch.zeros(4, dtype=torch.int64)[::2]}, "loc must be a contiguous vector"),
        ({"pool": torch.zeros(7, NOPE + ROPE)}, "a KV pool of 7 rows must be a multiple of dcp_block_size=4"),
        ({"rank": 3}, "rank must be below dcp_size=2, got 3"),
    ],
)
def test_refusals(change, message):
    args = {
        "pool": torch.zeros(8, NOPE + ROPE),
        "loc": torch.tensor([1, 2]),
        "nope": torch.zeros(2, NOPE),
        "rope": torch.zeros(2, ROPE),
        "rank": 0,
        **change,
    }
    with pytest.raises(ValueError, match=message):
        write_mla_kv(args["pool"], args["loc"], args["nope"], args["rope"], DcpLayout(2, 4), args["rank"])
