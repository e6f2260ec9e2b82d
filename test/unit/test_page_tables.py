"""Backends that take a page table (TRT-LLM MLA, CuTe DSL MLA): what SGLang builds for them, read under the block rule.

They need a Blackwell GPU and are refused with blocks (server_args.REFUSALS, attention-backend). These tests say what is
known without one. SGLang's own method builds the table; which rows a rank must read comes from dealing tokens out.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from brute_force import deal, edge_lengths

from sglang_dcp_block import dcp_hooks, runtime
from sglang_dcp_block.dcp.layout import DcpLayout

PAGE = 64
SIZES = [(ranks, block) for ranks in (2, 3, 4, 8) for block in (1, 16, 32, 64)]


@pytest.fixture
def backend(monkeypatch):
    """TRTLLMMLABackend's methods of a rank, on a table of requests whose virtual pages lie anywhere."""
    from sglang.srt.layers.attention import trtllm_mla_backend as module

    monkeypatch.setattr(module, "get_dcp_lens", dcp_hooks.get_dcp_lens)

    def make(layout: DcpLayout, rank: int, req_to_token: torch.Tensor) -> SimpleNamespace:
        parallel = SimpleNamespace(dcp_enabled=True, dcp_size=layout.dcp_size, dcp_rank=rank)
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
        monkeypatch.setattr(runtime, "_layout", layout)
        own = SimpleNamespace(
            page_size=PAGE, req_to_token=req_to_token, kv_index_translator=SimpleNamespace(full_v2p_table=None)
        )
        for method in ("_get_dcp_local_seq_lens", "_get_dcp_local_max_seq_len", "_fill_dcp_block_kv_indices"):
            setattr(own, method, getattr(module.TRTLLMMLABackend, method).__get__(own))
        return own

    return make


def requests(ranks: int, lengths: list[int], seed: int) -> tuple[torch.Tensor, list[np.ndarray]]:
    """req_to_token of one request a row, and each request's virtual pages. Unused entries name a page of nobody."""
    rng, width = np.random.default_rng(seed), PAGE * ranks
    counts = [-(-n // width) for n in lengths]
    ids = rng.permutation(np.arange(1, sum(counts) + 1))
    table = np.full((len(lengths), max(counts) * width + width), 10**6, np.int32)
    pages = np.split(ids, np.cumsum(counts)[:-1])
    for i, (n, own) in enumerate(zip(lengths, pages, strict=True)):
        slots = (own[:, None] * width + np.arange(width)).ravel()
        table[i, :n] = slots[:n]
    return torch.from_numpy(table), pages


def rows_read(own: SimpleNamespace, lengths: list[int], local_lens: torch.Tensor) -> list[list[int]]:
    """Pool rows that a kernel reads for each request: as many as ``local_lens``, page after page of the table."""
    out = torch.full((len(lengths), 64), -1, dtype=torch.int32)
    own._fill_dcp_block_kv_indices(out, torch.arange(len(lengths)), local_lens)
    return [[int(out[i, j // PAGE]) * PAGE + j % PAGE for j in range(n)] for i, n in enumerate(local_lens.tolist())]


def rows_held(ranks: int, block: int, rank: int, n: int, pages: np.ndarray) -> list[int]:
    """Rows in which ``rank`` holds its tokens of a request, by position: each virtual page is dealt out by itself."""
    width = PAGE * ranks
    dealt = deal(width, ranks, block)
    return [
        int(pages[t // width]) * PAGE + int(dealt.row[t % width]) for t in range(n) if dealt.owner[t % width] == rank
    ]


@pytest.mark.parametrize("ranks,block", SIZES)
def test_a_rank_s_page_table_is_the_list_of_virtual_pages(backend, ranks, block):
    lengths = sorted({*edge_lengths(ranks, block), *edge_lengths(ranks, PAGE)})
    table, pages = requests(ranks, lengths, seed=ranks * block)
    lens = torch.tensor(lengths)
    for rank in range(ranks):
        own = backend(DcpLayout(ranks, block), rank, table)
        read = rows_read(own, lengths, own._get_dcp_local_seq_lens(lens))
        assert read == [rows_held(ranks, block, rank, n, p) for n, p in zip(lengths, pages, strict=True)]
        own = backend(DcpLayout(ranks, 1), rank, table)
        by_token = rows_read(own, lengths, own._get_dcp_local_seq_lens(lens))
        assert (by_token == read) == (block == 1), "the control: lengths of single tokens read other rows"


@pytest.mark.parametrize("ranks,block", SIZES)
def test_sglang_s_longest_shard_is_too_short_for_blocks(backend, ranks, block):
    """One reason why these backends are refused: this bound would need a hook of its own."""
    longest = {n: max(map(len, deal(n, ranks, block).held)) for n in edge_lengths(ranks, block) if n}
    table, _ = requests(ranks, [1], seed=0)
    own = backend(DcpLayout(ranks, block), 0, table)
    assert any(own._get_dcp_local_max_seq_len(n) < rows for n, rows in longest.items()) == (block > 1)
