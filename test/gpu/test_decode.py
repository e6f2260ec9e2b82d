"""MLA decode over the shards of all ranks, merged, against float64 attention over the same KV.

The yardstick is SGLang's own DCP1 decode of the same requests at the same dtype in the same run: its error against
float64 is what a dtype costs. With the Triton backend a sharded decode costs no more; with FlashInfer it rounds the
partial results once more.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import kit
import pytest
import torch
from brute_force import deal_pages
from kit import DEVICE, LORA

from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp.layout import DcpLayout

ON_GPU = DEVICE.type == "cuda"

#: Times stock's error: some room for the worst row of some thousand.
ALLOWED = 1.05
#: And where SGLang's own path rounds partial results to the working dtype before the merge: that adds an error of the
#: size of the two that DCP1 has (softmax weights, result), sqrt(3 / 2).
ALLOWED_ROUNDED = 1.35
#: Over FP8 rows, where the yardstick is stock over these rows in the working dtype: its kernel rounds as often as ours,
#: but in another order of rows, and the worst of some hundred results hangs on the luck of a few weights.
ALLOWED_WIDENED = 1.35
#: Of the mean error over all requests and heads, where luck is evened out.
ALLOWED_MEAN = 1.15


class Cell(NamedTuple):
    backend: str
    dcp_size: int
    block: int
    heads: int
    dtype: torch.dtype = kit.WORK
    rotated_page: int = 0  # rows; 0 is without rotation

    @property
    def layout(self) -> DcpLayout:
        plain = DcpLayout(self.dcp_size, self.block)
        return plain.rotated(self.rotated_page) if self.rotated_page else plain

    @property
    def allowed(self) -> float:
        return ALLOWED_ROUNDED if self.backend == "flashinfer" and self.block == 1 else ALLOWED

    def __str__(self) -> str:
        rotated = f"-rotated{self.rotated_page}" if self.rotated_page else ""
        return f"{self.backend}-P{self.dcp_size}-B{self.block}-H{self.heads}-{str(self.dtype).split('.')[-1]}{rotated}"


def cells() -> list[Cell]:
    if not ON_GPU:
        return [Cell("triton", 2, 4, 16), Cell("triton", 2, 4, 16, rotated_page=8)]
    found = [
        Cell(backend, p, b, 16 * p) for backend in ("triton", "flashinfer") for p in (2, 4, 8) for b in (1, 16, 64)
    ]
    found += [Cell(backend, 8, 64, h) for backend in ("triton", "flashinfer") for h in (16, 32, 64)]
    found += [Cell("triton", 4, 256, 64), Cell("flashinfer", 4, 256, 64), Cell("triton", 2, 64, 16)]
    found += [Cell(backend, p, 64, 16 * p, kit.FP8) for backend in ("triton", "flashinfer") for p in (2, 8)]
    found += [Cell("triton", 4, 1, 64, kit.FP8)]
    found += [Cell("triton", p, b, 16 * p, rotated_page=64) for p in (2, 4, 8) for b in (16, 64)]
    found += [Cell("triton", 8, 64, 16, rotated_page=128), Cell("triton", 8, 16, 16, kit.FP8, rotated_page=64)]
    return found


def fp8_cells() -> list[Cell]:
    if not ON_GPU:
        return [Cell("triton", 2, 4, 16, kit.FP8)]
    return [
        Cell(backend, p, b, 16 * p, kit.FP8)
        for backend in ("triton", "flashinfer")
        for p in (2, 4, 8)
        for b in (1, 16, 64)
    ]


def needs_gpu(cell: Cell) -> list:
    return [pytest.mark.cuda_only] if cell.backend == "flashinfer" else []


def over(found: list[Cell]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("cell", [pytest.param(c, marks=needs_gpu(c), id=str(c)) for c in found])


every_cell = over(cells())


def partials(cell: Cell, batch: kit.Batch, q: torch.Tensor, how: str = "a2a") -> tuple[torch.Tensor, torch.Tensor]:
    if cell.backend == "flashinfer":
        return kit.flashinfer_partials(batch, q)
    return kit.triton_partials(batch, q, how)


def tokens_on(batch: kit.Batch, rank: int) -> list[int]:
    """Tokens of each request on ``rank``; under rotation by dealing out all slots of the pools, page by page."""
    layout = batch.layout
    if not layout.is_rotated:
        return [layout.local_len(n, rank) for n in batch.lens]
    pages = batch.pools[0].shape[0] // layout.page_rows
    owner = deal_pages(pages, layout.dcp_size, layout.block_size, layout.page_rows).owner
    slots = batch.table.cpu().numpy()
    return [int((owner[slots[i, :n]] == rank).sum()) for i, n in enumerate(batch.lens)]


@every_cell
def test_merged_decode_is_as_exact_as_stock_dcp1(cell: Cell, report) -> None:
    lens = kit.lengths_around(cell.layout, 131072 if ON_GPU else 60)
    page_size = kit.page_size_of(cell.layout)
    batch = kit.make_batch(cell.layout, lens, page_size=page_size, dtype=cell.dtype, seed=cell.dcp_size)
    q = kit.random_q(len(lens), cell.heads, seed=cell.block)
    want, want_lse = kit.attention_f64(q, batch.kv)
    stock = kit.difference(kit.stock_decode(kit.single(batch), q, cell.backend), want)
    base_e = cell.backend == "triton"
    errors = {}
    for how in ("ag_rs", "a2a"):
        outs, lses = partials(cell, batch, q, how)
        errors[how] = kit.difference(kit.merge(outs, lses, base_e, how), want)

    scale = 1.0 if base_e else kit.LN2
    lse_error = float((torch.logsumexp(lses.double() * scale, dim=0) - want_lse).abs().max())
    report(
        cell=str(cell),
        stock_worst=stock.worst,
        stock_mean=stock.mean,
        **{f"{how}_worst": e.worst for how, e in errors.items()},
        **{f"{how}_mean": e.mean for how, e in errors.items()},
        lse_error=lse_error,
    )
    for how, error in errors.items():
        assert error.worst <= cell.allowed * stock.worst, f"{how}: {error}, stock DCP1: {stock}"
    assert lse_error < (0.3 if cell.dtype == kit.FP8 else 0.02)

    empty = torch.tensor([tokens_on(batch, r) for r in batch.ranks], device=DEVICE) == 0
    assert empty.any() and (outs[empty] == 0).all() and (lses[empty] == -math.inf).all()
    assert not outs.isnan().any() and not lses.isnan().any()


@pytest.mark.cuda_only
@pytest.mark.parametrize(
    ("backend", "layout"),
    [
        *(("triton", layout) for layout in (DcpLayout(2, 64), DcpLayout(8, 64), DcpLayout(8, 1))),
        *(("flashinfer", layout) for layout in (DcpLayout(2, 64), DcpLayout(8, 64))),
    ],
    ids=str,
)
def test_partial_results_lose_nothing_before_the_merge(backend: str, layout: DcpLayout, report) -> None:
    """The error is that of stock DCP1 with both merges. The control: partial results rounded to bfloat16."""
    lens = kit.lengths_around(layout, 131072)
    batch = kit.make_batch(layout, lens, page_size=64, seed=layout.dcp_size)
    q = kit.random_q(len(lens), 16 * layout.dcp_size, seed=3)
    want, _ = kit.attention_f64(q, batch.kv)
    stock = kit.difference(kit.stock_decode(kit.single(batch), q, backend), want)
    base_e = backend == "triton"
    errors = {}
    for how in ("ag_rs", "a2a"):
        outs, lses = kit.triton_partials(batch, q, how) if base_e else kit.flashinfer_partials(batch, q)
        assert outs.dtype == (torch.float32 if base_e and how == "ag_rs" else torch.float16)
        errors[how] = kit.difference(kit.merge(outs, lses, base_e, how), want)
    rounded = kit.difference(kit.merge(outs.to(kit.WORK), lses, base_e), want)
    report(
        backend=backend,
        layout=str(layout),
        stock_worst=stock.worst,
        stock_mean=stock.mean,
        rounded_worst=rounded.worst,
        rounded_mean=rounded.mean,
        **{f"{how}_worst": e.worst for how, e in errors.items()},
        **{f"{how}_mean": e.mean for how, e in errors.items()},
    )
    for how, error in errors.items():
        assert error.worst <= 1.05 * stock.worst and error.mean <= 1.02 * stock.mean, (how, error, stock)
    assert rounded.mean > 1.05 * max(e.mean for e in errors.values())


def zero_unowned(batch: kit.Batch) -> None:
    """Unowned rows hold NaN, which would give a wrong reader away by itself."""
    for pool in batch.pools:
        kit.as_bytes_if_fp8(pool)[pool.isnan()] = 0


@every_cell
def test_a_reader_with_another_layout_is_noticed(cell: Cell) -> None:
    """The control: rows written by one rule and read by another must not pass the check above.

    Full cycles hold the same rows under every rule, so the request has to end inside its first one.
    """
    lens = [cell.layout.cycle // 2 if cell.block > 1 else cell.dcp_size]
    batch = kit.make_batch(cell.layout, lens, page_size=kit.page_size_of(cell.layout), dtype=cell.dtype)
    zero_unowned(batch)
    q = kit.random_q(len(lens), cell.heads, seed=1)
    want, _ = kit.attention_f64(q, batch.kv)
    other = cell.layout.plain if cell.layout.is_rotated else DcpLayout(cell.dcp_size, 2 if cell.block == 1 else 1)
    outs, lses = partials(cell, replace(batch, layout=other), q)
    error = kit.difference(kit.merge(outs, lses, cell.backend == "triton"), want)
    assert error.worst > 0.2, f"a wrong layout passed: {error}"


@over(fp8_cells())
def test_fp8_rows_are_widened_and_nothing_else_is_rounded(cell: Cell, report) -> None:
    """Against float64 over the very rows, and as exact as stock over these rows in the working dtype."""
    lens = kit.lengths_around(cell.layout, 5000 if ON_GPU else 60)
    batch = kit.make_batch(cell.layout, lens, page_size=kit.page_size_of(cell.layout), dtype=kit.FP8, seed=11)
    q = kit.random_q(len(lens), cell.heads, seed=cell.block)
    want, want_lse = kit.attention_f64(q, batch.kv)
    stock = kit.difference(kit.stock_decode(kit.single(batch), q, cell.backend), want)
    widened = kit.difference(kit.stock_decode(kit.single(batch, kit.WORK), q, cell.backend), want)
    errors = {}
    for how in ("ag_rs", "a2a"):
        outs, lses = partials(cell, batch, q, how)
        errors[how] = kit.difference(kit.merge(outs, lses, cell.backend == "triton", how), want)
    lse = torch.logsumexp(lses.double() * (1.0 if cell.backend == "triton" else kit.LN2), dim=0)
    report(
        cell=str(cell),
        stock_worst=stock.worst,
        widened_worst=widened.worst,
        widened_mean=widened.mean,
        **{f"{how}_worst": e.worst for how, e in errors.items()},
        **{f"{how}_mean": e.mean for how, e in errors.items()},
        lse_error=float((lse - want_lse).abs().max()),
    )
    # Stock's Triton rounds queries and weights to FP8, stock's FlashInfer widens the rows: the second yardstick again.
    worst = cell.allowed if cell.backend == "triton" else ALLOWED_WIDENED
    mean = max(ALLOWED_MEAN, cell.allowed)
    for how, error in errors.items():
        assert error.worst <= worst * stock.worst, f"{how}: {error}, stock DCP1: {stock}"
        assert error.worst <= ALLOWED_WIDENED * widened.worst, f"{how}: {error}, over widened rows: {widened}"
        assert error.mean <= mean * widened.mean, f"{how}: {error}, over widened rows: {widened}"
    assert (lse - want_lse).abs().max() < 0.02


@pytest.mark.parametrize("wrong", ["row", "length"])
@over([c for c in fp8_cells() if (c.dcp_size, c.block) in {(2, 4), (2, 64), (4, 16)}])
def test_a_wrong_fp8_row_or_length_is_noticed(cell: Cell, wrong: str) -> None:
    """One row further in a rank's pool, or a request without its last token: far above what the check allows."""
    b, c = cell.layout.block_size, cell.layout.cycle
    # Of two tokens neither may be missing; of hundreds one weighs little.
    batch = kit.make_batch(cell.layout, [2, b, c - 1, c + 1], page_size=kit.page_size_of(cell.layout), dtype=kit.FP8)
    zero_unowned(batch)
    q = kit.random_q(len(batch.lens), cell.heads, seed=1)
    want, _ = kit.attention_f64(q, batch.kv)
    if wrong == "row":
        moved = kit.as_bytes_if_fp8(batch.pools[0]).roll(1, 0).view(kit.FP8)
        batch = replace(batch, pools=[moved, *batch.pools[1:]])
    else:
        batch = replace(batch, lens=[n - 1 for n in batch.lens], seq_lens=batch.seq_lens - 1)
    outs, lses = partials(cell, batch, q)
    error = kit.difference(kit.merge(outs, lses, cell.backend == "triton"), want)
    assert error.worst > 0.1, error


