"""The NIXL hooks on SGLang's real managers, threads and messages, over NIXL's real agents and UCX in host memory.

What this backend shares with Mooncake (registration on the decode side, the choice of senders) is in
test_mooncake_hooks.py and test_any_pair.py too; here is every byte of every rank after a NIXL transfer.
"""

from itertools import cycle, product

import numpy as np
import pytest
from harness import CANARY, LAYERS, NO_DCP, ROW_BYTES, assert_all_rows, remote_ranks, wait_until
from nixl_harness import NixlPeer, NixlPrefill, RemoteNixlPeer, decode_process, end_agents
from test_any_pair import LONGEST, Server, assert_abort_frees_the_pages
from test_mooncake_hooks import (
    MISFITS,
    Request,
    assert_failed,
    assert_fp8_rows,
    assert_refused,
    other_version,
    run_request,
    succeeded,
)

from sglang_dcp_block import metrics, runtime
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import common, wire
from sglang_dcp_block.disaggregation import nixl as ours

pytestmark = pytest.mark.usefixtures("nixl")


@pytest.fixture(scope="module", autouse=True)
def _agents():
    yield
    end_agents()


def prefill_of(pages: int = 40, page_size: int = 16, **options) -> NixlPrefill:
    return NixlPrefill(None, pages, page_size, **options)


def peers_of(layout: DcpLayout, page_size: int = 16, virtual_pages: int = 10) -> list[NixlPeer]:
    return [NixlPeer(layout, r, virtual_pages, page_size) for r in range(layout.dcp_size)]


def kv_bytes(*senders: NixlPrefill) -> int:
    return sum(n for s in senders for _, n in s.segments)


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dcp_size,page_size,block_size", [(2, 16, 16), (2, 64, 16), (4, 16, 48), (4, 64, 64)])
def test_rows_of_every_length(dcp_size, page_size, block_size):
    layout = DcpLayout(dcp_size, block_size)
    b, whole = block_size, layout.cycle
    prefill, peers = prefill_of(40, page_size), peers_of(layout, page_size)
    room = 0
    for length in (1, b - 1, b, b + 1, whole - 1, whole, whole + 1, 2 * whole + b + 1):
        for chunk in (1 << 20, 2 * page_size):
            room += 1
            prefill.segments.clear()
            for peer in peers:
                peer.clear()
            verdicts, want = run_request(prefill, peers, Request(length, 0, chunk), room, room, register=room == 1)
            assert succeeded(verdicts), verdicts
            assert_all_rows(peers, want)
            assert all(peer.aux[2] == 1 for peer in peers)
            assert kv_bytes(prefill) == length * LAYERS * ROW_BYTES, "each row once"
    assert prefill.threads_alive() and prefill.manager._dcp_pack_buffers is None


def test_fp8_rows(monkeypatch):
    assert_fp8_rows(NixlPrefill, NixlPeer, None, monkeypatch)


@pytest.mark.parametrize("chunk", [1 << 20, 32])
def test_decode_prefix_is_not_sent_again(chunk):
    layout, ps = DcpLayout(2, 16), 32
    prefill, peers = prefill_of(40, ps), peers_of(layout, ps)
    prefix = 2 * layout.virtual_page_size(ps)
    verdicts, want = run_request(prefill, peers, Request(prefix + 77, prefix, chunk), room=1)
    assert succeeded(verdicts)
    assert_all_rows(peers, want)
    assert kv_bytes(prefill) == 77 * LAYERS * ROW_BYTES


def test_a_request_that_decode_has_in_full_moves_the_first_token_alone():
    prefill, peers = prefill_of(), peers_of(DcpLayout(2, 16))
    prefill.open_room(1)
    for peer in peers:
        peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(1, np.array([], int), 64, len(peers)))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(1, ())) == 2, "both peers are known")
    prefill.send(1, np.array([], int), 0, 0, last=True)
    assert succeeded([peer.verdict() for peer in peers])
    assert all(peer.aux[2] == 1 for peer in peers) and not prefill.segments
    assert_all_rows(peers, [[np.full_like(layer, CANARY) for layer in peer.kv] for peer in peers])


