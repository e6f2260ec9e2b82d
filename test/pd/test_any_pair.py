"""Any layout to any other: SGLang's real senders, receivers, managers, messages and bootstrap server, on every rank.

A prefill server of ``tp`` ranks holds random KV, dealt out token by token; a decode server's ranks ask the bootstrap
server, register with the prefill ranks that the plugin names, and wait for their status. Then every byte of every
decode rank is compared. Only the engine that moves bytes is a stand-in here; test_tcp.py has Mooncake's.
"""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from itertools import count, cycle, product
from typing import NamedTuple

import numpy as np
import pytest
import requests
from brute_force import deal, first_ranks
from harness import (
    CANARY,
    LAYERS,
    ROW_BYTES,
    CopyEngine,
    Peer,
    Prefill,
    assert_rows,
    wait_until,
)

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import common, mooncake, wire

SPARE_PAGES = 2
LONGEST = 1200


class Server(NamedTuple):
    """tp: attention TP ranks, in DCP groups of ``dcp`` that all hold the same KV.

    pp: pipeline stages, each with some of the layers. dp: DP attention groups; a request is in one of them.
    rotate: each virtual page begins at another rank.
    """

    tp: int
    dcp: int
    block: int
    page: int
    pp: int = 1
    dp: int = 1
    rotate: bool = False

    @property
    def layout(self) -> DcpLayout:
        layout = DcpLayout(self.dcp, self.block)
        return layout.rotated(self.page) if self.rotate else layout

    @property
    def ranks(self) -> list[Rank]:
        return [Rank(*r) for r in product(range(self.dp), range(self.pp), range(self.tp))]


class Rank(NamedTuple):
    group: int
    stage: int
    tp: int


class Place(NamedTuple):
    owner: int  # if the page begins at rank 0
    page: int  # virtual page of the request
    row: int  # in that page

    def rank(self, server: Server, page_id: int) -> int:
        """The owner, in the virtual page that the server took for it."""
        ranks = list(range(server.dcp)) * 2
        return ranks[self.owner + first_ranks(page_id + 1, server.dcp)[page_id]] if server.rotate else self.owner


def dealt(server: Server, tokens: int) -> list[Place]:
    """Where each token lies, by dealing tokens to ranks in blocks and counting rows off into pages."""
    rows_per_page = next(n for n in count(1) if n % server.page == 0 and n % server.block == 0)
    owner, row, _ = deal(tokens, server.dcp, server.block)
    return [Place(o, *divmod(r, rows_per_page)) for o, r in zip(owner.tolist(), row.tolist(), strict=True)]


def pages_for(server: Server, tokens: int) -> int:
    return max((place.page for place in dealt(server, tokens)), default=-1) + 1


# -- two servers in one process ---------------------------------------------------------------------------------------