class Growing:
    """Requests in a CUDA graph's fixed buffers: ``slots`` rows of which the last ones are padding."""

    def __init__(self, layout: DcpLayout, lens: list[int], slots: int, steps: int, heads: int) -> None:
        self.layout, self.steps, self.real = layout, steps, len(lens)
        final = [n + steps for n in lens]
        # Row 0 of SGLang's table belongs to nobody and reads as slot 0.
        table, rows = kit.random_table(layout, final, 64, seed=5)
        self.table = torch.zeros(len(lens) + 1, table.shape[1], dtype=torch.int32, device=DEVICE)
        self.table[1:] = table
        self.kv = [kit.random_kv(n, 50 + i).to(kit.WORK) for i, n in enumerate(final)]
        self.lens = list(lens)
        self.pools = [torch.full((rows, 1, kit.DIM), math.nan, dtype=kit.WORK, device=DEVICE) for _ in self.ranks]
        for pool in self.pools:
            pool[0] = 0  # a padding row of rank 0 reads slot 0
        self.write(0, lens)
        # The static inputs of the graph.
        self.req_rows = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        self.seq_lens = torch.ones(slots, dtype=torch.int64, device=DEVICE)
        self.loc = torch.zeros(slots, dtype=torch.int64, device=DEVICE)
        self.q = torch.zeros(slots, heads, kit.DIM, dtype=kit.WORK, device=DEVICE)
        self.new_kv = torch.zeros(slots, 1, kit.DIM, dtype=kit.WORK, device=DEVICE)

    @property
    def ranks(self) -> range:
        return range(self.layout.dcp_size)

    def write(self, start: int, ends: list[int]) -> None:
        slots = torch.cat([self.table[i + 1, start:n] for i, n in enumerate(ends)])
        kv = torch.cat([kv[start:n] for kv, n in zip(self.kv, ends, strict=True)])
        for rank, pool in enumerate(self.pools):
            kit.write_mla_kv(pool, slots, kv[:, :LORA], kv[:, LORA:], self.layout, rank)

    def next_token(self, seed: int) -> torch.Tensor:
        """Fill the inputs with one new token per request; returns what float64 says."""
        self.lens = [n + 1 for n in self.lens]
        n = self.real
        self.req_rows[:n] = torch.arange(1, n + 1, device=DEVICE)
        self.seq_lens[:n] = torch.tensor(self.lens, device=DEVICE)
        for i, length in enumerate(self.lens):
            self.loc[i] = self.table[i + 1, length - 1]
            self.new_kv[i, 0] = self.kv[i][length - 1]
        self.q[:n] = kit.random_q(n, self.q.shape[1], seed)
        return kit.attention_f64(self.q[:n], [kv[:length] for kv, length in zip(self.kv, self.lens, strict=True)])[0]