def test_a_rank_that_owns_nothing_completes_without_a_transfer():
    prefill, peers = prefill_of(8, 64), peers_of(DcpLayout(4, 64), 64)
    verdicts, want = run_request(prefill, peers, Request(10), room=1)
    assert succeeded(verdicts)
    assert_all_rows(peers, want)
    assert [n for _, n in prefill.segments] == [10 * ROW_BYTES] * LAYERS, "rank 0's; the others own none of 10 tokens"


PAIRS = {
    "1 to 2, other pages, chunks begin inside a block": (Server(1, 1, 1, 16), Server(2, 2, 64, 64)),
    "1 to 4": (Server(1, 1, 1, 64), Server(4, 4, 16, 16)),
    "2 to 4": (Server(2, 2, 64, 64), Server(4, 4, 16, 64)),
    "4 to 2, other pages": (Server(4, 4, 16, 64), Server(2, 2, 192, 16)),
    "2 to 1": (Server(2, 2, 64, 64), Server(1, 1, 1, 64)),
    "two groups to one": (Server(4, 2, 16, 64), Server(2, 2, 64, 64)),
    "round-robin to blocks": (Server(2, 2, 1, 1), Server(2, 2, 16, 16)),
    "1 to 4, rotated": (Server(1, 1, 1, 64), Server(4, 4, 16, 16, rotate=True)),
    "4 to 2, both rotated": (Server(4, 4, 16, 16, rotate=True), Server(2, 2, 64, 64, rotate=True)),
    "groups of DP attention": (Server(2, 2, 16, 64, dp=2), Server(2, 2, 64, 64, dp=2)),
}


@pytest.fixture
def pairs(servers):
    def start(prefill: Server, decode: Server):
        def peers(server: Server, virtual_pages: int) -> list[NixlPeer]:
            return [NixlPeer(server.layout, 0, virtual_pages, server.page) for _ in server.ranks]

        return servers(prefill, decode, peers=peers, prefill_rank=NixlPrefill)

    return start


@pytest.mark.parametrize("name", PAIRS)
def test_rows_between_two_layouts(name, pairs):
    pair = pairs(*PAIRS[name])
    lengths = sorted({1, pair.decode.block, pair.prefill.block + 1, pair.decode.layout.cycle + 3})
    cases = [(n, LONGEST) for n in lengths] + [(700, 100), (650, 48)]
    groups = cycle(product(range(pair.prefill.dp), range(pair.decode.dp)))
    for (length, chunk), (sending, receiving) in zip(cases, groups, strict=False):
        pair.clear()
        for sender in pair.senders:
            sender.segments.clear()
        request = pair.send(length, chunk=chunk, groups=(sending, receiving))
        assert request.succeeded, request.verdicts
        pair.audit(0, length, receiving)
        assert kv_bytes(*pair.senders) == length * LAYERS * ROW_BYTES, "each row once"
    assert all(peer.aux[2] == 1 for peer in pair.receivers)
    assert all(s.threads_alive() and s.manager._dcp_pack_buffers is None for s in pair.senders)


@pytest.mark.parametrize("chunk", [LONGEST, 130])
def test_a_decode_prefix_may_end_inside_a_prefill_page(chunk, pairs):
    pair = pairs(Server(2, 2, 64, 64), Server(2, 2, 16, 16))
    request = pair.send(7 * 32 + 333, 7 * 32, chunk)
    assert request.succeeded, request.verdicts
    pair.audit(7 * 32, 7 * 32 + 333)
    assert kv_bytes(*pair.senders) == 333 * LAYERS * ROW_BYTES, "what decode has is not sent"


