"""The Mooncake hooks on SGLang's real managers, threads and messages; only the engine that moves bytes is a stand-in.

Every send is judged by all bytes of all rows of all ranks: the request's rows must equal prefill's, every other row
must still hold its canary.
"""

import json
import logging
import threading
from types import SimpleNamespace
from typing import NamedTuple

import harness
import numpy as np
import pytest
import requests
from harness import LAYERS, NO_DCP, ROW_BYTES, CopyEngine, Peer, Prefill, assert_rows, expected_rows, wait_until

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import common, wire
from sglang_dcp_block.disaggregation import mooncake as ours

pytestmark = pytest.mark.usefixtures("mooncake")


class Request(NamedTuple):
    """``end`` prompt tokens, of which decode has ``prefix``; sent in chunks of ``chunk`` tokens (whole pages)."""

    end: int
    prefix: int = 0
    chunk: int = 1 << 20


def run_request(
    prefill: Prefill,
    peers: list[Peer],
    request: Request,
    room: int,
    seed: int = 0,
    register: bool = True,
    pages: tuple[np.ndarray, np.ndarray] | None = None,
):
    """One request through registration, metadata, chunks and status. Returns each peer's (room, status, reason).

    pages: where it lies at prefill and at decode, anywhere unless said.
    """
    ps, rng = prefill.page_size, np.random.default_rng(seed)
    tokens = request.end - request.prefix
    width, height = peers[0].layout.virtual_page_size(ps), peers[0].layout.rows_per_virtual_page(ps)
    src_pages, dst_pages = pages or (
        rng.permutation(len(prefill.kv[0]) // ps),
        rng.permutation(peers[0].rows // height),
    )
    src_pages, dst_pages = src_pages[: -(-tokens // ps)], dst_pages[: -(-tokens // width)]
    prefill.open_room(room)
    for peer in peers:
        if register:
            peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(room, dst_pages, request.prefix, len(peers)))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(room, ())) == len(peers), "all peers are known")
    for begin in range(0, tokens, request.chunk):
        n = min(request.chunk, tokens - begin)
        chunk = src_pages[begin // ps : -(-(begin + n) // ps)]
        prefill.send(room, chunk, begin // ps, n, last=begin + n == tokens)
    want = [expected_rows(prefill, p, src_pages, dst_pages, request.prefix, request.end, request.prefix) for p in peers]
    return [peer.verdict() for peer in peers], want


def peers_of(layout: DcpLayout, page_size: int, virtual_pages: int = 10, **options) -> list[Peer]:
    return [Peer(layout, r, virtual_pages, page_size, **options) for r in range(layout.dcp_size)]


def succeeded(verdicts) -> bool:
    from sglang.srt.disaggregation.base.conn import KVPoll

    return all(status == KVPoll.Success for _, status, _ in verdicts)


def assert_failed(verdicts, room: int, words: str) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    for got_room, status, reason in verdicts:
        assert (got_room, status) == (room, KVPoll.Failed)
        assert words in reason and reason.count(". ") == 0, reason


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size,block_size", [(16, 16), (64, 64), (64, 16), (16, 1), (16, 48)])
@pytest.mark.parametrize("dcp_size", [2, 4])
def test_rows_of_every_length(dcp_size, page_size, block_size):
    layout = DcpLayout(dcp_size, block_size)
    b, cycle = block_size, layout.cycle
    prefill, peers = Prefill(CopyEngine(), 40, page_size), peers_of(layout, page_size)
    room = 0
    for length in sorted({1, b - 1, b, b + 1, cycle - 1, cycle, cycle + 1, 2 * cycle + b + 1} - {0}):
        for chunk in (1 << 20, 2 * page_size):
            room += 1
            for peer in peers:
                peer.clear()
            verdicts, want = run_request(prefill, peers, Request(length, 0, chunk), room, room, register=room == 1)
            assert succeeded(verdicts)
            for peer, rows in zip(peers, want, strict=True):
                assert_rows(peer, rows)
                assert peer.aux[2] == 1
    assert prefill.threads_alive()


def assert_fp8_rows(prefill_rank: type[Prefill], peer: type[Peer], engine, monkeypatch) -> None:
    """DeepSeek-V3's rows in FP8: 576 bytes, half of bf16's. Both servers name the dtype."""
    monkeypatch.setattr(harness, "ROW_BYTES", 576)
    layout, ps, fp8 = DcpLayout(2, 16), 32, {"kv_dtype": "fp8_e4m3"}
    prefill = prefill_rank(engine, 40, ps, **fp8)
    peers = [peer(layout, r, 10, ps, row_bytes=576, **fp8) for r in range(layout.dcp_size)]
    for room, length in enumerate((1, 15, 16, 17, 31, 32, 33, 81, 160), 1):
        for one in peers:
            one.clear()
        verdicts, want = run_request(prefill, peers, Request(length, 0, 64), room, room, register=room == 1)
        assert succeeded(verdicts), verdicts
        harness.assert_all_rows(peers, want)
    assert peers[0].kv[0].shape[1] == 576 and want[1][0].max() != want[1][0].min()


def test_fp8_rows(monkeypatch):
    assert_fp8_rows(Prefill, Peer, CopyEngine(), monkeypatch)


@pytest.mark.parametrize("chunk", [1 << 20, 32])
def test_decode_prefix_is_not_sent_again(chunk):
    layout, ps = DcpLayout(2, 16), 32
    prefill, peers = Prefill(CopyEngine(), 40, ps), peers_of(DcpLayout(2, 16), ps)
    prefix = 2 * layout.virtual_page_size(ps)
    verdicts, want = run_request(prefill, peers, Request(prefix + 77, prefix, chunk), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)


def test_a_rank_that_owns_nothing_completes_without_a_transfer():
    engine = CopyEngine()
    prefill, peers = Prefill(engine, 8, 64), peers_of(DcpLayout(4, 64), 64)
    verdicts, want = run_request(prefill, peers, Request(10), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)
    assert len(engine.kv_batches()) == 1, "one batch for rank 0; ranks 1, 2 and 3 own none of 10 tokens"


@pytest.mark.parametrize("mistake", ["owner flip", "destination off by one", "last chunk dropped", "block order"])
def test_control_rows_show_a_wrong_send(mistake, monkeypatch):
    layout, ps = DcpLayout(2, 16), 16
    plan = common.plan_pair

    def wrong(src, dst, start, length):
        if mistake == "owner flip":
            dst = dst._replace(rank=dst.rank ^ 1)
        elif mistake == "last chunk dropped" and start > 0:
            length = 0
        found = plan(src, dst, start, length)
        if mistake == "destination off by one":
            found = found._replace(dst_row=found.dst_row + 1)
        elif mistake == "block order":
            found = found._replace(src_row=found.src_row[::-1])
        return found

    monkeypatch.setattr(common, "plan_pair", wrong)
    prefill, peers = Prefill(CopyEngine(), 40, ps), peers_of(layout, ps)
    verdicts, want = run_request(prefill, peers, Request(4 * layout.cycle, 0, 2 * layout.cycle), room=1)
    assert succeeded(verdicts), "the status says nothing: only the rows can tell"
    with pytest.raises(AssertionError):
        for peer, rows in zip(peers, want, strict=True):
            assert_rows(peer, rows)


def test_same_layout_on_both_sides_goes_rank_to_rank(monkeypatch):
    """P = P and B = B: SGLang copies virtual pages verbatim; no relayout, no pack buffer."""
    from sglang_dcp_block import runtime

    layout, ps = DcpLayout(2, 16), 16
    monkeypatch.setattr(runtime, "_layout", layout)
    for rank in range(2):
        prefill = Prefill(CopyEngine(), 8, ps, layout=layout, rank=rank)
        peer = Peer(layout, rank, 8, ps)
        prefill.open_room(1)
        peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(1, np.array([5, 2]), 0, 1))
        wait_until(lambda known=prefill.manager.transfer_infos: 1 in known, "the peer is known")
        assert not prefill.manager.decode_kv_args_table[peer.session].requires_dcp_relayout
        prefill.send(1, np.array([3, 6]), 0, 2 * layout.virtual_page_size(ps), last=True)
        assert succeeded([peer.verdict()])
        for layer in range(LAYERS):
            np.testing.assert_array_equal(peer.kv[layer][5 * ps : 6 * ps], prefill.kv[layer][3 * ps : 4 * ps])
            np.testing.assert_array_equal(peer.kv[layer][2 * ps : 3 * ps], prefill.kv[layer][6 * ps : 7 * ps])


# -- what the send costs ---------------------------------------------------------------------------------------------


def test_no_pack_buffer_and_whole_segments(monkeypatch):
    engine = CopyEngine()
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)

    def forbidden(*_, **__):
        raise AssertionError("a pack buffer or a per-token plan was asked for")

    import sglang.srt.disaggregation.common.dcp_pack as dcp_pack
    import sglang.srt.disaggregation.mooncake.conn as conn

    monkeypatch.setattr(dcp_pack, "init_dcp_pack_buffers", forbidden)
    monkeypatch.setattr(dcp_pack, "try_pack_dcp_src", forbidden)
    monkeypatch.setattr(conn, "build_dcp_token_transfer_plan", forbidden)
    verdicts, _ = run_request(prefill, peers, Request(16 * 16), room=1)
    assert succeeded(verdicts)
    assert prefill.manager._dcp_pack_buffers is None, "zero bytes of pack buffer"
    assert prefill.manager._dcp_pack_max_tokens is None, "sends are not cut to a buffer's size either"
    sizes = [n for batch in engine.kv_batches() for *_, n in batch]
    assert sizes == [16 * ROW_BYTES] * 16 * LAYERS, "16 blocks in 3 layers, each in one piece"


def test_block_size_1_is_stock(monkeypatch):
    """No frame, and SGLang's own plan and send: the hooks hand everything through."""
    import sglang.srt.disaggregation.mooncake.conn as conn

    calls = []
    stock = conn.build_dcp_token_transfer_plan
    monkeypatch.setattr(
        conn, "build_dcp_token_transfer_plan", lambda *a, **k: calls.append(type(k["dcp_size"])) or stock(*a, **k)
    )
    prefill, peers = Prefill(CopyEngine(), 40, 16), peers_of(DcpLayout(2, 1), 16)
    assert all(len(p.registration()) == wire.STOCK_FRAMES for p in peers)
    verdicts, want = run_request(prefill, peers, Request(77, 0, 32), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)
    assert calls == [int] * 6  # three chunks, two ranks


def test_batches_stay_under_the_limit(monkeypatch):
    monkeypatch.setattr(ours, "MAX_BATCH_SEGMENTS", 10)
    engine = CopyEngine()
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)
    verdicts, want = run_request(prefill, peers, Request(16 * 16), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)
    assert [len(b) for b in engine.kv_batches()] == [10, 10, 4] * 2  # 8 blocks x 3 layers per rank


