"""Grouped queries: the KV write by bytes, and SGLang's own extend and decode over what we wrote and indexed.

The ranks of a DCP group are threads here. Each runs the real functions of SGLang's Triton backend with its kernels; the
answers are compared with softmax attention in float64 over the whole sequence.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from brute_force import between, deal

from sglang_dcp_block.attention import triton_gqa, triton_mla
from sglang_dcp_block.dcp.layout import DcpLayout

HEADS, DIM = 2, 16  # of one rank; one KV head


class Ranks:
    """``size`` threads that meet in collectives. One runs at a time: the interpreter has room for one kernel.

    A rank that doesn't come to a collective breaks it for the others after ``patience_s``.
    """

    def __init__(self, size: int, patience_s: float = 60) -> None:
        self.size, self.meetings = size, 0
        self._local, self._turn, self._sent = threading.local(), threading.Lock(), [None] * size
        self._barrier = threading.Barrier(size, timeout=patience_s)

    @property
    def rank(self) -> int:
        return self._local.rank

    def run(self, work):
        """[work(rank) for every rank]; the first exception is raised again."""
        results, failures = [None] * self.size, []

        def body(rank):
            self._local.rank = rank
            try:
                with self._turn:
                    results[rank] = work(rank)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        return results

    def _meet(self) -> None:
        self._turn.release()
        try:
            self._barrier.wait()
        finally:
            self._turn.acquire()

    def exchange(self, x):
        self._sent[self.rank] = x
        self._meet()
        everyone = list(self._sent)
        self._meet()
        self.meetings += self.rank == 0
        return everyone

    @property
    def group(self):
        """This thread's GroupCoordinator, as far as SGLang's attention uses it."""
        return SimpleNamespace(
            world_size=self.size,
            rank_in_group=self.rank,
            all_gather=lambda x, dim: torch.cat(self.exchange(x), dim),
            all_reduce=lambda x: sum(self.exchange(x.clone())),
        )


class Server:
    """Requests with cached prefixes on P ranks: pools, slots in scattered virtual pages, SGLang's backend of a rank."""

    def __init__(self, monkeypatch, ranks: Ranks, block: int, prefixes: list[int], extends: list[int], context: int):
        from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
        from sglang.srt.layers.attention import triton_backend

        self.ranks, self.layout, self.sglang = ranks, DcpLayout(ranks.size, block), triton_backend.TritonAttnBackend
        self.prefixes, self.extends, self.context = prefixes, extends, context
        self.kernels = {"decode_attention_fwd": decode_attention_fwd, "extend_attention_fwd": extend_attention_fwd}
        for module in (triton_gqa, triton_mla):
            monkeypatch.setattr(module, "active_layout", lambda: self.layout)
            monkeypatch.setattr(module, "active_rank", lambda: ranks.rank)
        monkeypatch.setattr(triton_backend, "get_parallel", lambda: SimpleNamespace(dcp_group=ranks.group))
        monkeypatch.setattr(triton_backend, "use_symmetric_memory", lambda _group: threading.Lock())
        monkeypatch.setenv("SGLANG_DISABLE_LEAN_ATTENTION", "1")

        page = self.layout.virtual_page_size(block)
        pages_each = -(-context // page)
        order = torch.randperm(len(prefixes) * pages_each, generator=torch.Generator().manual_seed(1)) + 1
        table = order.view(len(prefixes), pages_each, 1) * page + torch.arange(page)
        self.req_to_token = table.reshape(len(prefixes), -1).to(torch.int32)
        rows = (len(order) + 1) * block
        self.pools = [torch.full((2, rows, 1, DIM), torch.nan) for _ in range(ranks.size)]
        generator = torch.Generator().manual_seed(2)
        self.q = torch.randn(len(prefixes), context, ranks.size * HEADS, DIM, generator=generator)
        self.k, self.v = torch.randn(2, len(prefixes), context, 1, DIM, generator=generator)

    def backend(self, rank: int):
        """What SGLang's functions read of a backend; its metadata is still to be made."""
        keys, values = self.pools[rank]
        backend = SimpleNamespace(
            dcp_size=self.ranks.size,
            dcp_rank=rank,
            device="cpu",
            max_context_len=self.context,
            req_to_token=self.req_to_token,
            use_mla=False,
            is_draft_runner=False,
            enable_deterministic=False,
            max_kv_splits=2,
            token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values),
            **self.kernels,
        )
        backend._set_kv_buffer = lambda *args: triton_gqa.set_kv_buffer(backend, *args)
        return backend

    @property
    def layer(self):
        return SimpleNamespace(
            layer_id=0,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            qk_head_dim=DIM,
            v_head_dim=DIM,
            scaling=DIM**-0.5,
            k_scale=None,
            v_scale=None,
            logit_cap=0.0,
            logit_capping_method="tanh",
            sliding_window_size=None,
            xai_temperature_len=-1,
        )

    def pick(self, x: torch.Tensor, starts: list[int], lens: list[int]) -> torch.Tensor:
        """[starts[i], starts[i] + lens[i]) of each request, packed."""
        return torch.cat([x[i, s : s + n] for i, (s, n) in enumerate(zip(starts, lens, strict=True))])

    def batch(self, starts: list[int], lens: list[int]):
        return SimpleNamespace(
            out_cache_loc=self.pick(self.req_to_token, starts, lens).long(),
            out_cache_loc_is_physical=False,
            extend_prefix_lens_cpu=starts,
            spec_info=None,
        )

    def write(self, rank: int, starts: list[int], lens: list[int]) -> None:
        k, v = self.pick(self.k, starts, lens), self.pick(self.v, starts, lens)
        triton_gqa.set_kv_buffer(self.backend(rank), self.batch(starts, lens), self.layer, None, k, v)

    def indices(self, backend, lens: list[int]):
        indptr = torch.zeros(len(lens) + 1, dtype=torch.int32)
        return triton_mla.shard_kv_indices(backend, torch.arange(len(lens)), torch.tensor(lens), indptr)

    def extend(self, rank: int, exact_indices: bool = False) -> torch.Tensor:
        """(tokens, HEADS * DIM) of one rank. exact_indices: as many as the rank has rows, and SGLang's own decision."""
        backend = self.backend(rank)
        kv_indptr, kv_indices, _ = self.indices(backend, self.prefixes)
        if exact_indices:
            kv_indices = kv_indices[: int(kv_indptr[-1])]
        backend.forward_metadata = SimpleNamespace(
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            qo_indptr=torch.tensor([0, *self.extends]).cumsum(0).int(),
            max_extend_len=max(self.extends),
            custom_mask=None,
        )
        q, k, v = (self.pick(x, self.prefixes, self.extends) for x in (self.q, self.k, self.v))
        q = q[:, rank * HEADS : (rank + 1) * HEADS]
        batch, args = self.batch(self.prefixes, self.extends), (True, 0.0, None)
        if exact_indices:
            return self.sglang._forward_extend_dcp(backend, q, k, v, self.layer, batch, *args)
        return triton_gqa.forward_extend_dcp(
            self.sglang._forward_extend_dcp, backend, q, k, v, self.layer, batch, *args
        )

    def decode(self, rank: int) -> torch.Tensor:
        """(requests, HEADS * DIM): one more token of each request, written by its owner."""
        starts = [p + n for p, n in zip(self.prefixes, self.extends, strict=True)]
        backend, n, heads = self.backend(rank), len(starts), self.ranks.size * HEADS
        kv_indptr, kv_indices, _ = self.indices(backend, [start + 1 for start in starts])
        backend.forward_metadata = SimpleNamespace(
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            swa_out_cache_loc=None,
            swa_attn_logits=None,
            attn_logits=torch.full((n, heads, 2, DIM), torch.nan),
            attn_lse=torch.full((n, heads, 2), torch.nan),
            num_kv_splits=torch.full((n,), 2, dtype=torch.int32),
            uneven_batch=None,
            **dict.fromkeys(("lean_Mp", "lean_Lp", "lean_Op", "lean_locks")),
        )
        q, k, v = (self.pick(x, starts, [1] * n) for x in (self.q, self.k, self.v))
        q = q[:, rank * HEADS : (rank + 1) * HEADS].reshape(n, -1)
        return self.sglang.forward_decode(backend, q, k, v, self.layer, self.batch(starts, [1] * n))

    def expected(self, rank: int, starts: list[int], lens: list[int]) -> torch.Tensor:
        """Softmax attention of a rank's heads in float64, by position."""
        rows = []
        for i, (start, n) in enumerate(zip(starts, lens, strict=True)):
            q = self.q[i, :, rank * HEADS : (rank + 1) * HEADS].double()
            for t in range(start, start + n):
                weights = torch.softmax(self.k[i, : t + 1, 0].double() @ q[t].T * DIM**-0.5, dim=0)
                rows.append((weights.T @ self.v[i, : t + 1, 0].double()).flatten())
        return torch.stack(rows)