def test_one_layout_on_both_sides_goes_rank_to_rank(pairs, monkeypatch):
    """SGLang's copy of whole virtual pages."""
    monkeypatch.setattr(common, "plan_pair", forbidden)
    pair = pairs(Server(2, 2, 64, 64), Server(2, 2, 64, 64))
    assert pair.send(512).succeeded
    pair.audit(0, 512)


def test_block_size_1_on_both_sides_is_sglangs(pairs, monkeypatch):
    monkeypatch.setattr(common, "plan_pair", forbidden)
    pair = pairs(Server(1, 1, 1, 16), Server(2, 2, 1, 16))
    assert pair.send(200).succeeded
    pair.audit(0, 200)
    (sender,) = pair.senders
    for peer in pair.receivers:
        assert len(peer.registration()) == 1 + ours.STOCK_FRAMES, "no frame of ours behind the word it begins with"
        assert type(sender.manager.decode_kv_args_table[peer.session].dst_dcp_size) is int


def test_one_prefill_server_serves_sglangs_peers_and_ours():
    prefill, stock, blocks = prefill_of(), peers_of(DcpLayout(2, 1)), peers_of(DcpLayout(2, 16))
    for room, peers in enumerate((stock, blocks, stock), 1):
        for peer in peers:
            peer.clear()
        verdicts, want = run_request(prefill, peers, Request(77, 0, 32), room, register=room < 3)
        assert succeeded(verdicts), verdicts
        assert_all_rows(peers, want)


def forbidden(*_, **__):
    raise AssertionError("our plan was asked for")


def test_no_pack_buffer_and_whole_segments(monkeypatch):
    import sglang.srt.disaggregation.common.dcp_pack as dcp_pack

    monkeypatch.setattr(dcp_pack, "init_dcp_pack_buffers", forbidden)
    monkeypatch.setattr(dcp_pack, "try_pack_dcp_src", forbidden)
    counted = []
    monkeypatch.setattr(metrics, "record_transfer", lambda segments, n_bytes, s: counted.append((segments, n_bytes)))
    prefill, peers = prefill_of(), peers_of(DcpLayout(2, 16))
    verdicts, _ = run_request(prefill, peers, Request(16 * 16), room=1)
    assert succeeded(verdicts)
    assert [n for _, n in prefill.segments] == [16 * ROW_BYTES] * 16 * LAYERS, (
        "16 blocks in 3 layers, each in one piece"
    )
    assert counted == [(8 * LAYERS, 8 * 16 * LAYERS * ROW_BYTES)] * 2, "the metrics, a chunk on each of two ranks"
    assert prefill.manager._dcp_pack_max_tokens is None, "sends are not cut to a buffer's size either"


# -- two processes, and one that dies ----------------------------------------------------------------------------------


@pytest.fixture
def decode_server():
    yield from remote_ranks(decode_process, RemoteNixlPeer)


def test_rows_in_other_processes_and_one_that_is_killed(decode_server):
    layout = DcpLayout(2, 16)
    prefill, (peers, processes) = prefill_of(), decode_server(layout, 10, 16)
    for room, length in enumerate((33, 300), 1):
        verdicts, want = run_request(prefill, peers, Request(length, 0, 48), room, register=room == 1)
        assert succeeded(verdicts), verdicts
        for peer in peers:
            peer.read()
        assert_all_rows(peers, want)
    processes[0].kill()
    processes[0].join()
    prefill.open_room(9)
    for peer in peers:
        peer.tell(prefill.endpoint, peer.metadata(9, np.array([0, 1]), 0, 2))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(9, ())) == 2, "both peers are known")
    prefill.send(9, np.arange(4), 0, 64, last=True)
    assert_failed([peers[1].verdict(60)], 9, "NIXL_ERR_REMOTE_DISCONNECT")

    others = peers_of(layout)
    verdicts, want = run_request(prefill, others, Request(200), room=10)
    assert succeeded(verdicts), verdicts
    assert_all_rows(others, want)
    assert prefill.threads_alive()


# -- failures and aborts -----------------------------------------------------------------------------------------------