def test_operators_batch_limit_is_respected():
    engine = CopyEngine()
    src = np.arange(100, dtype=np.uint64)
    data = np.zeros(400, np.uint8)
    base = np.uint64(data.ctypes.data)
    assert ours.send_batches(engine, "s", base + src, base + src + np.uint64(200), np.ones(100, np.uint64), 30) == (
        None,
        4,
    )
    assert [len(b) for b in engine.batches] == [30, 30, 30, 10]


def test_large_segments_are_bounded_by_bytes(monkeypatch):
    monkeypatch.setattr(ours, "MAX_BATCH_BYTES", 64)
    engine, data = CopyEngine(), np.zeros(400, np.uint8)
    src = np.uint64(data.ctypes.data) + np.arange(0, 200, 20, dtype=np.uint64)
    assert ours.send_batches(engine, "s", src, src + np.uint64(200), np.full(10, 20, np.uint64))[0] is None
    assert [len(b) for b in engine.batches] == [3, 3, 3, 1]


# -- refused batches, dead peers, aborts -------------------------------------------------------------------------------


def test_a_refused_batch_is_tried_again_smaller(monkeypatch):
    monkeypatch.setattr(ours, "RETRY_PAUSE_S", 0.001)
    engine = CopyEngine(refuse=lambda number, segments: -1 if segments > 7 else 0)
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)
    verdicts, want = run_request(prefill, peers, Request(16 * 16), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)
    assert engine.refused, "the control: something was refused"