@pytest.mark.cuda_only
@pytest.mark.parametrize("layout", [DcpLayout(2, 64), DcpLayout(8, 64), DcpLayout(4, 16), DcpLayout(8, 1)], ids=str)
def test_graph_replays_follow_growing_requests(layout: DcpLayout, report) -> None:
    """Write, index, attention and guard of every rank in one CUDA graph each; padded rows; blocks are crossed."""
    b, c = layout.block_size, layout.cycle
    lens = [max(1, b - 2), c - 2 if c > 2 else 1, c + b - 1, 3000, 1]
    heads, slots, steps = 16, 8, 4
    g = Growing(layout, lens, slots, steps, heads)
    backends = [kit.TritonRank(layout, r, g.pools[r], g.table, heads, g.table.shape[1]) for r in g.ranks]
    # TritonRank sizes its buffers by the table's rows; a graph has as many as slots.
    for backend in backends:
        backend.kv_indptr = torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE)
        backend.kv_indices = torch.zeros(
            slots * layout.local_len(backend.max_context_len, 0), dtype=torch.int64, device=DEVICE
        )
        meta = backend.forward_metadata
        meta.kv_indptr, meta.kv_indices = backend.kv_indptr, backend.kv_indices
        meta.attn_logits = torch.full((slots, heads, backend.max_kv_splits, LORA), math.nan, device=DEVICE)
        meta.attn_lse = torch.full((slots, heads, backend.max_kv_splits), 9.0, device=DEVICE)  # stale
        meta.num_kv_splits = torch.ones(slots, dtype=torch.int32, device=DEVICE)
    results: list[tuple[torch.Tensor, torch.Tensor]] = [None] * layout.dcp_size

    def body(rank: int) -> None:
        backend = backends[rank]
        local = backend.index(g.req_rows, g.seq_lens)
        backend.split(local)
        results[rank] = backend.attend(g.q, g.seq_lens, new=(g.loc, g.new_kv[..., :LORA], g.new_kv[..., LORA:]))

    graphs = [kit.capture(lambda r=r: body(r)) for r in g.ranks]  # with padding only, as SGLang captures
    worst, eager_worst = 0.0, 0.0
    for number in range(steps):
        want = g.next_token(seed=number)
        for graph in graphs:
            graph.replay()
        outs, lses = (torch.stack([x[i] for x in results]) for i in (0, 1))
        got = kit.merge(outs, lses, base_e=True)[: g.real]
        worst = max(worst, kit.difference(got, want).worst)
        one = kit.Batch(layout, 64, g.lens, g.table[1:], g.req_rows[: g.real] - 1, g.seq_lens[: g.real], g.kv, g.pools)
        eager = kit.merge(*kit.triton_partials(one, g.q[: g.real]), base_e=True)
        eager_worst = max(eager_worst, kit.difference(eager, want).worst)
        for rank in g.ranks:
            for i, length in enumerate([*g.lens, *[1] * (slots - g.real)]):
                if layout.local_len(length, rank) == 0:
                    assert (outs[rank, i] == 0).all() and (lses[rank, i] == -math.inf).all(), (number, rank, i)
    report(layout=str(layout), graph_worst=worst, eager_worst=eager_worst)
    assert worst <= max(1.05 * eager_worst, 1e-5) and worst < 0.01