class Pair:
    """All ranks of both servers. Rows of prefill's free pages and of all of decode are no token's.

    peers: decode ranks whose buffers are elsewhere, for (server, virtual pages); here if it is left out.
    prefill_rank: the backend's :class:`Prefill`.
    """

    def __init__(
        self,
        prefill: Server,
        decode: Server,
        engine: CopyEngine,
        peers: Callable[[Server, int], list[Peer]] | None = None,
        prefill_rank: type[Prefill] = Prefill,
    ) -> None:
        self.prefill, self.decode, self.engine, self.prefill_rank = prefill, decode, engine, prefill_rank
        rng = np.random.default_rng(1)
        self.content = rng.integers(0, 256, (LAYERS, LONGEST, ROW_BYTES), np.uint8)
        self.src_pages = rng.permutation(pages_for(prefill, LONGEST) + SPARE_PAGES)
        self.dst_pages = rng.permutation(pages_for(decode, LONGEST) + SPARE_PAGES)
        self.senders = [self._prefill_rank(rank) for rank in prefill.ranks]
        self.receivers = (peers or _peers_here)(decode, len(self.dst_pages))
        for rank, peer in zip(decode.ranks, self.receivers, strict=True):
            self._decode_rank(peer, rank)
        self.bootstrap = self._bootstrap_server()
        for rank, sender in zip(prefill.ranks, self.senders, strict=True):
            self._register(rank, sender.manager.rank_port)
        self.rooms = count(1)

    def _prefill_rank(self, rank: Rank) -> Prefill:
        from sglang.srt.disaggregation.utils import DisaggregationMode

        s = self.prefill
        cut = [LAYERS * stage // s.pp for stage in range(s.pp + 1)]
        layers = range(*cut[rank.stage :][:2])
        p = self.prefill_rank(self.engine, len(self.src_pages), s.page, layout=s.layout, seed=rank.tp, layers=layers)
        self._as_rank(p.manager, s, rank)
        p.manager.disaggregation_mode = DisaggregationMode.PREFILL
        for t, place in enumerate(dealt(s, LONGEST)):
            page = self.src_pages[place.page]
            if place.rank(s, page) == p.manager.dcp_rank:
                at = page * s.layout.rows_per_virtual_page(s.page) + place.row
                for layer, buffer in zip(p.layers, p.kv, strict=True):
                    buffer[at] = self.content[layer, t]
        return p

    def _decode_rank(self, peer: Peer, rank: Rank) -> None:
        peer.rank, m = rank.tp, peer.manager
        self._as_rank(m, self.decode, rank)
        m.prefill_info_table, m.connection_pool, m.connection_lock = {}, {}, threading.Lock()
        m.required_prefill_response_num_table, m.prefill_response_tracker = {}, {}
        m.addr_to_rooms_tracker, m._deferred_abort_ack_tracker = defaultdict(set), {}
        m._deferred_abort_generation, m.waiting_timeout = 0, 60.0
        m.enable_all_cp_ranks_for_transfer, m.kv_layout, m.dsv41_spec_layout = False, None, None
        m._start_heartbeat_checker_thread = _no_thread  # nobody dies here
        peer.listen()

    @staticmethod
    def _as_rank(manager, server: Server, rank: Rank) -> None:
        m = manager
        m.attn_tp_size, m.attn_tp_rank, m.attn_dp_rank = server.tp, rank.tp, rank.group
        m.kv_args.engine_rank = rank.group * server.tp + rank.tp
        m.dcp_rank, m.block_size, m.rotate = rank.tp % server.dcp, server.block, server.rotate
        m.pp_size, m.pp_rank = server.pp, rank.stage
        m.is_dummy_cp_rank, m.deferred_bootstrap, m.bootstrap_timeout = False, None, 60.0
        m.enable_all_cp_ranks_for_transfer = False

    def _bootstrap_server(self):
        from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer

        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        server = CommonKVBootstrapServer("127.0.0.1", port)

        def listening() -> bool:
            with socket.socket() as s:
                return s.connect_ex(("127.0.0.1", port)) == 0

        wait_until(listening, "the bootstrap server listens")
        return server

    def _register(self, rank: Rank, port: int) -> None:
        s = self.prefill
        row = {f"attn_{kind}_size": n for kind, n in (("tp", s.tp), ("cp", 1), ("dp", s.dp))}
        row |= {f"attn_{kind}_rank": n for kind, n in (("tp", rank.tp), ("cp", 0), ("dp", rank.group))}
        row |= {"pp_size": s.pp, "pp_rank": rank.stage, "system_dp_size": 1, "system_dp_rank": 0}
        row |= {"rank_ip": "127.0.0.1", "rank_port": port, "page_size": s.page, "kv_cache_dtype": "bfloat16"}
        assert requests.put(f"http://{self.address}/route", json=row, timeout=5).status_code == 200

    def close(self) -> None:
        self.bootstrap.close()

    # -- one request

    def open(self, prefix: int, end: int, senders: int | None = None, groups: tuple[int, int] = (0, 0)) -> Request:
        """Through registration and metadata, until all senders (or the first few) know where to send.

        groups: the request's DP attention groups at prefill and decode.
        """
        return Request(self, next(self.rooms), prefix, end, senders, groups)

    def send(self, end: int, prefix: int = 0, chunk: int = LONGEST, groups: tuple[int, int] = (0, 0)) -> Request:
        """One request until both sides have concluded."""
        request = self.open(prefix, end, groups=groups)
        for sender in range(len(request.senders)):
            request.send(sender, chunk)
        request.conclude()
        return request

    def clear(self) -> None:
        for peer in self.receivers:
            peer.clear()

    def expected(self, prefix: int, end: int, group: int = 0) -> list[list[np.ndarray]]:
        """What each decode rank must hold: its share of [prefix, end), in pages that begin at ``prefix``."""
        s = self.decode
        want = [[np.full_like(b, CANARY) for b in peer.kv] for peer in self.receivers]
        places = dealt(s, end)
        first = places[prefix].page
        for t in range(prefix, end):
            page = self.dst_pages[places[t].page - first]
            owner, at = places[t].rank(s, page), page * s.layout.rows_per_virtual_page(s.page) + places[t].row
            for peer, rows in zip(self.receivers, want, strict=True):
                if (peer.manager.attn_dp_rank, peer.manager.dcp_rank) == (group, owner):
                    for layer in range(LAYERS):
                        rows[layer][at] = self.content[layer, t]
        return want

    def audit(self, prefix: int, end: int, group: int = 0, whole_pages: bool = False) -> None:
        """Every byte, or of whole pages only the tokens': what lies behind the last one was sent with it."""
        for peer, rows in zip(self.receivers, self.expected(prefix, end, group), strict=True):
            if whole_pages:
                rows = [np.where(want == CANARY, got, want) for want, got in zip(rows, peer.kv, strict=True)]
            assert_rows(peer, rows)


def _peers_here(server: Server, virtual_pages: int) -> list[Peer]:
    return [Peer(server.layout, 0, virtual_pages, server.page) for _ in server.ranks]


def _no_thread() -> threading.Thread:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    return thread


class Request:
    def __init__(
        self, pair: Pair, room: int, prefix: int, end: int, senders: int | None, groups: tuple[int, int]
    ) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.pair, self.room, self.prefix, self.end, self.poll = pair, room, prefix, end, KVPoll
        sending, receiving = (
            [p for p in ranks if p.manager.attn_dp_rank == group]
            for ranks, group in zip((pair.senders, pair.receivers), groups, strict=True)
        )
        self.senders = [p.sender(pair.address, room) for p in sending[:senders]]
        self.receivers = [p.receiver(pair.address, room) for p in receiving]
        first = dealt(pair.decode, end)[prefix].page
        pages = pair.dst_pages[: pages_for(pair.decode, end) - first].astype(np.int32)
        for receiver in self.receivers:
            if not receiver.kv_mgr.try_ensure_parallel_info(pair.address):
                continue
            receiver.init(groups[0])
            receiver.send_metadata(pages, aux_index=2, decode_prefix_len=prefix)
        wait_until(
            lambda: (
                all(s.poll() == KVPoll.WaitingForInput for s in self.senders)
                or any(r.poll() == KVPoll.Failed for r in self.receivers)
            ),
            "all senders know all receivers",
        )

    def send(self, rank: int, chunk: int = LONGEST) -> None:
        """As SGLang's scheduler does: whole pages until the last chunk."""
        s, sender = self.pair.prefill, self.senders[rank]
        page = s.layout.virtual_page_size(s.page)
        start = sender.pop_decode_prefix_len()
        sender.init(-(-(self.end - start) // page), 1)
        ends = [e - e % page for e in range(start + chunk, self.end, chunk)]
        for end in [*dict.fromkeys(e for e in ends if e > start), self.end]:
            pages = self.pair.src_pages[start // page : -(-end // page)]
            sender.send(pages.astype(np.int32), num_kv_tokens=end - start)
            start = end

    def conclude(self) -> None:
        ended = (self.poll.Success, self.poll.Failed)
        wait_until(lambda: all(x.poll() in ended for x in [*self.receivers, *self.senders]), "both sides conclude")
        self.verdicts = [r.poll() for r in self.receivers]
        for x in [*self.receivers, *self.senders]:
            x.clear()

    @property
    def succeeded(self) -> bool:
        return all(v == self.poll.Success for v in self.verdicts)


def kv_bytes(engine: CopyEngine) -> int:
    return sum(n for batch in engine.kv_batches() for *_, n in batch)


# -- rows ----------------------------------------------------------------------------------------------------------

PAIRS = {
    "2 to 2, other blocks": (Server(2, 2, 16, 64), Server(2, 2, 64, 64)),
    "2 to 2, other pages": (Server(2, 2, 16, 16), Server(2, 2, 16, 64)),
    "4 to 4, smaller blocks": (Server(4, 4, 64, 64), Server(4, 4, 8, 64)),
    "2 to 1": (Server(2, 2, 64, 64), Server(1, 1, 1, 64)),
    "4 to 1, token round-robin": (Server(4, 4, 1, 16), Server(1, 1, 1, 16)),
    "2 to 4": (Server(2, 2, 64, 64), Server(4, 4, 16, 64)),
    "4 to 2, other pages": (Server(4, 4, 16, 64), Server(2, 2, 192, 16)),
    "8 to 2": (Server(8, 8, 8, 16), Server(2, 2, 16, 16)),
    "2 to 8, round-robin to blocks": (Server(2, 2, 1, 1), Server(8, 8, 16, 16)),
    "blocks to round-robin": (Server(2, 2, 128, 64), Server(4, 4, 1, 16)),
    "1 to 1, other pages": (Server(1, 1, 1, 16), Server(1, 1, 1, 64)),
    "1 to 2, other pages": (Server(1, 1, 1, 64), Server(2, 2, 16, 16)),
    "four copies to one rank, other pages": (Server(4, 1, 1, 64), Server(1, 1, 1, 16)),
    "four copies to 2, other pages": (Server(4, 1, 1, 64), Server(2, 2, 16, 16)),
    "two groups to one": (Server(4, 2, 16, 64), Server(2, 2, 64, 64)),
    "one group to two": (Server(2, 2, 64, 64), Server(4, 2, 16, 64)),
    "two groups to four ranks without DCP": (Server(4, 2, 16, 64), Server(4, 1, 1, 64)),
    "four groups to one rank": (Server(8, 2, 16, 64), Server(1, 1, 1, 64)),
    "two groups of one layout to one": (Server(4, 2, 64, 64), Server(2, 2, 64, 64)),
    "one layout": (Server(2, 2, 64, 64), Server(2, 2, 64, 64)),
    "one layout, blocks of pages": (Server(2, 2, 192, 64), Server(2, 2, 192, 64)),
    "two stages to 2": (Server(1, 1, 1, 64, pp=2), Server(2, 2, 64, 64)),
    "two stages of two copies to 4, other pages": (Server(2, 1, 1, 16, pp=2), Server(4, 4, 16, 64)),
    "four copies in three stages to 2": (Server(4, 1, 1, 64, pp=3), Server(2, 2, 16, 64)),
    "two stages of round-robin to blocks": (Server(2, 2, 1, 16, pp=2), Server(4, 4, 16, 64)),
    "two stages to no dcp, other pages": (Server(2, 2, 1, 64, pp=2), Server(1, 1, 1, 16)),
    "two stages of round-robin to the same": (Server(2, 2, 1, 16, pp=2), Server(2, 2, 1, 16)),
    "groups of copies to 2": (Server(2, 1, 1, 64, dp=2), Server(2, 2, 64, 64)),
    "groups of 2 to 4, other blocks": (Server(2, 2, 16, 64, dp=2), Server(4, 4, 64, 64)),
    "groups of two copies to groups of 2": (Server(2, 1, 1, 64, dp=2), Server(2, 2, 16, 64, dp=2)),
    "one rank to groups of 2": (Server(1, 1, 1, 64), Server(2, 2, 64, 64, dp=2)),
    "2 to groups of 4": (Server(2, 2, 16, 64), Server(4, 4, 64, 64, dp=2)),
    "groups of one layout to groups of it": (Server(2, 2, 64, 64, dp=2), Server(2, 2, 64, 64, dp=2)),
    "1 to 2, rotated": (Server(1, 1, 1, 64), Server(2, 2, 16, 64, rotate=True)),
    "two copies to 4, rotated, other pages": (Server(2, 1, 1, 64), Server(4, 4, 16, 16, rotate=True)),
    "2 to 4, rotated": (Server(2, 2, 64, 64), Server(4, 4, 16, 64, rotate=True)),
    "4 to 2, both rotated": (Server(4, 4, 16, 16, rotate=True), Server(2, 2, 64, 64, rotate=True)),
    "4 to 2, prefill rotated": (Server(4, 4, 16, 16, rotate=True), Server(2, 2, 64, 64)),
    "one layout, both rotated": (Server(4, 4, 16, 16, rotate=True),) * 2,
    "one layout, decode rotated": (Server(2, 2, 64, 64), Server(2, 2, 64, 64, rotate=True)),
    "4 to 1, rotated": (Server(4, 4, 16, 64, rotate=True), Server(1, 1, 1, 64)),
    "round-robin to rotated, two stages": (Server(2, 2, 1, 16, pp=2), Server(4, 4, 16, 16, rotate=True)),
    "two stages to groups of 2": (Server(1, 1, 1, 64, pp=2), Server(2, 2, 64, 64, dp=2)),
}
#: SGLang copies whole pages, with what lies behind the last token.
WHOLE_PAGES = {"one layout", "two stages of round-robin to the same", "groups of one layout to groups of it"}


@pytest.mark.parametrize("name", PAIRS)
def test_rows_between_two_layouts(name, servers):
    pair = servers(*PAIRS[name])
    copies = pair.decode.tp // pair.decode.dcp  # DCP groups of decode that each get everything
    lengths = sorted({1, pair.decode.block, pair.prefill.block + 1, pair.decode.layout.cycle + 3, 700})
    cases = [(n, LONGEST) for n in lengths] + [(700, 100), (650, 257)]
    for (length, chunk), groups in zip(
        cases, cycle(product(range(pair.prefill.dp), range(pair.decode.dp))), strict=False
    ):
        pair.clear()
        pair.engine.batches.clear()
        request = pair.send(length, chunk=chunk, groups=groups)
        assert request.succeeded, request.verdicts
        pair.audit(0, length, groups[1], whole_pages=name in WHOLE_PAGES)
        if name not in WHOLE_PAGES:
            assert kv_bytes(pair.engine) == copies * length * LAYERS * ROW_BYTES, "each row once"
    assert all(peer.aux[2] == 1 for peer in pair.receivers)
    assert all(s.threads_alive() for s in pair.senders)
    assert all(s.manager._dcp_pack_buffers is None for s in pair.senders)


@pytest.mark.parametrize(
    "prefill,decode,prefix",
    [
        (Server(2, 2, 64, 64), Server(2, 2, 16, 16), 7 * 32),
        (Server(2, 2, 64, 64), Server(1, 1, 1, 16), 5 * 16),
        (Server(1, 1, 1, 64), Server(1, 1, 1, 16), 7 * 16),
        (Server(2, 2, 16, 16), Server(4, 4, 64, 64), 2 * 256),
        (Server(1, 1, 1, 64), Server(2, 2, 16, 16, rotate=True), 7 * 32),
        (Server(2, 2, 64, 64, rotate=True), Server(4, 4, 16, 16, rotate=True), 5 * 64),
    ],
)
@pytest.mark.parametrize("chunk", [LONGEST, 130])
def test_a_decode_prefix_may_end_inside_a_prefill_page(prefill, decode, prefix, chunk, servers):
    pair = servers(prefill, decode)
    request = pair.send(prefix + 333, prefix, chunk)
    assert request.succeeded, request.verdicts
    pair.audit(prefix, prefix + 333)
    assert kv_bytes(pair.engine) == 333 * LAYERS * ROW_BYTES, "what decode has is not sent"


# -- completion, failures, aborts ------------------------------------------------------------------------------------


def test_decode_waits_for_every_sender_also_for_one_with_nothing_to_send(servers):
    pair = servers(Server(4, 4, 64, 64), Server(2, 2, 16, 16))
    request = pair.open(0, 50)  # all on rank 0
    for sender in (0, 1, 3):
        request.send(sender)
    responses = [p.manager.prefill_response_tracker[request.room] for p in pair.receivers]
    wait_until(lambda: all(r == {0, 1, 3} for r in responses), "three senders have answered")
    assert all(r.poll() == request.poll.WaitingForInput for r in request.receivers)
    request.send(2)
    request.conclude()
    assert request.succeeded
    pair.audit(0, 50)
    assert kv_bytes(pair.engine) == 50 * LAYERS * ROW_BYTES


def test_decode_waits_for_every_stage(servers):
    pair = servers(Server(1, 1, 1, 64, pp=3), Server(2, 2, 16, 16))
    request = pair.open(0, 50)
    for stage in (2, 0):
        request.send(stage)
    responses = [p.manager.prefill_response_tracker[request.room] for p in pair.receivers]
    wait_until(lambda: all(r == {0, 2} for r in responses), "two stages have answered")
    assert all(r.poll() == request.poll.WaitingForInput for r in request.receivers)
    request.send(1)
    request.conclude()
    assert request.succeeded
    pair.audit(0, 50)


#: Two ranks that both have something of every request: by tokens, and by layers.
TWO_SENDERS = pytest.mark.parametrize("prefill", [Server(2, 2, 64, 64), Server(1, 1, 1, 64, pp=2)])


@TWO_SENDERS
def test_one_sender_that_fails_fails_the_request_and_no_other(prefill, servers, monkeypatch):
    monkeypatch.setattr(mooncake, "RETRY_PAUSE_S", 0.001)
    broken: set[int] = set()
    pair = servers(prefill, Server(2, 2, 16, 64))
    pair.senders[1].manager.engine = CopyEngine(refuse=lambda number, segments: -1 if broken else 0)
    broken.add(1)
    request = pair.open(0, 400)
    for sender in (0, 1):
        request.send(sender)
    wait_until(lambda: all(r.poll() == request.poll.Failed for r in request.receivers), "decode knows")
    with pytest.raises(Exception, match="with code -1 on try"):
        request.receivers[0].failure_exception()
    assert request.senders[1].poll() == request.poll.Failed
    broken.clear()
    pair.clear()
    assert pair.send(400).succeeded
    pair.audit(0, 400)
    assert all(s.threads_alive() for s in pair.senders)


def assert_abort_frees_the_pages(pair, request, pages: np.ndarray) -> None:
    """Decode aborts ``request`` after the first of two senders sent 256 tokens (``pages``); others get its pages."""
    for receiver in request.receivers:
        assert len(receiver.bootstrap_infos) == 2, "what SGLang waits for after an abort"
        receiver.abort()
    for peer in pair.receivers:
        wait_until(lambda m=peer.manager: m.is_abort_release_safe(request.room, 2), "both senders have drained")
    request.senders[0].send(pages, num_kv_tokens=256)  # must be dropped: the pages belong to others now
    pair.clear()
    for x in [*request.receivers, *request.senders]:
        x.clear()
    assert pair.send(555).succeeded
    pair.audit(0, 555)


@TWO_SENDERS
def test_an_abort_is_safe_when_every_sender_has_drained(prefill, servers):
    pair = servers(prefill, Server(4, 4, 16, 64))
    request = pair.open(0, 700)
    request.senders[0].init(pages_for(prefill, 700), 1)
    pages = pair.src_pages[: pages_for(prefill, 256)].astype(np.int32)
    request.senders[0].send(pages, num_kv_tokens=256)  # rank 0 has begun, rank 1 has not
    wait_until(lambda: len(pair.engine.kv_batches()) == 4, "rank 0 has sent its first chunk to all four")
    assert_abort_frees_the_pages(pair, request, pages)


# -- pairs that SGLang serves itself, and refusals ---------------------------------------------------------------------


@pytest.mark.parametrize("prefill,decode", [(Server(2, 2, 1, 16), Server(2, 2, 1, 16)), (Server(1, 1, 1, 16),) * 2])
def test_block_size_1_on_both_sides_is_sglangs(prefill, decode, servers, monkeypatch):
    def forbidden(*_, **__):
        raise AssertionError("our plan was asked for")

    monkeypatch.setattr(common, "plan_pair", forbidden)
    pair = servers(prefill, decode)
    assert pair.send(200).succeeded
    for peer, sender in zip(pair.receivers, pair.senders, strict=True):
        assert not sender.manager.decode_kv_args_table[peer.session].requires_dcp_relayout
        assert len(peer.registration()) == wire.STOCK_FRAMES


def test_a_decode_server_without_the_plugin_is_refused(servers):
    """It registers with the one rank that SGLang names, without a frame."""
    pair = servers(Server(2, 2, 16, 64), Server(2, 2, 16, 64))
    sender = pair.senders[0]
    peer = Peer(DcpLayout(2, 1), 0, 4, 64)
    peer.manager.block_size, peer.manager.rotate = 1, False
    peer.tell(sender.endpoint, peer.registration())
    wait_until(lambda: sender.manager.state_layout_rejections, "it is refused")
    assert sender.manager.state_layout_rejections[peer.session] == (
        "this prefill server has --dcp-size 2 --dcp-block-size 16 and the decode server did not say that it can "
        "receive from it: install the same sglang-dcp-block version on both servers."
    )
    assert pair.send(100).succeeded and sender.threads_alive()


# -- controls ----------------------------------------------------------------------------------------------------------


def test_control_layers_of_another_stage_are_seen(servers):
    pair = servers(Server(1, 1, 1, 64, pp=2), Server(2, 2, 64, 64))
    assert pair.send(300).succeeded
    pair.audit(0, 300)
    pair.clear()
    pair.senders[1].manager.kv_args.prefill_start_layer -= 1
    assert pair.send(300).succeeded
    with pytest.raises(AssertionError):
        pair.audit(0, 300)


@pytest.mark.parametrize("name", ["1 to 2, rotated", "4 to 1, rotated", "one layout, both rotated"])
def test_control_pages_that_all_begin_at_rank_0_are_seen(name, servers, monkeypatch):
    plan = common.plan_pair
    pair = servers(*PAIRS[name])

    def unrotated(src, dst, start, length):
        return plan(*(side._replace(layout=side.layout.plain) for side in (src, dst)), start, length)

    monkeypatch.setattr(common, "plan_pair", unrotated)
    assert pair.send(700).succeeded
    with pytest.raises(AssertionError):
        pair.audit(0, 700)


@pytest.mark.parametrize("mistake", ["sender flip", "receiver flip", "one sender silent", "one sender is enough"])
def test_control_a_wrong_map_is_seen(mistake, servers, monkeypatch):
    plan, senders_of = common.plan_pair, wire.senders_of

    def wrong(src, dst, start, length):
        if mistake == "sender flip":
            src = src._replace(rank=1 - src.rank)
        elif mistake == "receiver flip":
            dst = dst._replace(rank=dst.layout.dcp_size - 1 - dst.rank)
        elif mistake == "one sender silent" and src.rank == 1:
            length = 0
        return plan(src, dst, start, length)

    if mistake == "one sender is enough":  # decode trusts one rank of prefill, as SGLang's own map does
        monkeypatch.setattr(wire, "senders_of", lambda *a: (s := senders_of(*a))._replace(known=s.known[:1]))
    monkeypatch.setattr(common, "plan_pair", wrong)
    pair = servers(Server(2, 2, 64, 64), Server(4, 4, 16, 64))
    request = pair.open(0, 512, senders=1 if mistake == "one sender is enough" else 2)
    for sender in range(len(request.senders)):
        request.send(sender)
    request.conclude()
    assert all(v == request.poll.Success for v in request.verdicts), "the status says nothing: only the rows can tell"
    with pytest.raises(AssertionError):
        pair.audit(0, 512)