def test_a_peer_that_answers_but_takes_nothing_fails_the_request_only(monkeypatch):
    monkeypatch.setattr(ours, "RETRY_PAUSE_S", 0.001)
    broken = [True]
    engine = CopyEngine(refuse=lambda number, segments: -1 if broken[0] else 0)
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)
    verdicts, _ = run_request(prefill, peers, Request(100), room=1)
    assert_failed(verdicts, 1, "with code -1 on try")
    assert 1 in prefill.manager._deferred_ack_poisoned_rooms, "decode must wait before it gives the pages to others"
    assert 2 <= len(engine.refused) <= ours.MAX_RETRIES + 1
    broken[0] = False
    peers = peers_of(DcpLayout(2, 16), 16)
    verdicts, want = run_request(prefill, peers, Request(100), room=2)
    assert succeeded(verdicts), "the next request, without a new registration being needed"
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)


def test_a_live_peer_is_not_blacklisted_and_a_dead_one_is(monkeypatch):
    monkeypatch.setattr(ours, "RETRY_PAUSE_S", 0.001)
    engine = CopyEngine(refuse=lambda number, segments: -1)
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)[:1]
    run_request(prefill, peers, Request(100), room=1)
    assert not prefill.manager.failed_sessions
    engine.dead.add(peers[0].session)
    verdicts, _ = run_request(prefill, peers, Request(100), room=2, register=False)
    assert_failed(verdicts, 2, "does not answer")
    assert prefill.manager.failed_sessions == {peers[0].session}
    verdicts, _ = run_request(prefill, peers, Request(100), room=3, register=False)
    assert_failed(verdicts, 3, "is not alive")
    assert prefill.threads_alive()


def test_peer_dies_mid_transfer_and_others_go_on(monkeypatch):
    monkeypatch.setattr(ours, "MAX_BATCH_SEGMENTS", 4)
    engine = CopyEngine()
    prefill = Prefill(engine, 40, 16)
    dying, other = peers_of(DcpLayout(2, 16), 16), peers_of(DcpLayout(4, 16), 16)
    engine.refuse = lambda number, segments: (engine.dead.add(dying[0].session) or -1) if number == 2 else 0
    verdicts, want = run_request(prefill, dying, Request(16 * 16), room=1)
    assert_failed(verdicts, 1, "does not answer")
    verdicts, want = run_request(prefill, other, Request(100), room=2)
    assert succeeded(verdicts)
    for peer, rows in zip(other, want, strict=True):
        assert_rows(peer, rows)
    assert prefill.threads_alive()


def test_a_batch_that_timed_out_is_not_sent_again(monkeypatch):
    monkeypatch.setattr(ours, "REFUSED_WITHIN_S", -1.0)
    engine = CopyEngine(refuse=lambda number, segments: -1)
    prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)
    verdicts, _ = run_request(prefill, peers, Request(100), room=1)
    assert_failed(verdicts, 1, "on try 1")
    assert len(engine.refused) == 1