def test_a_write_that_nixl_refuses_fails_that_request_alone():
    prefill, peers = prefill_of(), peers_of(DcpLayout(2, 16))
    prefill.manager.agent.refuse = True
    verdicts, _ = run_request(prefill, peers, Request(100), room=1)
    assert_failed(verdicts, 1, "refused by this test")
    prefill.manager.agent.refuse = False
    verdicts, want = run_request(prefill, peers, Request(100), room=2, register=False)
    assert succeeded(verdicts)
    assert_all_rows(peers, want)
    assert prefill.threads_alive()


def test_pages_that_do_not_cover_the_tokens_fail_that_request():
    prefill, peers = prefill_of(), peers_of(DcpLayout(2, 16))
    prefill.open_room(1)
    for peer in peers:
        peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(1, np.array([0]), 0, 2))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(1, ())) == 2, "both peers are known")
    prefill.send(1, np.arange(8), 0, 128, last=True)
    words = "no transfer plan for this chunk: the destination side gave 1 pages where the tokens to send need 4"
    assert_failed([p.verdict() for p in peers], 1, words)
    assert not prefill.segments
    assert succeeded(run_request(prefill, peers, Request(100), room=2, register=False)[0])


def test_abort_between_chunks_stops_the_rest_and_pages_can_be_reused(pairs):
    """Decode aborts after the first chunk of one sender; every sender acknowledges once nothing is in flight."""
    pair = pairs(Server(2, 2, 64, 64), Server(4, 4, 16, 64))
    request = pair.open(0, 700)
    request.senders[0].init(6, 1)
    pages = pair.src_pages[:2].astype(np.int32)
    request.senders[0].send(pages, num_kv_tokens=256)  # rank 0 has begun, rank 1 has not
    wait_until(lambda: kv_bytes(pair.senders[0]) == 128 * LAYERS * ROW_BYTES, "rank 0 has posted its first chunk")
    assert_abort_frees_the_pages(pair, request, pages)


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MISFITS, ids=lambda c: c.name)
def test_a_peer_that_does_not_fit_is_refused_in_one_sentence(case, monkeypatch, caplog):
    monkeypatch.setattr(runtime, "_layout", case.prefill_layout)
    prefill = prefill_of(layout=case.prefill_layout)
    bad = NixlPeer(case.layout, 0, 6, case.page_size, **dict(case.peer))
    assert_refused(prefill, bad, case, caplog)
    prefill.send(1, np.arange(2), 0, 32, last=True)  # and again
    assert not prefill.segments and not bad.aux.any(), "not a byte was sent"
    assert all((layer == CANARY).all() for layer in bad.kv)
    assert prefill.threads_alive()
    if prefill.layout.dcp_size == 1:  # a peer that fits is served by the same threads
        good = peers_of(DcpLayout(2, 16))
        verdicts, want = run_request(prefill, good, Request(77), room=2)
        assert succeeded(verdicts)
        assert_all_rows(good, want)


def refusal(prefill: NixlPrefill, peer: NixlPeer) -> str:
    known = prefill.manager.decode_kv_args_table

    def found() -> str | None:
        # SGLang knows its own pair's peer, by a plain size, a moment before its check fails.
        return peer.session in known and getattr(known[peer.session].dst_dcp_size, "refusal", None)

    wait_until(found, "it is refused")
    return found()


def test_a_misfit_of_sglangs_own_pair_does_not_end_the_thread_either():
    prefill = prefill_of()
    bad = NixlPeer(DcpLayout(2, 1), 0, 6, 16, row_bytes=80)
    bad.tell(prefill.endpoint, bad.registration())
    assert "start both servers with the same model" in refusal(prefill, bad)
    peers = peers_of(DcpLayout(2, 16))
    verdicts, want = run_request(prefill, peers, Request(77), room=1)
    assert succeeded(verdicts)
    assert_all_rows(peers, want)