@pytest.mark.cuda_only
@pytest.mark.parametrize("how", ["plan", "replan"])
@pytest.mark.parametrize("layout", [DcpLayout(2, 64), DcpLayout(8, 64)], ids=str)
def test_flashinfer_graph_replays_follow_new_plans(layout: DcpLayout, how: str, report) -> None:
    """Captured over one-token requests, replayed after another plan: FlashInfer's, or SGLang's short one."""
    lens = [1, 63, layout.cycle + 1, 5000, 449]
    heads, slots = 16, 8
    batch = kit.make_batch(layout, lens, page_size=64, seed=2)
    q = torch.zeros(slots, heads, kit.DIM, dtype=kit.WORK, device=DEVICE)
    q[: len(lens)] = kit.random_q(len(lens), heads, 3)
    want, _ = kit.attention_f64(q[: len(lens)], batch.kv)
    seq_lens = torch.ones(slots, dtype=torch.int64, device=DEVICE)
    outs, lses = [], []
    for rank in batch.ranks:
        buffers = {
            "qo_indptr": torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE),
            "kv_indptr": torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE),
            "kv_indices": torch.zeros(slots * 8192, dtype=torch.int32, device=DEVICE),
            "kv_len_arr": torch.zeros(slots, dtype=torch.int32, device=DEVICE),
        }
        backend = kit.FlashInferRank(batch.pools[rank], heads, hooked=True, graph=buffers)
        seq_lens.fill_(1)
        local = layout.local_len(seq_lens, rank)
        indptr = torch.zeros(slots + 1, dtype=torch.int32, device=DEVICE)
        torch.cumsum(local, dim=0, out=indptr[1:])
        backend.plan(indptr, torch.zeros(int(indptr[-1]), dtype=torch.int32, device=DEVICE), local)
        result: list[torch.Tensor] = []

        def body(backend=backend, rank=rank, result=result) -> None:
            out, lse = backend.attend(q)
            guard_empty_shards(out, lse, seq_lens, layout, rank)
            result[:] = [out, lse]

        graph = kit.capture(body)
        seq_lens[: len(lens)] = batch.seq_lens
        indptr_real, rows, local_real = kit.shard_rows(batch, rank)
        padding = slots - len(lens)
        pad_local = layout.local_len(torch.ones(padding, dtype=torch.int64, device=DEVICE), rank)
        local = torch.cat([local_real, pad_local])
        indptr[: len(lens) + 1] = indptr_real
        indptr[len(lens) + 1 :] = indptr_real[-1] + pad_local.cumsum(0)
        rows = torch.cat([rows, torch.zeros(int(pad_local.sum()), dtype=torch.int32, device=DEVICE)])
        getattr(backend, how)(indptr, rows, local)
        graph.replay()
        torch.cuda.synchronize()
        assert result[0].dtype == torch.float16
        outs.append(result[0].clone())
        lses.append(result[1].clone())
    got = kit.merge(torch.stack(outs), torch.stack(lses), base_e=False)[: len(lens)]
    eager = kit.merge(*kit.flashinfer_partials(batch, q[: len(lens)]), base_e=False)
    error, eager_error = kit.difference(got, want), kit.difference(eager, want)
    report(layout=str(layout), how=how, graph_worst=error.worst, eager_worst=eager_error.worst)
    assert error.worst <= 1.1 * eager_error.worst


@pytest.mark.cuda_only
def test_what_flashinfer_leaves_for_an_empty_shard(report) -> None:
    """Measured, not required: does the guard matter for FlashInfer's own handling of a request without KV?"""
    layout = DcpLayout(8, 64)
    batch = kit.make_batch(layout, [65, 5, 700], page_size=64)
    q = kit.random_q(3, 128, 0)
    backend = kit.FlashInferRank(batch.pools[3], 128, hooked=True)
    backend.plan(*kit.shard_rows(batch, 3))
    out, lse = backend.attend(q)
    empty = [i for i, n in enumerate(batch.lens) if layout.local_len(n, 3) == 0]
    report(
        out_is_zero=bool((out[empty] == 0).all()),
        out_has_nan=bool(out[empty].isnan().any()),
        lse=sorted({str(x) for x in lse[empty].flatten().tolist()})[:4],
    )
    guard_empty_shards(out, lse, batch.seq_lens, layout, 3)
    assert empty == [0, 1] and (out[empty] == 0).all() and (lse[empty] == -math.inf).all()