def test_pages_that_do_not_cover_the_tokens_fail_that_request():
    prefill, peers = Prefill(CopyEngine(), 40, 16), peers_of(DcpLayout(2, 16), 16)
    prefill.open_room(1)
    for peer in peers:
        peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(1, np.array([0]), 0, 2))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(1, ())) == 2, "both peers are known")
    prefill.send(1, np.arange(8), 0, 128, last=True)
    assert_failed([p.verdict() for p in peers], 1, "destination side gave 1 pages where the tokens to send need 4")
    verdicts, _ = run_request(prefill, peers, Request(100), room=2, register=False)
    assert succeeded(verdicts) and prefill.threads_alive()


def test_abort_between_chunks_stops_the_rest_and_pages_can_be_reused():
    """Decode aborts after the first chunk; the acknowledgement comes once nothing of the request is in flight."""
    from sglang.srt.disaggregation.common.conn import AbortNotification

    layout, ps = DcpLayout(2, 16), 16
    engine = CopyEngine()
    prefill, peers = Prefill(engine, 40, ps), peers_of(layout, ps)
    prefill.open_room(1)
    for peer in peers:
        peer.tell(prefill.endpoint, peer.registration())
        peer.tell(prefill.endpoint, peer.metadata(1, np.array([0, 1, 2]), 0, 2))
    wait_until(lambda: len(prefill.manager.transfer_infos.get(1, ())) == 2, "both peers are known")
    prefill.send(1, np.arange(2), 0, 32, last=False)
    wait_until(lambda: len(engine.batches) == 2, "the first chunk has arrived at both ranks")
    for peer in peers:
        peer.tell(prefill.endpoint, AbortNotification(1, "127.0.0.1", peer.manager.rank_port, 7).to_zmq())
    for peer in peers:
        assert peer.manager.server_socket.poll(20_000)
        assert peer.manager.server_socket.recv_multipart()[0] == b"ABORT_ACK"
    prefill.send(1, np.arange(2, 4), 2, 32, last=True)
    for peer in peers:
        peer.clear()  # given to another request
    verdicts, want = run_request(prefill, peers, Request(77), room=2, seed=3, register=False)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)
    assert prefill.threads_alive()


# -- refusals on the prefill side --------------------------------------------------------------------------------------


def other_version(frame: bytes) -> bytes:
    return frame.replace(wire.MAGIC + b" 2 ", wire.MAGIC + b" 4 ")


class Misfit(NamedTuple):
    name: str
    words: str
    peer: tuple[tuple[str, object], ...] = ()
    layout: DcpLayout = DcpLayout(2, 16)
    page_size: int = 16
    frame: object = None
    prefill_layout: DcpLayout = NO_DCP


MISFITS = [
    Misfit(
        "version",
        "version 4 of the sglang-dcp-block frame and this prefill server reads versions 2 and 3",
        frame=other_version,
    ),
    Misfit("garbage", "unreadable sglang-dcp-block frame", frame=lambda f: wire.MAGIC + b" 2 {"),
    Misfit(
        "no rule",
        "unreadable sglang-dcp-block frame",
        frame=lambda f: f.replace(b'"block_size": 16', b'"block_size": 0'),
    ),
    Misfit(
        "no page",
        "unreadable sglang-dcp-block frame",
        frame=lambda f: f.replace(b'"page_size": 16', b'"page_size": 0'),
    ),
    Misfit(
        "page in words",
        "unreadable sglang-dcp-block frame",
        frame=lambda f: f.replace(b'"page_size": 16', b'"page_size": "16"'),
    ),
    Misfit(
        "rotated in the version that knows no rotation",
        "unreadable sglang-dcp-block frame",
        frame=lambda f: f.replace(b'"block_size"', b'"rotate": true, "block_size"'),
    ),
    Misfit(
        "rotated in words",
        "unreadable sglang-dcp-block frame",
        frame=lambda f: f.replace(b" 2 {", b' 3 {"rotate": "false", '),
    ),
    Misfit(
        "liar",
        "registered DCP size 2 but its frame says 4",
        frame=lambda f: f.replace(b'"dcp_size": 2', b'"dcp_size": 4'),
    ),
    Misfit("dtype", "--kv-cache-dtype differs (prefill bfloat16, decode fp8_e4m3)", peer=(("kv_dtype", "fp8_e4m3"),)),
    Misfit("row bytes", "KV geometry differs", peer=(("row_bytes", 80),)),
    Misfit("no frame", "did not say that it can receive", layout=DcpLayout(2, 1), prefill_layout=DcpLayout(2, 8)),
    Misfit("no frame, no DCP", "did not say that it can receive", layout=NO_DCP, prefill_layout=DcpLayout(2, 8)),
    Misfit("no frame at B = 1", "did not say that it can receive", layout=NO_DCP, prefill_layout=DcpLayout(2, 1)),
]