def _prefixes(ranks: int, block: int) -> list[int]:
    cycle = ranks * block
    return [0, 1, block - 1, block, block + 1, cycle - 1, cycle, cycle + 1, cycle + block + 1]


@pytest.mark.parametrize(("size", "block"), [(2, 4), (3, 4), (3, 2), (4, 3), (2, 1)])
def test_extend_and_decode_over_written_shards(monkeypatch, size, block):
    """Prefixes that end at every edge; most leave some rank of some request empty, which the merges must not see."""
    prefixes = _prefixes(size, block)
    extends = [1 + i % (block + 2) for i in range(len(prefixes))]
    ranks = Ranks(size)
    server = Server(monkeypatch, ranks, block, prefixes, extends, 4 * size * block + 8)

    def work(rank):
        server.write(rank, [0] * len(prefixes), prefixes)
        server.write(rank, prefixes, extends)
        return server.extend(rank), server.decode(rank)

    ends = [p + n for p, n in zip(prefixes, extends, strict=True)]
    for rank, (extended, decoded) in enumerate(ranks.run(work)):
        torch.testing.assert_close(extended.double(), server.expected(rank, prefixes, extends), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(decoded.double(), server.expected(rank, ends, [1] * len(ends)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "context"), [(2, 40), (3, 40), (3, 4)])
def test_a_prefix_of_one_block_is_merged_by_the_ranks_without_rows_too(monkeypatch, size, context):
    """Also where the longest request fits into one block, and a rank could never have a row."""
    ranks = Ranks(size)
    server = Server(monkeypatch, ranks, 4, [3, 2], [1, 1], context)

    def work(rank):
        server.write(rank, [0, 0], [4, 3])
        return server.extend(rank)

    for rank, out in enumerate(ranks.run(work)):
        torch.testing.assert_close(out.double(), server.expected(rank, [3, 2], [1, 1]), atol=1e-5, rtol=1e-5)
    assert ranks.meetings > 0


def test_control_sglangs_own_decision_leaves_the_ranks_waiting(monkeypatch):
    ranks = Ranks(2, patience_s=1)
    server = Server(monkeypatch, ranks, 4, [3, 2], [1, 1], 40)

    def work(rank):
        server.write(rank, [0, 0], [4, 3])
        return server.extend(rank, exact_indices=True)

    with pytest.raises(threading.BrokenBarrierError):
        ranks.run(work)


def test_without_a_prefix_nothing_is_exchanged(monkeypatch):
    ranks = Ranks(3)
    server = Server(monkeypatch, ranks, 4, [0, 0], [30, 1], 40)

    for rank, out in enumerate(ranks.run(server.extend)):
        torch.testing.assert_close(out.double(), server.expected(rank, [0, 0], [30, 1]), atol=1e-5, rtol=1e-5)
    assert ranks.meetings == 0


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "block"), [(2, 16), (3, 4), (4, 1)])
def test_keys_and_values_are_written_by_their_owners_alone(monkeypatch, size, block, dtype, heads):
    """Every byte of both pools; sources are views of one projection, slot 0 takes the padding of CUDA graphs."""
    rows, tokens = 4 * block, 3 * block * size
    slots = torch.randperm(rows * size, generator=torch.Generator().manual_seed(3))[:tokens]
    slots[::7] = 0
    projected = torch.randn(tokens, 3 * heads * DIM).to(dtype)
    k, v = (projected[:, i * heads * DIM : (i + 1) * heads * DIM].view(tokens, heads, DIM) for i in (1, 2))
    dealt = deal(rows * size, size, block)
    monkeypatch.setattr(triton_gqa, "active_layout", lambda: DcpLayout(size, block))
    for rank in range(size):
        monkeypatch.setattr(triton_gqa, "active_rank", lambda rank=rank: rank)
        keys, values = torch.full((2, rows, heads, DIM), 7.0).to(dtype)
        pool = SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values)  # noqa: B023
        backend, batch = SimpleNamespace(token_to_kv_pool=pool), SimpleNamespace(out_cache_loc=slots)
        want = torch.full((2, rows, heads, DIM), 7.0).to(dtype)
        for i, slot in enumerate(slots.tolist()):
            if slot and dealt.owner[slot] == rank:
                want[:, dealt.row[slot]] = torch.stack([k[i], v[i]])
        triton_gqa.set_kv_buffer(backend, batch, SimpleNamespace(layer_id=0), None, k, v)
        assert torch.equal(torch.stack([keys, values]).view(torch.uint8), want.view(torch.uint8))


def test_every_rank_gets_as_many_indices(monkeypatch):
    """The rows by simulation, and a size that all ranks agree on: SGLang asks it whether to merge."""
    ranks, block, lens = 3, 4, [1, 4, 12, 13, 5]
    monkeypatch.setattr(triton_mla, "active_layout", lambda: DcpLayout(ranks, block))
    table = torch.arange(24, 24 + 5 * 24, dtype=torch.int32).view(5, 24)
    sizes = set()
    for rank in range(ranks):
        monkeypatch.setattr(triton_mla, "active_rank", lambda rank=rank: rank)
        backend = SimpleNamespace(max_context_len=14, device="cpu", req_to_token=table)
        indptr, rows, _ = triton_mla.shard_kv_indices(
            backend, torch.arange(5), torch.tensor(lens), torch.zeros(6, dtype=torch.int32)
        )
        slots = deal(24 + 5 * 24, ranks, block)
        want = [
            int(slots.row[table[i, t]]) for i, n in enumerate(lens) for t in between(deal(n, ranks, block), rank, 0, n)
        ]
        assert rows[: int(indptr[-1])].tolist() == want
        sizes.add(rows.numel())
    assert len(sizes) == 1
