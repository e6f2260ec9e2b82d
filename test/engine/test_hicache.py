"""HiCache under a block layout: prefixes that left the GPU come back from host memory and from a file store.

A page that nobody owns holds NaN, and a loaded layer is seen only by readers that wait for it (testing/host_copies.py).
So right rows after a load were really copied, into the right places, in time.

One server fills a store; servers with the same and with another block size read it. Their pages have the same number of
slots, so SGLang's own keys would be equal.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from test_matrix import LOGPROB_TOLERANCE, check, dcp, prompt

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import audit_requests, load_pools, load_requests
from sglang_dcp_block.testing.cpu_testbed import SABOTAGE_VARIABLE
from sglang_dcp_block.testing.engine import REFERENCE, Answer, CaseResult, EngineSpec, Round, differences

KEY_HOOK = "sglang.srt.managers.cache_controller:HiCacheController._generate_storage_config"
ROWS_HOOK = "sglang.srt.layers.dcp.layout:maybe_dcp_kernel_indices"
BASE = prompt(420)


def back_at(*cuts: int) -> list[Round]:
    """New tokens after a prefix that was served before. Cuts lie at and around edges of blocks, cycles and pages."""
    return [Round([BASE[:cut] + prompt(5, seed=cut)], 3, f"back at {cut}") for cut in cuts]


# The pools have 9 virtual pages of 64 slots; what is served next takes 7 of them.
FILL = Round([BASE, prompt(33)], 2, "fill")
EVICT = [Round([prompt(400, seed=9)], 4, "evict"), Round([prompt(390, seed=8)], 4, "evict again")]
CUTS = (64, 100, 128, 129, 200, 256, 300, 384, 385)
WHOLE = Round([BASE], 4, "whole")
ROUNDS = [FILL, *EVICT, *back_at(*CUTS), WHOLE]


def server(block: int, store: Path | None = None, ranks: int = 2, backend: str = "flashinfer", **more) -> EngineSpec:
    """Room for 576 slots on the ranks together and for four times as many in host memory."""
    spec = dcp(ranks, block, backend, page=64 // ranks, max_total_tokens=576 // ranks, chunked=512 // ranks)
    extra = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0} | more.pop("extra", {})
    if store is not None:
        # Ask for every page, and wait until it is there.
        where = json.dumps({"file_storage_path": str(store), "prefetch_threshold": 1})
        extra |= {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": where}
        extra |= {"hicache_storage_prefetch_policy": "wait_complete"}
    return replace(spec, extra=spec.extra | extra, **more)


def came_from(result: CaseResult, tier: str) -> list[list[int]]:
    return [[a.sources.get(tier, 0) for a in answers] for answers in result.answers]


@pytest.fixture(scope="session")
def expected(reference):
    """What an engine without DCP answers to some of the rounds, in any order, and its rows."""
    result, rows = reference(ROUNDS, REFERENCE)
    by_name = {r.name: answers for r, answers in zip(ROUNDS, result.answers, strict=True)}
    return lambda rounds: (replace(result, answers=[by_name[r.name] for r in rounds]), rows)


@pytest.fixture(scope="session")
def filled(run_engine, tmp_path_factory) -> tuple[CaseResult, Path]:
    from sglang.srt.mem_cache.cpp_utils import native_hash

    native_hash._load_native_hash_module()  # SGLang compiles it at first use: here, not while requests wait
    store = tmp_path_factory.mktemp("store")
    return run_engine(server(16, store), ROUNDS), store


def test_evicted_prefixes_come_back_from_host_memory(filled, expected) -> None:
    result, _ = filled
    check(result, DcpLayout(2, 16), *expected(ROUNDS))
    back = result.answers[-len(CUTS) - 1 :]
    assert [a.cached for (a,) in back] == [*(cut // 64 * 64 for cut in CUTS), 384]
    host = dict(zip(CUTS, (a.sources["host"] for (a,) in back), strict=False))
    assert all(host[cut] for cut in (64, 128, 200, 256, 384)), host
    counts = load_pools(result.audit)[-1].call_counts
    assert counts[ROWS_HOOK] and counts[KEY_HOOK]


def test_a_restarted_server_finds_them_in_the_store(filled, expected, run_engine) -> None:
    rounds = [*back_at(64, 129, 385), WHOLE]
    result = run_engine(server(16, filled[1]), rounds)
    assert came_from(result, "storage") == [[64], [64], [256], [0]]
    check(result, DcpLayout(2, 16), *expected(rounds))


def test_another_block_size_finds_nothing(filled, expected, run_engine) -> None:
    before, rounds = set(filled[1].iterdir()), [WHOLE, *back_at(129)]
    result = run_engine(server(32, filled[1]), rounds)
    assert came_from(result, "storage") == [[0], [0]] and result.answers[0][0].cached == 0
    check(result, DcpLayout(2, 32), *expected(rounds))
    added = set(filled[1].iterdir()) - before
    assert len(added) == 2 * 6, "each rank writes its part of the 6 pages"
    assert all("-dcpblock32-" in f.name for f in added) and all("-dcpblock16-" in f.name for f in before)


def test_a_key_without_the_block_size_finds_wrong_rows(filled, expected, run_engine) -> None:
    """The control. Attention over whole pages doesn't ask for their order, so the audit alone sees it."""
    spec = replace(server(32, filled[1]), env={SABOTAGE_VARIABLE: "blind-store"})
    result = run_engine(spec, [WHOLE])
    assert came_from(result, "storage") == [[384]]
    answered, rows = expected([WHOLE])
    report = audit_requests(DcpLayout(2, 32), load_requests(result.audit), rows)
    assert report.mismatches > 0 and "differs by" in str(report), str(report)
    assert not differences(result.answers[0], answered.answers[0], LOGPROB_TOLERANCE)