def assert_refused(prefill: Prefill, bad: Peer, case: Misfit, caplog) -> None:
    """``bad`` registers, asks for room 1 and is told why it gets nothing; the prefill's log says it too."""
    message = bad.registration()
    if case.frame:
        message[-1] = case.frame(message[-1])
    prefill.open_room(1)
    with caplog.at_level(logging.ERROR):
        bad.tell(prefill.endpoint, message)
        bad.tell(prefill.endpoint, bad.metadata(1, np.array([0, 1]), 0, 1))
        wait_until(lambda: 1 in prefill.manager.transfer_infos, "the peer is known")
    assert any(case.words in r.getMessage() for r in caplog.records), "the prefill's log says why"
    prefill.send(1, np.arange(2), 0, 32, last=True)
    assert_failed([bad.verdict()], 1, case.words)


@pytest.mark.parametrize("case", MISFITS, ids=lambda c: c.name)
def test_a_peer_that_does_not_fit_is_refused_in_one_sentence(case, monkeypatch, caplog):
    from sglang_dcp_block import runtime

    monkeypatch.setattr(runtime, "_layout", case.prefill_layout)
    engine = CopyEngine()
    prefill = Prefill(engine, 40, 16, layout=case.prefill_layout)
    bad = Peer(case.layout, 0, 6, case.page_size, **dict(case.peer))
    assert_refused(prefill, bad, case, caplog)
    assert not engine.batches, "not a byte was sent"
    for layer in bad.kv:
        assert (layer == 0xA5).all()

    # The next request of a peer that fits is served by the same threads.
    assert prefill.threads_alive()
    if prefill.layout.dcp_size == 1:
        good = peers_of(DcpLayout(2, 16), 16)
        verdicts, want = run_request(prefill, good, Request(77), room=2)
        assert succeeded(verdicts)
        for peer, rows in zip(good, want, strict=True):
            assert_rows(peer, rows)


def test_a_peer_that_was_refused_is_taken_after_it_registers_rightly():
    prefill, peers = Prefill(CopyEngine(), 40, 16), peers_of(DcpLayout(2, 16), 16)
    message = peers[0].registration()
    message[-1] = other_version(message[-1])
    peers[0].tell(prefill.endpoint, message)
    wait_until(lambda: prefill.manager.state_layout_rejections, "it is refused")
    verdicts, want = run_request(prefill, peers, Request(77), room=1)
    assert succeeded(verdicts)
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)


@pytest.mark.parametrize("what", ["is_mla_backend", "state_types"])
def test_kv_that_can_not_be_cut_is_refused(what):
    prefill = Prefill(CopyEngine(), 8, 16)
    if what == "is_mla_backend":
        prefill.manager.is_mla_backend = False
    else:
        prefill.manager.kv_args.state_types = ["mamba"]
    peer = Peer(DcpLayout(2, 16), 0, 2, 16)
    peer.tell(prefill.endpoint, peer.registration())
    wait_until(lambda: prefill.manager.state_layout_rejections, "it is refused")
    assert "multi-head latent attention" in prefill.manager.state_layout_rejections[peer.session]


def test_one_layout_but_another_rank_is_refused(monkeypatch):
    from sglang_dcp_block import runtime

    layout = DcpLayout(2, 16)
    monkeypatch.setattr(runtime, "_layout", layout)
    prefill, peer = Prefill(CopyEngine(), 8, 16, layout=layout, rank=0), Peer(layout, 1, 2, 16)
    peer.tell(prefill.endpoint, peer.registration())
    wait_until(lambda: prefill.manager.state_layout_rejections, "it is refused")
    assert "matching DCP ranks" in prefill.manager.state_layout_rejections[peer.session]
    assert prefill.threads_alive()


def test_draft_layers_are_refused():
    prefill = Prefill(CopyEngine(), 8, 16)
    prefill.manager.kv_args.num_draft_entries = 1
    peer = Peer(DcpLayout(2, 16), 0, 2, 16)
    peer.tell(prefill.endpoint, peer.registration())
    wait_until(lambda: prefill.manager.state_layout_rejections, "it is refused")
    assert "speculative decoding" in prefill.manager.state_layout_rejections[peer.session]


# -- refusals on the decode side ---------------------------------------------------------------------------------------


class Decode:
    """What try_ensure_parallel_info reads and writes of a decode manager, with three waiting requests."""

    __module__ = "sglang.srt.disaggregation.mooncake.conn"

    def __init__(self, address: str, page_size: int = 64) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.prefill_info_table, self.failures = {}, {}
        self.failure_records, self.failure_lock = self.failures, threading.Lock()
        self.addr_to_rooms_tracker = {address: {1, 2}, "elsewhere:1": {3}}
        self.request_status = {1: KVPoll.Bootstrapping, 2: KVPoll.WaitingForInput, 3: KVPoll.Bootstrapping}
        self.is_mla_backend, self.dcp_size, self.attn_tp_size, self.pp_size = True, 2, 2, 1
        self.kv_cache_dtype_str, self.kv_args = "bfloat16", SimpleNamespace(page_size=page_size, engine_rank=1)

    def record_failure(self, room, reason):
        self.failures[room] = reason

    def update_status(self, room, status):
        self.request_status[room] = status


