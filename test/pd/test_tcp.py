"""Mooncake's real TransferEngine over TCP on loopback, two processes, real buffers, SGLang's real managers.

A process for each decode rank holds its buffers behind a TransferEngine and does nothing; this one runs the prefill
manager. After each request every byte of every rank comes back for the row audit.
"""

import os
from multiprocessing.connection import Connection
from types import SimpleNamespace

import numpy as np
import pytest
from harness import (
    CANARY,
    LAYERS,
    Prefill,
    RemotePeer,
    assert_all_rows,
    buffers,
    remote_ranks,
    serve_buffers,
)
from test_any_pair import Server
from test_mooncake_hooks import Request, assert_failed, run_request, succeeded

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import common
from sglang_dcp_block.disaggregation import mooncake as ours

pytest.importorskip("mooncake.engine", reason="Mooncake's wheel is not installed")
pytestmark = pytest.mark.usefixtures("mooncake")


def transfer_engine():
    """As SGLang's MooncakeTransferEngine, without the rest of the server."""
    os.environ["MC_FORCE_TCP"] = "1"
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


class Tcp:
    """The methods of SGLang's engine wrapper that the transfer uses."""

    def __init__(self) -> None:
        self.engine = transfer_engine()
        self.sizes: list[int] = []

    def batch_transfer_sync(self, session, src, dst, sizes):
        self.sizes.append(len(src))
        return self.engine.batch_transfer_sync_write(session, src, dst, sizes)

    def send_probe(self, session):
        return self.engine.send_probe(session)

    def register(self, arrays):
        for a in arrays:
            whole = a if a.base is None else a.base
            assert self.engine.register_memory(whole.ctypes.data, whole.nbytes) == 0


def decode_process(pipe: Connection, rows: int) -> None:
    engine = Tcp()
    kv, aux = buffers(rows, CANARY), np.zeros(64, np.uint64)
    engine.register([*kv, aux])
    serve_buffers(pipe, f"127.0.0.1:{engine.engine.get_rpc_port()}", kv, aux)


class RemoteTcpPeer(RemotePeer):
    def engine_at(self, address: str) -> SimpleNamespace:
        return SimpleNamespace(get_session_id=lambda: address)


@pytest.fixture
def decode_server():
    yield from remote_ranks(decode_process, RemoteTcpPeer)


def prefill_server(pages: int, page_size: int) -> Prefill:
    engine = Tcp()
    prefill = Prefill(engine, pages, page_size)
    engine.register([*prefill.kv, prefill.aux])
    return prefill


def assert_rows_there(peers, want) -> None:
    for peer in peers:
        peer.read()
    assert_all_rows(peers, want)


@pytest.mark.parametrize("dcp_size,block_size,page_size", [(2, 64, 64), (4, 16, 64), (2, 16, 16)])
def test_rows_over_tcp(decode_server, dcp_size, block_size, page_size):
    layout = DcpLayout(dcp_size, block_size)
    prefill, (peers, _) = prefill_server(40, page_size), decode_server(layout, 8, page_size)
    b, cycle = block_size, layout.cycle
    room = 0
    for length in sorted({1, b - 1, b, b + 1, cycle - 1, cycle, cycle + 1, 3 * cycle + b + 5}):
        for chunk in (1 << 20, 2 * page_size):
            room += 1
            verdicts, want = run_request(prefill, peers, Request(length, 0, chunk), room, room, register=room == 1)
            assert succeeded(verdicts), verdicts
            assert_rows_there(peers, want)
            assert all(peer.aux[2] == 1 for peer in peers)
    assert prefill.threads_alive()
    assert prefill.manager._dcp_pack_buffers is None


@pytest.mark.parametrize(
    "prefill,decode",
    [
        (Server(2, 2, 16, 64), Server(4, 4, 64, 64)),
        (Server(4, 4, 64, 64), Server(1, 1, 1, 16)),
        pytest.param(Server(2, 2, 192, 64), Server(2, 2, 16, 16), marks=pytest.mark.slow),
        pytest.param(Server(4, 2, 1, 16), Server(2, 2, 64, 64), marks=pytest.mark.slow),
    ],
)
def test_rows_of_any_pair_over_tcp(prefill, decode, servers, decode_server):
    engine = Tcp()

    def peers(server: Server, virtual_pages: int):
        return decode_server(server.layout, virtual_pages, server.page, server.tp)[0]

    pair = servers(prefill, decode, engine, peers=peers)
    for sender in pair.senders:  # one engine holds the buffers of all prefill ranks
        engine.register([*sender.kv, sender.aux])
    for length, chunk in ((1, 1200), (decode.layout.cycle + 3, 1200), (1111, 300)):
        request = pair.send(length, chunk=chunk)
        assert request.succeeded, request.verdicts
        assert_rows_there(pair.receivers, pair.expected(0, length))
        assert all(peer.aux[2] == 1 for peer in pair.receivers)
    with pytest.raises(AssertionError):  # control: one row more than another length has
        assert_all_rows(pair.receivers, pair.expected(0, 1110))


def test_a_long_request_stays_under_the_lanes_queue(decode_server):
    """More segments than a TCP lane queues: 3 layers x 1,500 blocks for one rank, refused as one batch."""
    layout = DcpLayout(2, 1 << 2)
    prefill, (peers, _) = prefill_server(3200, 4), decode_server(layout, 1600, 4)
    verdicts, want = run_request(prefill, peers, Request(3000 * 4), room=1)
    assert succeeded(verdicts), verdicts
    assert_rows_there(peers, want)
    kv = [n for n in prefill.manager.engine.sizes if n > 1]
    assert sum(kv) == 2 * LAYERS * 1500 and max(kv) == ours.MAX_BATCH_SEGMENTS


def test_control_a_destination_off_by_one_is_seen(decode_server, monkeypatch):
    plan = common.plan_pair

    def wrong(*sides_and_span):
        found = plan(*sides_and_span)
        return found._replace(dst_row=found.dst_row + 1)

    monkeypatch.setattr(common, "plan_pair", wrong)
    prefill, (peers, _) = prefill_server(40, 16), decode_server(DcpLayout(2, 16), 8, 16)
    verdicts, want = run_request(prefill, peers, Request(128), room=1)
    assert succeeded(verdicts)
    with pytest.raises(AssertionError):
        assert_rows_there(peers, want)


def test_a_killed_decode_process_fails_its_requests_and_no_others(decode_server, monkeypatch):
    """Killed between two batches of one request; another decode server is served by the same prefill afterwards."""
    monkeypatch.setattr(ours, "MAX_BATCH_SEGMENTS", 8)
    layout = DcpLayout(2, 16)
    prefill, (peers, processes) = prefill_server(40, 16), decode_server(layout, 10, 16)
    engine, calls = prefill.manager.engine, []
    send = engine.batch_transfer_sync

    def killing(session, src, dst, sizes):
        calls.append(len(src))
        if len(calls) == 2:
            processes[0].kill()
            processes[0].join()
        return send(session, src, dst, sizes)

    monkeypatch.setattr(engine, "batch_transfer_sync", killing)
    verdicts, _ = run_request(prefill, peers, Request(16 * 16), room=1)
    assert_failed(verdicts, 1, "does not answer")
    assert peers[0].session in prefill.manager.failed_sessions

    others, _ = decode_server(layout, 10, 16)
    verdicts, want = run_request(prefill, others, Request(200), room=2)
    assert succeeded(verdicts), verdicts
    assert_rows_there(others, want)
    assert prefill.threads_alive()