class Variant(NamedTuple):
    name: str
    spec: EngineSpec
    layout: DcpLayout
    rounds: list[Round]


def _direct(memory_layout: str, policy: str) -> dict[str, str]:
    return {"hicache_io_backend": "direct", "hicache_mem_layout": memory_layout, "hicache_write_policy": policy}


TWICE = [FILL, WHOLE, *ROUNDS[1:-1]]
VARIANTS = [
    Variant(
        "direct-page-first-write-back",
        server(16, backend="triton", extra=_direct("page_first_direct", "write_back")),
        DcpLayout(2, 16),
        ROUNDS,
    ),
    # A page is backed up when it is used a second time.
    Variant(
        "direct-layer-first-selective",
        server(32, extra=_direct("layer_first", "write_through_selective")),
        DcpLayout(2, 32),
        TWICE,
    ),
    Variant(
        "kernel-layer-first-dcp4",
        server(16, ranks=4, extra={"hicache_mem_layout": "layer_first"}),
        DcpLayout(4, 16),
        ROUNDS,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_other_copies_and_policies(variant: Variant, expected, run_engine) -> None:
    result = run_engine(variant.spec, variant.rounds)
    assert sum(map(sum, came_from(result, "host")))
    check(result, variant.layout, *expected(variant.rounds))


@pytest.mark.slow
def test_ranks_that_hold_the_same_rows_share_a_store(expected, run_engine, tmp_path) -> None:
    """Four ranks in two DCP groups: the first group writes, both read."""
    spec = server(16, tmp_path, tp=4)
    first = run_engine(spec, [FILL, WHOLE])
    check(first, DcpLayout(2, 16), *expected([FILL, WHOLE]))
    assert len(list(tmp_path.glob("*.bin"))) == 2 * 6
    rounds = [*back_at(129), WHOLE]
    second = run_engine(spec, rounds)
    assert came_from(second, "storage") == [[128], [256]]
    check(second, DcpLayout(2, 16), *expected(rounds))


# -- DP attention ------------------------------------------------------------------------------------------------------


def side_by_side(rounds: list[Round]) -> list[Round]:
    """For two groups, which take requests in turn: each round's first prompt, and beside it that of the round before.

    So the groups evict and load different pages in the same step.
    """
    steps = [(one, rounds[max(at - 1, 0)]) for at, one in enumerate(rounds)]
    return [Round([a.prompts[0], b.prompts[0]], min(a.new_tokens, b.new_tokens), a.name) for a, b in steps]


GROUPS = side_by_side([FILL, *EVICT, *back_at(64, 129, 300), WHOLE, WHOLE])


def groups(store: Path | None = None, **more) -> EngineSpec:
    return server(16, store, tp=4, extra={"attn_dp_size": 2}, **more)


def answers_of(alone: CaseResult, rounds: list[Round]) -> CaseResult:
    """What one engine without DCP answers to these prompts; ``alone``: to all of ROUNDS."""
    known = {tuple(one.prompts[0]): answers[0] for one, answers in zip(ROUNDS, alone.answers, strict=True)}

    def cut(answer: Answer, n: int) -> Answer:
        return replace(answer, tokens=answer.tokens[:n], logprobs=answer.logprobs[:n])

    return replace(alone, answers=[[cut(known[tuple(p)], one.new_tokens) for p in one.prompts] for one in rounds])


def test_two_groups_under_dp_attention(expected, run_engine) -> None:
    """Four ranks in two groups, each with requests, a pool and a host memory of its own."""
    alone, rows = expected(ROUNDS)
    result = run_engine(groups(), GROUPS)
    check(result, DcpLayout(2, 16), answers_of(alone, GROUPS), rows)
    # One group takes each step right after the other did.
    assert came_from(result, "host") == [[0, 0]] * 3 + [[64, 0], [64, 64], [128, 64], [128, 128], [0, 128]]


@pytest.mark.slow
def test_two_groups_share_a_store(expected, run_engine, tmp_path) -> None:
    """Both groups of a restarted server find what was stored under keys that name no group."""
    run_engine(groups(tmp_path), GROUPS[:3])
    rounds = [Round([BASE, back_at(129)[0].prompts[0]], 3, "both")]
    result = run_engine(groups(tmp_path), rounds)
    assert came_from(result, "storage") == [[384, 128]]
    alone, rows = expected(ROUNDS)
    check(result, DcpLayout(2, 16), answers_of(alone, rounds), rows)


@pytest.mark.slow
def test_pages_that_change_places_show(expected, run_engine) -> None:
    """The control, in both groups: attention over whole pages doesn't ask for their order, the audit does."""
    rounds = [*GROUPS[:4], GROUPS[-1]]
    result = run_engine(groups(env={SABOTAGE_VARIABLE: "pages-astray"}), rounds)
    assert came_from(result, "host")[-1] == [320, 384]
    answered, rows = expected(ROUNDS)
    last = [r for r in load_requests(result.audit) if len(r.tokens) == len(BASE) + WHOLE.new_tokens - 1]
    names = {r.rid for r in last}
    assert len(names) == 2
    for name in names:
        report = audit_requests(DcpLayout(2, 16), [r for r in last if r.rid == name], rows)
        assert report.mismatches > 0 and "differs by" in str(report), str(report)
    for answer in result.answers[-1]:
        assert not differences([answer], answered.answers[-1], LOGPROB_TOLERANCE)