@pytest.fixture
def bootstrap(monkeypatch):
    """Starts SGLang's real bootstrap server; ``with_plugin=False`` gives the stock one."""
    import socket

    from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

    from sglang_dcp_block import hooks

    servers = []

    def start(with_plugin: bool, prefill: DcpLayout = NO_DCP, page_size: int = 64, **more: str) -> str:
        monkeypatch.setattr(common, "_launched", lambda: wire.capability(prefill, page_size) | more)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        stock = hooks.original("sglang.srt.disaggregation.common.conn:CommonKVBootstrapServer._setup_routes")
        kind = (
            CommonKVBootstrapServer
            if with_plugin
            else type("Stock", (CommonKVBootstrapServer,), {"_setup_routes": stock})
        )
        servers.append(kind("127.0.0.1", port))

        def listening() -> bool:
            with socket.socket() as s:
                return s.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listening, "the bootstrap server listens")
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.close()


def ask(decode: Decode, address: str, original, block_size: int = 64) -> bool:
    from sglang_dcp_block import runtime

    runtime._layout = DcpLayout(2, block_size)
    return common.try_ensure_parallel_info(original, decode, address)


def takes(decode: Decode, tp_size: int = 1, cp_size: int = 1, sharding: bool = False):
    """Stands in for SGLang's method: takes the prefill server, and the page size that it was shown."""

    def original(manager, address: str) -> bool:
        decode.seen_page_size = manager.kv_args.page_size
        manager.prefill_info_table[address] = SimpleNamespace(
            attn_tp_size=tp_size,
            attn_cp_size=cp_size,
            enable_kv_cache_sharding=sharding,
            target_tp_rank=0,
            target_tp_ranks=[0],
            required_dst_info_num=1,
            required_prefill_response_num=1,
        )
        return True

    return original


def test_a_prefill_without_the_plugin_is_refused_before_anything_is_sent(bootstrap):
    from sglang.srt.disaggregation.base.conn import KVPoll

    address = bootstrap(with_plugin=False)
    decode = Decode(address)

    def original(*_):
        raise AssertionError("SGLang went on to talk to it")

    assert ask(decode, address, original) is False
    assert decode.failures == {
        1: f"the prefill server at {address} does not run sglang-dcp-block and would send KV in token round-robin "
        "order, but this decode server has --dcp-block-size 64: install sglang-dcp-block there (no flag needed), or "
        "start this server with --dcp-block-size 1."
    }
    assert decode.request_status == {1: KVPoll.Failed, 2: KVPoll.WaitingForInput, 3: KVPoll.Bootstrapping}


def reason_of(decode: Decode, address: str, room: int) -> str:
    """What SGLang answers to a request of ``room`` that failed on some rank of this decode server."""
    from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

    receiver = SimpleNamespace(kv_mgr=decode, bootstrap_addr=address, bootstrap_room=room, clear=lambda: None)
    with pytest.raises(KVTransferError) as error:
        CommonKVReceiver.failure_exception(receiver)
    return str(error.value)


def test_a_refused_request_says_why_whichever_rank_refused_it_first(bootstrap):
    address = bootstrap(with_plugin=False)
    decode = Decode(address)
    assert "another rank" in reason_of(decode, address, 4), "the control: this rank has not asked yet"
    assert ask(decode, address, takes(decode)) is False
    assert "does not run sglang-dcp-block" in reason_of(decode, address, 1)
    assert "does not run sglang-dcp-block" in reason_of(decode, address, 4), "came after, another rank refused it"
    decode.record_failure(5, "Aborted by AbortReq.")
    assert "does not run sglang-dcp-block" in reason_of(decode, address, 5), "SGLang gave up on the server"
    assert "another rank" in reason_of(decode, "elsewhere:1", 3), "other servers have nothing to do with it"


def test_a_refusal_is_forgotten_when_the_server_is_asked_again(bootstrap):
    """It may have been restarted with the plugin, or be gone."""
    address = bootstrap(with_plugin=True)
    decode = Decode(address)
    for port in (address, "127.0.0.1:9"):
        common.refusals_of(decode)[port] = "an old refusal"
        ask(decode, port, takes(decode))
    assert not common.refusals_of(decode)


def test_a_prefill_with_the_plugin_is_taken(bootstrap):
    address = bootstrap(with_plugin=True)
    decode = Decode(address)
    assert ask(decode, address, takes(decode)) is True
    info = decode.prefill_info_table[address]
    assert not decode.failures and info.target_tp_ranks == [0] and info.required_prefill_response_num == 1


def test_another_page_size_is_taken(bootstrap):
    address = bootstrap(with_plugin=True, page_size=16)
    decode = Decode(address, page_size=64)
    assert ask(decode, address, takes(decode)) is True
    assert decode.seen_page_size == 16 and decode.kv_args.page_size == 64


def test_all_ranks_of_a_prefill_under_dcp_are_asked(bootstrap):
    address = bootstrap(with_plugin=True, prefill=DcpLayout(4, 16))
    decode = Decode(address)
    assert ask(decode, address, takes(decode, tp_size=4)) is True
    info = decode.prefill_info_table[address]
    assert (info.target_tp_rank, info.target_tp_ranks) == (None, [0, 1, 2, 3])
    assert (info.required_dst_info_num, info.required_prefill_response_num) == (2, 4)


