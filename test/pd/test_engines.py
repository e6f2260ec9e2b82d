"""A real prefill engine (tp 1, no DCP), a real decode engine (DCP), Mooncake over TCP on loopback, against one engine.

Tokens and logprobs are compared, and then the rows decide: the probe fills every free page with NaN, and each decode
rank's rows must equal those of an engine without DCP, with NaN in every row that the rank does not own.
"""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.audit import (
    Reference,
    RequestRecord,
    audit_pools,
    audit_requests,
    load_pools,
    load_requests,
    one_fp8_step,
)
from sglang_dcp_block.testing.engine import REFERENCE, Answer, Case, CaseResult, EngineSpec, Round, differences, run
from sglang_dcp_block.testing.pd import (
    ABORT,
    DECODE,
    FAULTS,
    PAGES_ASTRAY,
    PREFILL,
    PdCase,
    PdResult,
    run_pd,
    run_pd_demo,
)

pytestmark = pytest.mark.engine

LOGPROB_TOLERANCE = 2e-3
LAYERS, ROW_BYTES = 2, (256 + 32) * 4


def prompts(lengths: list[int], seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, 250) for _ in range(n)] for n in lengths]


def sweep(layout: DcpLayout) -> list[Round]:
    """Every length at which something changes, the same prompts again, and sixteen requests at once."""
    b, cycle = layout.block_size, layout.cycle
    lengths = sorted({1, b - 1, b, b + 1, cycle - 1, cycle, cycle + 1, 2 * cycle, 333, 400} - {0})
    first = Round(prompts(lengths, 1), 6, "first")
    return [first, replace(first, name="again"), Round(prompts([40 + 17 * i for i in range(16)], 2), 4, "sixteen")]