def test_a_peer_that_was_refused_is_taken_after_it_registers_rightly():
    prefill, peers = prefill_of(), peers_of(DcpLayout(2, 16))
    message = peers[0].registration()
    message[-1] = other_version(message[-1])
    peers[0].tell(prefill.endpoint, message)
    assert "version 4" in refusal(prefill, peers[0])
    verdicts, want = run_request(prefill, peers, Request(77), room=1)
    assert succeeded(verdicts)
    assert_all_rows(peers, want)


@pytest.mark.parametrize(
    "what,words",
    [
        ("not MLA", "multi-head latent attention"),
        ("state", "multi-head latent attention"),
        ("draft", "speculative decoding"),
        ("stages", "not tested with --pp-size"),
        ("fewer layers", "decode registered fewer KV regions"),
        ("another rank of one layout", "matching DCP ranks"),
    ],
)
def test_kv_that_can_not_be_sent_is_refused(what, words, monkeypatch):
    layout = DcpLayout(2, 16) if what.startswith("another rank") else NO_DCP
    monkeypatch.setattr(runtime, "_layout", layout)
    prefill, peer = prefill_of(layout=layout), NixlPeer(DcpLayout(2, 16), 1, 2, 16)
    if what == "not MLA":
        prefill.manager.is_mla_backend = False
    elif what == "state":
        prefill.manager.kv_args.state_types = ["mamba"]
    elif what == "draft":
        prefill.manager.kv_args.num_draft_entries = 1
    elif what == "stages":
        prefill.manager.pp_size = 2
    elif what == "fewer layers":
        a = peer.manager.kv_args
        a.kv_data_ptrs, a.kv_item_lens, a.kv_data_mem_kinds = a.kv_data_ptrs[:1], a.kv_item_lens[:1], ["DRAM"]
    peer.tell(prefill.endpoint, peer.registration())
    assert words in refusal(prefill, peer)
    assert prefill.threads_alive()


def test_the_frame_stands_behind_sglangs():
    peer = NixlPeer(DcpLayout(2, 16), 0, 2, 16)
    message = peer.registration()[1:]
    assert len(message) == ours.STOCK_FRAMES + 1
    assert wire.decode(wire.find(message, ours.STOCK_FRAMES)) == wire.KvGeometry(2, 16, 16, "bfloat16")


# -- controls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mistake", ["sender flip", "receiver flip", "one sender silent", "destination off by one"])
def test_control_a_wrong_map_is_seen(mistake, pairs, monkeypatch):
    plan = common.plan_pair

    def wrong(src, dst, start, length):
        if mistake == "sender flip":
            src = src._replace(rank=1 - src.rank)
        elif mistake == "receiver flip":
            dst = dst._replace(rank=dst.layout.dcp_size - 1 - dst.rank)
        elif mistake == "one sender silent" and src.rank == 1:
            length = 0
        found = plan(src, dst, start, length)
        return found._replace(dst_row=found.dst_row + 1) if mistake == "destination off by one" else found

    monkeypatch.setattr(common, "plan_pair", wrong)
    pair = pairs(Server(2, 2, 64, 64), Server(4, 4, 16, 64))
    assert pair.send(512).succeeded, "the status says nothing: only the rows can tell"
    with pytest.raises(AssertionError):
        pair.audit(0, 512)


def test_every_hook_ran(pairs):
    """Rows of the table that this file did not exercise would be untested code."""
    from sglang_dcp_block.hooks import call_counts

    before = call_counts.copy()
    assert pairs(Server(2, 2, 64, 64), Server(2, 2, 16, 16)).send(100).succeeded
    ran = {target for target, n in call_counts.items() if n > before[target]}
    missing = {h.target for h in [*common.COMMON_HOOKS, *ours.NIXL_HOOKS]} - ran
    assert missing == {
        "sglang.srt.managers.disagg_service:start_disagg_service",  # a launcher's, in test_engines.py
        "sglang.srt.disaggregation.common.conn:CommonKVReceiver.failure_exception",  # of requests that fail
    }