def test_ranks_that_can_not_be_shared_out_are_refused(bootstrap):
    address = bootstrap(with_plugin=True, prefill=DcpLayout(2, 16))
    decode = Decode(address)
    assert ask(decode, address, takes(decode, tp_size=6)) is False
    assert decode.failures[1] == (
        "prefill has 3 DCP groups (--tp-size 6, --dcp-size 2) for 2 decode ranks: choose sizes of which one divides "
        "the other."
    )
    assert not decode.prefill_info_table, "it is asked again for later requests"


@pytest.mark.parametrize("option", ["--attn-cp-size above 1", "--enable-kv-cache-sharding"])
@pytest.mark.parametrize("prefill,page_size", [(DcpLayout(2, 16), 64), (NO_DCP, 16)])
def test_a_prefill_whose_ranks_share_out_a_request_otherwise_is_refused(option, prefill, page_size, bootstrap):
    address = bootstrap(with_plugin=True, prefill=prefill, page_size=page_size)
    decode = Decode(address)
    original = takes(decode, tp_size=2, cp_size=1 + ("cp" in option), sharding="sharding" in option)
    assert ask(decode, address, original, block_size=16) is False
    assert decode.failures[1] == (f"prefill has {option}, which is not tested between two layouts: start it without.")
    assert not decode.prefill_info_table


def test_a_decode_server_in_stages_is_refused(bootstrap):
    """At B = 1, where no refusal at start looks at --pp-size."""
    address = bootstrap(with_plugin=True, prefill=DcpLayout(2, 16))
    decode = Decode(address)
    decode.pp_size = 2
    assert ask(decode, address, takes(decode, tp_size=2), block_size=1) is False
    assert decode.failures[1] == (
        "decode has --pp-size above 1, which is tested at prefill only: use --pp-size 1 there."
    )


@pytest.mark.parametrize("with_plugin,prefill", [(False, NO_DCP), (True, NO_DCP), (True, DcpLayout(2))])
def test_block_size_1_on_both_sides_is_left_to_sglang(bootstrap, with_plugin, prefill):
    address = bootstrap(with_plugin, prefill)
    decode = Decode(address)
    asked = []
    assert ask(decode, address, lambda manager, _: asked.append(manager) or True, block_size=1) is True
    assert asked == [decode], "SGLang's own manager, not a view of it"
    assert not hasattr(decode, "dcp_block_pairs"), "and no frame is sent"


def test_block_size_1_takes_a_prefill_with_blocks(bootstrap):
    address = bootstrap(with_plugin=True, prefill=DcpLayout(2, 16))
    decode = Decode(address)
    assert ask(decode, address, takes(decode, tp_size=2), block_size=1) is True
    assert decode.dcp_block_pairs and decode.prefill_info_table[address].target_tp_ranks == [0, 1]


def test_another_version_is_refused(bootstrap):
    address, decode = bootstrap(with_plugin=True), wire.KvGeometry(2, 64, 64, "bfloat16")
    answer = {"frame_version": 1}
    assert "reads version 1" in wire.capability_refusal(200, answer, address, decode)
    assert wire.served_geometry(200, answer, "bfloat16") is None
    assert "does not run sglang-dcp-block" in wire.capability_refusal(200, ["?"], address, decode)
    assert wire.served_geometry(404, None, "bfloat16") is None
    good = wire.capability(DcpLayout(2, 16), 64)
    assert wire.capability_refusal(200, good, address, decode) is None
    assert wire.served_geometry(200, good, "bfloat16") == wire.KvGeometry(2, 16, 64, "bfloat16")
    rotate = [
        {"rotate": True},
        {"frame_version": 3, "rotate": 1},
        {"frame_version": 3, "rotate": True, "block_size": 1},
    ]
    for nonsense in ({"dcp_size": None}, {"block_size": 0}, {"page_size": "?"}, *rotate):
        assert "sent an unreadable layout" in wire.capability_refusal(200, good | nonsense, address, decode)


#: What a peer sent and read before there was rotation.
OLD_FRAME = b'sglang-dcp-block 2 {"dcp_size": 2, "block_size": 64, "page_size": 64, "kv_dtype": "bfloat16"}'
OLD_ANSWER = {"frame_version": 2, "dcp_size": 2, "block_size": 64, "page_size": 64}


def test_peers_without_rotation_see_what_they_always_saw():
    plain = wire.KvGeometry(2, 64, 64, "bfloat16")
    assert wire.encode(plain) == OLD_FRAME and wire.decode(OLD_FRAME) == plain
    assert wire.capability(plain.layout, 64) == OLD_ANSWER == wire.answer_in_version(OLD_ANSWER, None)
    assert wire.route(plain) == wire.ROUTE
    assert wire.served_geometry(200, OLD_ANSWER, "bfloat16") == plain