def cuts(known: list[int], decode: EngineSpec, prefill: EngineSpec) -> Round:
    """A prompt that decode has cached, left at and beside the edges of both servers, and whole pages of it alone."""
    edges: set[int] = set()
    for spec in (decode, prefill):
        layout = DcpLayout(spec.dcp, spec.block)
        page = layout.virtual_page_size(spec.page)
        edges |= {layout.block_size, layout.block_size * 3 // 2, page, page + layout.block_size // 2, 2 * page}
    at = sorted({edge + i for edge in edges for i in (-1, 0, 1) if 0 < edge + i < len(known)})
    page = DcpLayout(decode.dcp, decode.block).virtual_page_size(decode.page)
    whole = [known[: n * page] for n in (1, 2, len(known) // page)]
    return Round([known[:n] + prompts([5], n)[0] for n in at] + whole, 3, "cuts")


def decode_hits(rounds: list[Round], answers: list[list[Answer]], page: int, forgets: bool = True) -> list[list[int]]:
    """Tokens that each request finds cached at decode: whole virtual pages of an earlier round's requests.

    Decode's pool must hold them all, or its host memory what the pool evicts. forgets: where a round says flush.
    """
    known: list[list[int]] = []
    hits = []
    for one, replies in zip(rounds, answers, strict=True):
        if one.flush and forgets:
            known = []
        hits.append([max((common(p, k) for k in known), default=0) // page * page for p in one.prompts])
        sequences = [p + reply.tokens[:-1] for p, reply in zip(one.prompts, replies, strict=True)]
        known += [s[: len(s) // page * page] for s in sequences]
    return hits


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture(scope="session")
def show(pytestconfig) -> Callable:
    """Progress goes past pytest's capture: an engine pair takes a minute to start."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def call(function, *args, **kwargs):
        with capture.global_and_fixture_disabled():
            print(flush=True)
            return function(*args, **kwargs)

    return call


@pytest.fixture(scope="session")
def single(show, warm, tmp_path_factory) -> Callable[[list[Round], int], tuple[CaseResult, Reference]]:
    """One engine without DCP and without the plugin."""
    known = {}

    def of(rounds: list[Round], page: int) -> tuple[CaseResult, Reference]:
        key = repr(rounds)
        if key not in known:
            spec = replace(REFERENCE, page=page)
            result = show(run, Case(spec, rounds), tmp_path_factory.mktemp("single"), timeout_s=400, warm=warm)
            known[key] = result, Reference(load_requests(result.audit))
        return known[key]

    return of


@pytest.fixture(scope="session")
def pair(show, warm, tmp_path_factory) -> Callable[[PdCase], PdResult]:
    """Each case is run once per session."""
    known = {}

    def of(case: PdCase) -> PdResult:
        if repr(case) not in known:
            known[repr(case)] = show(run_pd, case, tmp_path_factory.mktemp("pd"), timeout_s=500, warm=warm)
        return known[repr(case)]

    return of


def records_of(role: str, result: PdResult, rounds: list[Round]) -> list[RequestRecord]:
    """Of the requests that these rounds asked."""

    def asked(tokens: np.ndarray, prompt: list[int], new_tokens: int) -> bool:
        return 0 <= len(tokens) - len(prompt) <= new_tokens and tokens[: len(prompt)].tolist() == prompt

    asks = [(prompt, one.new_tokens) for one in rounds for prompt in one.prompts]
    return [r for r in load_requests(result.audit[role]) if any(asked(r.tokens, *ask) for ask in asks)]


def assert_pair_equals_single(case: PdCase, result: PdResult, rounds: list[Round], single) -> list[list[int]]:
    """In the case's first ``rounds``. Returns what decode had cached of each prompt, in tokens."""
    layout = case.decode.layout
    ours = (case.prefill.block, case.decode.block) != (1, 1)  # SGLang's own send writes no line per chunk
    copies = case.decode.tp // case.decode.dcp
    expected, reference = single(rounds, case.decode.page)
    hits = [[0] * len(one.prompts) for one in rounds]
    if keeps_radix_cache(case.decode):
        forgets = "hicache_storage_backend" not in case.decode.extra
        hits = decode_hits(rounds, expected.answers, layout.virtual_page_size(case.decode.page), forgets)
    for number, one in enumerate(rounds):
        answers = result.answers[number]
        assert not [a for a in answers if isinstance(a, str)], answers
        assert not differences(answers, expected.answers[number], LOGPROB_TOLERANCE), one.name
        sent = result.chunks[number]
        if ours:
            tokens = copies * (sum(map(len, one.prompts)) - sum(hits[number]))
            assert sum(c.tokens for c in sent) == case.prefill.pp * tokens
            assert sum(c.bytes for c in sent) == tokens * LAYERS * ROW_BYTES
        assert_pool_is_clean(layout, result, number, reference)
    records = records_of("decode", result, rounds)
    assert (report := audit_requests(layout, records, reference)).ok, report
    if layout.dcp_size > 1:
        wrong = layout.plain if layout.is_rotated else DcpLayout(layout.dcp_size, 3 * layout.block_size)
        assert not audit_requests(wrong, records, reference).ok, "the audit accepts a wrong layout"
    return hits


def assert_pool_is_clean(layout: DcpLayout, result: PdResult, number: int, reference: Reference) -> None:
    """After round ``number``."""
    pools = audit_pools(layout, load_pools(result.audit["decode"], f"{number:02d}"), reference)
    assert not pools.mismatches and not pools.written and not pools.complaints, pools


def keeps_radix_cache(decode: EngineSpec) -> bool:
    return "disaggregation_decode_enable_radix_cache" in decode.extra


#: Prefill on a busy machine takes longer than decode waits by default.
PATIENCE = {"SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "240", "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "240"}
#: FlashInfer's stand-in is plain torch, far faster here than Triton's interpreter.
FAST = replace(DECODE, backend="flashinfer")
RADIX = {"disaggregation_decode_enable_radix_cache": True}
NO_BACKUP = {"disaggregation_decode_retraction_backup": "none"}
#: What decode has cached ends in the middle of a prefill page.
KEPT = "dcp 2, block 64, prefill in chunks and large pages, decode keeps a radix cache"
BETWEEN_DCP = "dcp 2 to dcp 4, other blocks, in chunks"
CASES = {
    "dcp 2, block 64, prefill in chunks": (replace(PREFILL, chunked=128), DECODE),
    KEPT: (replace(PREFILL, page=256, chunked=256), replace(DECODE, extra=RADIX)),
    "dcp 2, block 64, FlashInfer": (PREFILL, replace(DECODE, backend="flashinfer", comm="a2a")),
    "dcp 2, block 16 in pages of 64": (PREFILL, replace(DECODE, block=16)),
    "dcp 2, block 16 in pages of 16, in chunks": (
        replace(PREFILL, page=16, chunked=48),
        replace(DECODE, block=16, page=16),
    ),
    "dcp 2, block 1": (PREFILL, replace(DECODE, block=1)),
    "dcp 4, block 64": (PREFILL, replace(DECODE, tp=4, dcp=4)),
    "dcp 4, block 16 in pages of 64, in chunks": (
        replace(PREFILL, chunked=128),
        replace(DECODE, tp=4, dcp=4, block=16),
    ),
    "dcp 2, block 16 in pages of 32, rotated, decode keeps a radix cache": (
        replace(PREFILL, chunked=128),
        replace(DECODE, block=16, page=32, rotate=True, extra=RADIX | NO_BACKUP),
    ),
    "same layout on both sides": (replace(DECODE, chunked=128), DECODE),
    BETWEEN_DCP: (replace(FAST, block=16, chunked=128), replace(FAST, tp=4, dcp=4, max_total_tokens=1024)),
    "dcp 2 to no dcp": (replace(DECODE, chunked=128), PREFILL),
    "dcp 2 to dcp 2, other blocks and pages": (FAST, replace(FAST, block=16, page=16)),
    "no dcp in small pages to dcp 2": (replace(PREFILL, backend="flashinfer", page=16), FAST),
    "dcp 4 to dcp 2": (replace(FAST, tp=4, dcp=4, block=16), FAST),
    "two groups of dcp 2 to dcp 2": (replace(FAST, tp=4, block=16), FAST),
    "token round-robin to blocks": (replace(FAST, block=1), replace(FAST, block=64)),
    "two pipeline stages to dcp 2, in chunks": (replace(PREFILL, backend="flashinfer", pp=2, chunked=128), FAST),
    "blocks of several pages to other blocks": (replace(FAST, block=192), replace(FAST, block=128, page=16)),
    "dcp 2 to no dcp, decode keeps a radix cache in small pages": (
        FAST,
        replace(PREFILL, backend="flashinfer", page=16, extra=RADIX),
    ),
}
IN_CI = {KEPT, BETWEEN_DCP}
#: What a pair between DCP servers goes through after its sweep. 700 tokens are 3 virtual pages of 4 ranks, 9 of the 16
#: in decode's pool for three requests: those after the abort get pages of those before it.
CONTROLS = [
    Round(prompts([700], 40), 3, "sender flip"),
    Round(prompts([700] * 3, 41), 3, ABORT),
    Round(prompts([700] * 3, 42), 3, "clean"),
]


def case_of(name: str, transfer: str = "mooncake") -> PdCase:
    prefill, decode = CASES[name]
    # Pairs from DCP share one reference: the borders of blocks of 64 in cycles of 128, and longer ones.
    layout = DcpLayout(2, 64) if prefill.dcp > 1 else DcpLayout(decode.dcp, decode.block)
    rounds = sweep(layout) + CONTROLS * (name == BETWEEN_DCP)
    if keeps_radix_cache(decode):
        rounds.append(cuts(rounds[0].prompts[-1], decode, prefill))
    return PdCase(prefill, decode, rounds, env=PATIENCE, transfer=transfer)


@pytest.mark.parametrize("name", [n if n in IN_CI else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_pair_answers_like_one_engine(name, pair, single):
    case = case_of(name)
    prefill, decode = case.prefill, case.decode
    result = pair(case)
    if (prefill.dcp, prefill.block) == (decode.dcp, decode.block):
        expected, reference = single(case.rounds, decode.page)
        for number in range(len(case.rounds)):
            assert not differences(result.answers[number], expected.answers[number], LOGPROB_TOLERANCE)
        records = load_requests(result.audit["decode"])
        assert (report := audit_requests(DcpLayout(decode.dcp, decode.block), records, reference)).ok, report
        assert not audit_requests(DcpLayout(decode.dcp, 16), records, reference).ok
        assert not any(result.chunks), "rank to rank goes through SGLang's page copy"
        return
    hits = assert_pair_equals_single(case, result, [one for one in case.rounds if one not in CONTROLS], single)
    assert not keeps_radix_cache(decode) or (any(hits[1]) and any(hits[-1]))
    assert "pack buffers allocated" not in result.log("prefill") or decode.block == 1


@pytest.mark.parametrize("transfer", ["mooncake", pytest.param("nixl", marks=pytest.mark.slow)])
def test_a_wrong_sender_and_an_abort_between_dcp_servers(transfer, pair, single):
    """In the pair above: the audit sees senders that mix up their ranks, and nothing of an aborted request is left."""
    case = case_of(BETWEEN_DCP, transfer)
    result = pair(case)
    flipped, aborted, clean = range(3, 6)
    expected, reference = single([CONTROLS[0], CONTROLS[2]], case.decode.page)
    layout = DcpLayout(case.decode.dcp, case.decode.block)
    report = audit_requests(layout, records_of("decode", result, [CONTROLS[0]]), reference)
    assert report.mismatches, f"went unseen: {report}"
    assert sum(c.tokens for c in result.chunks[flipped]) == 700, "as many rows as ever: only their content is wrong"

    assert all(isinstance(a, str) and "Abort" in a for a in result.answers[aborted]), result.answers[aborted]
    assert 0 < sum(c.tokens for c in result.chunks[aborted]) < 3 * 700, "aborted between the first part and the last"

    assert not differences(result.answers[clean], expected.answers[1], LOGPROB_TOLERANCE)
    before, after = (records_of("decode", result, [one]) for one in CONTROLS[1:])
    assert np.intersect1d(*(np.concatenate([r.pages for r in rs]) for rs in (before, after))).size, "no page used again"
    report = audit_requests(layout, after, reference)
    assert report.ok, report
    assert_pool_is_clean(layout, result, clean, reference)


FP8 = {"kv_cache_dtype": "fp8_e4m3"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param(PREFILL, replace(DECODE, block=16), id="dcp 2, Triton"),
        pytest.param(replace(FAST, block=16), replace(FAST, tp=4, dcp=4, max_total_tokens=1024), id="dcp 2 to dcp 4"),
    ],
)
def test_pair_with_fp8_kv(prefill, decode, show, warm, pair, tmp_path):
    """What arrives are the prefill engine's bytes; answers are those of one engine with FP8 KV.

    No prompt is asked twice or in chunks: a row depends on which of the rows before it were read back as FP8.
    """
    prefill, decode = (replace(spec, extra=spec.extra | FP8) for spec in (prefill, decode))
    layout = DcpLayout(decode.dcp, decode.block)
    rounds = [one for one in sweep(layout) if one.name != "again"]
    result = pair(PdCase(prefill, decode, rounds, env=PATIENCE))
    one_engine = replace(
        REFERENCE, page=DcpLayout(prefill.dcp).virtual_page_size(64), chunked=prefill.chunked, extra=FP8
    )
    expected = show(run, Case(one_engine, rounds), tmp_path, timeout_s=400, warm=warm)
    rows = LAYERS * ROW_BYTES // 4  # a byte for a float32
    for answers, wanted, sent, one in zip(result.answers, expected.answers, result.chunks, rounds, strict=True):
        assert not [a for a in answers if isinstance(a, str)], answers
        assert not differences(answers, wanted, 2e-2), one.name
        tokens = sum(map(len, one.prompts))
        assert (sum(c.tokens for c in sent), sum(c.bytes for c in sent)) == (tokens, tokens * rows)

    records, reference = records_of("decode", result, rounds), Reference(load_requests(expected.audit))
    near = audit_requests(layout, records, reference, lambda values: one_fp8_step(values) + 1 / 32)
    assert near.ok, near
    assert not audit_requests(DcpLayout(decode.dcp, 3 * decode.block), records, reference).ok
    if prefill.dcp == 1:
        # Generated tokens have no row on the prefill side: they are "uncovered" here.
        sent = audit_requests(layout, records, Reference(load_requests(result.audit["prefill"])), 0.0)
        assert sent.compared and not (sent.mismatches or sent.written or sent.complaints), sent


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dcp 2, block 64, FlashInfer", BETWEEN_DCP])
def test_pair_over_nixl_answers_like_one_engine(name, pair, single):
    """NIXL's UCX in host memory instead of Mooncake; rows, tokens and logprobs are judged alike."""
    case = case_of(name, "nixl")
    result = pair(case)
    assert_pair_equals_single(case, result, case.rounds[:3], single)
    assert "NIXL KVManager initialized with backend: UCX" in result.log("prefill")
    assert "pack buffers allocated" not in result.log("prefill")
    wrong = replace(case, decode=replace(case.decode, block=32))
    with pytest.raises(AssertionError):
        assert_pair_equals_single(wrong, result, case.rounds[:3], single)


@pytest.mark.slow
def test_controls_and_an_abort(pair):
    """One pair, sabotaged round by round: the audit must see each fault, and the last round must be right again.

    The prefill engine's own rows are the reference: what arrived must equal them bit for bit.
    """
    layout = DcpLayout(DECODE.dcp, DECODE.block)
    length = 4 * layout.cycle  # the same number of tokens for each rank; two chunks of two blocks per rank
    faults = [name for name in FAULTS if name not in (ABORT, "sender flip")]  # here is one sender
    rounds = [Round(prompts([length, length], 10 + i), 3, name) for i, name in enumerate(faults)]
    rounds += [Round(prompts([length] * 3, 30), 3, ABORT), Round(prompts([length + 1, 77], 31), 3, "clean")]
    result = pair(PdCase(replace(PREFILL, chunked=2 * layout.cycle), DECODE, rounds))
    reference = Reference(load_requests(result.audit["prefill"]))
    records = load_requests(result.audit["decode"])
    for number, one in enumerate(rounds):
        if one.name == ABORT:
            assert all(isinstance(a, str) and "Abort" in a for a in result.answers[number]), result.answers[number]
            continue
        mine = [r for r in records if any(list(r.tokens[: len(p)]) == p for p in one.prompts)]
        report = audit_requests(layout, mine, reference, tolerance=0.0)
        # Generated tokens have no row on the prefill side: they are "uncovered" here.
        if one.name == "clean":
            assert report.compared and not (report.mismatches or report.written or report.complaints), report
        else:
            assert report.mismatches or report.written, f"{one.name} went unseen: {report}"


# -- host caches on both servers ---------------------------------------------------------------------------------------

TREE, *OTHERS = prompts([420, 400, 390], 50)


def back_at(known: list[int], cut: int, name: str = "", flush: bool | str = False) -> Round:
    """New tokens behind a prefix that was served before."""
    return Round([known[:cut] + prompts([5], cut)[0]], 3, name or f"back at {cut}", flush)


def with_host_cache(spec: EngineSpec, slots: int, **extra) -> EngineSpec:
    """Room for ``slots``, less than two of the prompts above, and for four times as many in host memory."""
    host = {"enable_hierarchical_cache": True, "hicache_ratio": 4.0}
    return replace(spec, max_total_tokens=slots // spec.dcp, extra=spec.extra | host | extra)


EVICT = [Round([other], 4, "evict") for other in OTHERS]
#: Decode forgets all in the first part, so prefill sends what comes from its host memory. Then decode has a prefix in
#: its own. In the last two the pages of one load change places, at the server that the name says.
HOST_ROUNDS = [
    Round([TREE], 2, "fill"),
    *EVICT,
    *(back_at(TREE, cut, flush="decode") for cut in (129, 300)),
    Round([TREE], 4, "whole", flush="decode"),
    *EVICT,
    *(back_at(TREE, cut) for cut in (130, 301)),
    Round([TREE], 4, "whole"),
    back_at(OTHERS[0], 389, PAGES_ASTRAY["decode"]),
    back_at(OTHERS[1], 388, PAGES_ASTRAY["prefill"], flush="decode"),
]
#: Tokens that come back in each round but the last two; virtual pages are 64 or 128 tokens.
FROM_HOST = {
    "prefill": [0, 0, 0, 128, 128, 128, 384, 384, 128, 128, 128],
    "decode": [0, 0, 0, 0, 0, 0, 0, 0, 128, 128, 128],
}
HOST_PREFILL = replace(FAST, block=16, page=32, chunked=256)
HOST_DECODE = replace(FAST, extra={"num_reserved_decode_tokens": 16, **RADIX})
HOST_CASES = {
    "dcp 2 to dcp 2, other blocks and pages": (HOST_PREFILL, HOST_DECODE),
    "no dcp and no flag to dcp 2": (replace(PREFILL, backend="flashinfer", chunked=256), HOST_DECODE),
    "dcp 2 to no dcp": (HOST_PREFILL, replace(PREFILL, backend="flashinfer", extra=HOST_DECODE.extra)),
    "over nixl": (HOST_PREFILL, HOST_DECODE),
}


def tokens_from_host(result: PdResult, role: str, rounds: int) -> list[int]:
    """That came back from host memory in each round."""
    totals = [load_pools(result.audit[role], f"{n:02d}")[0].slots_from_host for n in range(rounds)]
    return [later - before for before, later in pairwise([0, *totals])]


@pytest.mark.parametrize("name", [n if "other" in n else pytest.param(n, marks=pytest.mark.slow) for n in HOST_CASES])
def test_host_caches_of_both_servers(name, pair, single):
    """Prefixes that left the pools come back into other pages, are sent from there, and grow by what is sent."""
    prefill, decode = HOST_CASES[name]
    specs = with_host_cache(prefill, 576), with_host_cache(decode, 768)
    case = PdCase(*specs, HOST_ROUNDS, env=PATIENCE, transfer="nixl" if "nixl" in name else "mooncake")
    result = pair(case)
    right = HOST_ROUNDS[:-2]
    hits = assert_pair_equals_single(case, result, right, single)
    assert [hit for (hit,) in hits] == [0] * 8 + [128, 256, 384]
    _, reference = single(right, decode.page)
    from_host = {role: tokens_from_host(result, role, len(HOST_ROUNDS)) for role in ("prefill", "decode")}
    for role, spec in (("prefill", prefill), ("decode", decode)):
        assert from_host[role][: len(right)] == FROM_HOST[role]
        for number in range(len(right)):
            pools = load_pools(result.audit[role], f"{number:02d}")
            assert (report := audit_pools(DcpLayout(spec.dcp, spec.block), pools, reference)).ok, report
    for role, number in (("decode", -2), ("prefill", -1)):
        assert from_host[role][number] >= 256, "pages that can change places"
        assert not isinstance(result.answers[number][0], str)
        records = records_of("decode", result, [HOST_ROUNDS[number]])
        report = audit_requests(DcpLayout(decode.dcp, decode.block), records, reference)
        assert report.mismatches, f"went unseen: {report}"


@pytest.mark.slow
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_store_behind_one_server(role, pair, single, tmp_path):
    """Both servers forget all, also in host memory; one of them has a store. Prefill sends what it finds there, or what
    decode doesn't."""
    rounds = [
        Round([TREE], 2, "fill"),
        *EVICT,
        back_at(TREE, 300, flush=True),
        Round([TREE], 4, "whole", flush=True),
        back_at(OTHERS[0], 389, PAGES_ASTRAY[role], flush=True),
    ]
    where = json.dumps({"file_storage_path": str(tmp_path), "prefetch_threshold": 1})
    store = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config": where}
    store |= {"hicache_storage_prefetch_policy": "wait_complete"}
    specs = {"prefill": HOST_PREFILL, "decode": HOST_DECODE}
    specs[role] = with_host_cache(specs[role], 768, **store)
    case = PdCase(**specs, rounds=rounds, env=PATIENCE)
    result = pair(case)
    hits = assert_pair_equals_single(case, result, rounds[:-1], single)
    assert [hit for (hit,) in hits] == [0, 0, 0] + ([256, 384] if role == "decode" else [0, 0])
    assert tokens_from_host(result, role, len(rounds)) == [0, 0, 0, 256, 384, 384]
    _, reference = single(rounds[:-1], case.decode.page)
    report = audit_requests(DcpLayout(2, 64), records_of("decode", result, rounds[-1:]), reference)
    assert report.mismatches, f"went unseen: {report}"


def test_a_prefill_server_without_the_plugin_is_refused(pair):
    rounds = [Round(prompts([20, 70], 1), 2, "refused"), Round(prompts([30], 2), 2, "refused again")]
    # The prefill server waits for a decode server that will not come.
    stock = replace(PREFILL, block=None, env={"SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "3"})
    result = pair(PdCase(stock, DECODE, rounds, audit=False))
    for answer in [a for answers in result.answers for a in answers]:
        assert "does not run sglang-dcp-block" in answer and "install sglang-dcp-block there" in answer
    assert "Refusing prefill server" in result.log("decode")
    assert not any(result.chunks)


@pytest.mark.slow
def test_300_requests_in_a_row(pair, single):
    """Accuracy by position in the run: a slow leak or drift would show late. Every answer counts."""
    rng = random.Random(5)
    rounds = [Round(prompts([rng.randrange(1, 150) for _ in range(15)], i), 3, f"{i}") for i in range(20)]
    decode = FAST
    case = PdCase(replace(PREFILL, backend="flashinfer"), decode, rounds, audit=False)
    result = pair(case)
    expected, _ = single(rounds, DECODE.page)
    wrong = [
        (number * 15 + i)
        for number in range(20)
        for i, (got, want) in enumerate(zip(result.answers[number], expected.answers[number], strict=True))
        if isinstance(got, str) or got.tokens != want.tokens
    ]
    assert not wrong, f"wrong requests, by position in the run: {wrong}"


@pytest.mark.slow
def test_demo(tmp_path, show, warm):
    rows = show(run_pd_demo, tmp_path, lengths=(1, 129), warm=warm)
    assert all(r.equal for r in rows)
    # Blocks 0 and 2 are rank 0's and lie side by side on both servers.
    assert [r.segments for r in rows] == [2, 2 * 2] and [r.token_segments for r in rows] == [2, 2 * 129]


def test_specs_are_what_the_docstring_says():
    assert EngineSpec(block=1, page=64) == PREFILL and (DECODE.tp, DECODE.dcp, DECODE.block) == (2, 2, 64)