def test_rotation_takes_another_version_which_old_peers_refuse(bootstrap):
    rotated = wire.KvGeometry(2, 64, 64, "bfloat16", rotate=True)
    frame = wire.encode(rotated)
    assert frame.startswith(b"sglang-dcp-block 3 ") and wire.decode(frame) == rotated
    answer = wire.capability(rotated.layout, 64)
    assert answer == OLD_ANSWER | {"frame_version": 3, "rotate": True}, "an old decode server reads version 2 only"
    assert wire.served_geometry(200, answer, "bfloat16") == rotated
    # An old prefill server doesn't look at what was asked for; a new one says that it reads it.
    assert "reads version 2 of the sglang-dcp-block frame and this decode server sends version 3" in (
        wire.capability_refusal(200, OLD_ANSWER, "host:1", rotated)
    )
    assert wire.capability_refusal(200, wire.answer_in_version(OLD_ANSWER, "3"), "host:1", rotated) is None
    for asked in ("2", "4", "x", ""):
        assert wire.answer_in_version(OLD_ANSWER, asked) == OLD_ANSWER
    address = bootstrap(with_plugin=True)
    served = requests.get(f"http://{address}{wire.route(rotated)}", timeout=5).json()
    assert served["frame_version"] == 3 and wire.capability_refusal(200, served, address, rotated) is None


@pytest.mark.parametrize("block_size", [1, 64])
def test_another_transfer_backend_is_refused(bootstrap, block_size):
    """SGLang's own pair too: the first message would end the thread that serves all decode servers."""
    address = bootstrap(with_plugin=True, transfer_backend="nixl")
    decode = Decode(address)
    assert ask(decode, address, takes(decode), block_size) is False
    assert "has --disaggregation-transfer-backend nixl and this decode server has mooncake" in decode.failures[1]
    address = bootstrap(with_plugin=True, transfer_backend="mooncake")
    decode = Decode(address)
    assert ask(decode, address, takes(decode), block_size) is True


def test_a_check_of_sglang_that_raises_fails_the_requests_not_the_scheduler(bootstrap):
    address = bootstrap(with_plugin=True)
    decode = Decode(address)

    def original(*_):
        raise RuntimeError("KV cache dtype mismatch: prefill server has kv_cache_dtype=fp8_e4m3.")

    assert ask(decode, address, original) is False
    assert "KV cache dtype mismatch" in decode.failures[1]


def test_a_silent_prefill_is_asked_again_later():
    decode = Decode("127.0.0.1:9")
    assert ask(decode, "127.0.0.1:9", lambda *_: True) is False
    assert not decode.failures


def test_a_prefill_that_is_not_up_yet_is_asked_again_later(monkeypatch):
    import requests

    monkeypatch.setattr(requests, "get", lambda *_, **__: SimpleNamespace(status_code=503))
    decode = Decode("127.0.0.1:9")
    assert ask(decode, "127.0.0.1:9", lambda *_: True) is False
    assert not decode.failures


# -- who sends to whom -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("prefill_tp,dcp", [(t, p) for t in (1, 2, 4, 8) for p in (1, 2, 4, 8) if p <= t])
def test_every_rank_of_prefill_is_told_and_one_group_sends(prefill_tp, dcp, decode_tp):
    known_by, load = [0] * prefill_tp, [0] * prefill_tp
    receivers = set()
    for rank in range(decode_tp):
        known, sending, n = wire.senders_of(rank, decode_tp, prefill_tp, dcp)
        assert len(sending) == dcp and set(sending) <= set(known), "one whole DCP group"
        assert sending[0] % dcp == 0, "SGLang's DCP rank is the TP rank modulo the DCP size"
        for r in known:
            known_by[r] += 1
        for r in sending:
            load[r] += 1
        receivers.add(n)
    assert set(known_by) == receivers, "each sender is told by as many ranks as it waits for; none waits for ever"
    assert max(load) - min(load) <= 1, "the groups share the work"


# -- the frame ---------------------------------------------------------------------------------------------------------


def test_frame_round_trip():
    geometry = wire.KvGeometry(8, 64, 64, "bfloat16")
    frame = wire.encode(geometry)
    assert wire.decode(frame) == geometry and frame.isascii()
    assert wire.find([b""] * wire.STOCK_FRAMES + [frame]) == frame
    assert wire.find([b""] * wire.STOCK_FRAMES) is None
    assert json.loads(frame.split(b" ", 2)[2]) == {
        "dcp_size": 8,
        "block_size": 64,
        "page_size": 64,
        "kv_dtype": "bfloat16",
    }


def test_every_hook_ran(bootstrap, monkeypatch):
    """Rows of the table that this file did not exercise would be untested code."""
    from sglang_dcp_block.hooks import call_counts

    monkeypatch.setattr(ours, "RETRY_PAUSE_S", 0.001)
    call_counts.clear()
    working, failing = CopyEngine(), CopyEngine(refuse=lambda *_: -1)
    for engine, succeeds in ((working, True), (failing, False)):
        prefill, peers = Prefill(engine, 40, 16), peers_of(DcpLayout(2, 16), 16)
        assert succeeded(run_request(prefill, peers, Request(77), room=1)[0]) == succeeds
    address = bootstrap(with_plugin=True)
    reason_of(Decode(address), address, 1)
    # Tests of the decode side call it directly; a launcher, in test_engines.py; senders, in test_any_pair.py.
    elsewhere = ("try_ensure_parallel_info", "start_disagg_service", "pop_decode_prefix_len")
    missing = [
        h.target
        for h in [*common.COMMON_HOOKS, *ours.MOONCAKE_HOOKS]
        if not call_counts[h.target] and not h.target.endswith(elsewhere)
    ]
    assert not missing
