"""Both ends of SGLang's Mooncake transfer without a model: real managers, real ZMQ messages, real threads.

:class:`Prefill` runs the prefill manager's bootstrap thread and a transfer worker over numpy KV buffers. :class:`Peer`
is one decode rank: its buffers, its registration and metadata messages (by SGLang's own methods), its status inbox.
What moves the bytes is a parameter: :class:`CopyEngine` here, Mooncake's TransferEngine in test_tcp.py. The same on
NIXL's managers is in nixl_harness.py.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import multiprocessing
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq

from sglang_dcp_block import runtime
from sglang_dcp_block.dcp.layout import DcpLayout

LAYERS, ROW_BYTES = 3, 40
CANARY = 0xA5
GUARD_ROWS = 64
NO_DCP = DcpLayout(1)

_ports = itertools.count(20_000)
_open: list[Any] = []


class layout_in_force:
    """Both servers live in one test process; each acts under its own layout."""

    def __init__(self, layout: DcpLayout) -> None:
        self.layout = layout

    def __enter__(self) -> None:
        self.before, runtime._layout = runtime._layout, self.layout

    def __exit__(self, *_: Any) -> None:
        runtime._layout = self.before


class CopyEngine:
    """Moves bytes inside this process and writes down every batch.

    refuse: called with the batch's number and segments before it moves; a non-zero answer is returned as SGLang's
    engine would return it. dead: sessions that neither take batches nor answer probes.
    """

    def __init__(self, refuse: Callable[[int, int], int] = lambda number, segments: 0) -> None:
        self.batches: list[list[tuple[int, int, int]]] = []
        self.refused: list[int] = []
        self.dead: set[str] = set()
        self.refuse = refuse

    def batch_transfer_sync(self, session: str, src: list[int], dst: list[int], sizes: list[int]) -> int:
        number = len(self.batches) + len(self.refused)
        code = -1 if session in self.dead else self.refuse(number, len(src))
        if code:
            self.refused.append(len(src))
            return code
        assert all(type(x) is int for x in (*src, *dst, *sizes)), "the engine's binding takes Python ints only"
        for s, d, n in zip(src, dst, sizes, strict=True):
            ctypes.memmove(d, s, n)
        self.batches.append(list(zip(src, dst, sizes, strict=True)))
        return 0

    def send_probe(self, session: str) -> int:
        return -102 if session in self.dead else 0

    def kv_batches(self) -> list[list[tuple[int, int, int]]]:
        """Without the aux batches, which are single segments of 8 bytes here."""
        return [b for b in self.batches if [n for *_, n in b] != [8]]


def buffers(rows: int, fill: int | np.random.Generator) -> list[np.ndarray]:
    """One (rows, ROW_BYTES) uint8 buffer per layer, inside a larger one: a write past the end hits guard rows."""
    shape = (rows + 2 * GUARD_ROWS, ROW_BYTES)
    make = (
        (lambda: np.full(shape, fill, np.uint8))
        if isinstance(fill, int)
        else lambda: fill.integers(0, 256, shape, "u1")
    )
    return [make()[GUARD_ROWS:-GUARD_ROWS] for _ in range(LAYERS)]


def kv_args(kv: Sequence[np.ndarray], aux: np.ndarray, page_size: int, rank: int) -> SimpleNamespace:
    return SimpleNamespace(
        page_size=page_size,
        kv_data_ptrs=[b.ctypes.data for b in kv],
        kv_data_lens=[b.nbytes for b in kv],
        kv_item_lens=[b.shape[1] * page_size for b in kv],
        kv_layer_ids=[],
        num_draft_entries=0,
        aux_data_ptrs=[aux.ctypes.data],
        aux_data_lens=[aux.nbytes],
        aux_item_lens=[8],
        gpu_id=0,
        state_types=[],
        state_data_ptrs=[],
        state_item_lens=[],
        state_layer_ids=[],
        engine_rank=rank,
        prefill_start_layer=0,
    )


def bare_manager(kind: type, args: SimpleNamespace, layout: DcpLayout, rank: int, kv_dtype: str) -> Any:
    """A manager of SGLang's class ``kind`` with the state that any transfer needs, and without the server around it."""
    m = object.__new__(kind)
    m.kv_args, m.kv_cache_dtype_str = args, kv_dtype
    m.is_mla_backend, m.is_hybrid_mla_backend = True, False
    m.attn_tp_size, m.attn_tp_rank = layout.dcp_size, rank
    m.attn_cp_size, m.attn_cp_rank, m.pp_size, m.pp_rank, m.state_tp_size = 1, 0, 1, 0, layout.dcp_size
    m.dcp_size, m.dcp_rank = layout.dcp_size, rank
    m.enable_staging, m.enable_deferred_decode_kv_release, m._staging_ctx = False, True, None
    m._stopped, m._worker_threads = False, []
    m._dcp_pack_buffers, m._dcp_pack_max_tokens = None, None
    m._zmq_ctx = zmq.Context()
    m.server_socket = m._zmq_ctx.socket(zmq.PULL)
    m.rank_port = m.server_socket.bind_to_random_port("tcp://127.0.0.1")
    m.local_ip, m.bootstrap_port = "127.0.0.1", 0
    m.request_status, m.failure_records, m.failure_lock = {}, {}, threading.Lock()
    m._socket_cache, m._monitor_cache, m._socket_send_locks, m._socket_lock = {}, {}, {}, threading.Lock()
    m._staging_outstanding = defaultdict(int)
    m._deferred_ack_targets, m._deferred_ack_poisoned_rooms = {}, set()
    _open.append(m)
    return m


def manager(args: SimpleNamespace, layout: DcpLayout, rank: int, engine: Any, kv_dtype: str) -> Any:
    """A MooncakeKVManager."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    m = bare_manager(MooncakeKVManager, args, layout, rank, kv_dtype)
    m.engine = engine
    m.server_args = SimpleNamespace(enable_pd_role_switch=True)  # its threads then look at _stopped
    m.enable_trace, m.enable_custom_mem_pool, m.max_transfer_batch_indices = False, False, 0
    return m


def close_all() -> None:
    """End the threads and sockets of every manager made since the last call."""
    for m in _open:
        m._stopped = True
        for queue in getattr(m, "transfer_queues", ()):
            queue.put(None)
    for m in _open:
        for thread in m._worker_threads:
            thread.join(5)
        m._zmq_ctx.destroy(linger=0)
    _open.clear()


class Prefill:
    """A prefill rank with ``pages`` pages of random KV under ``layout`` (DCP1 unless said otherwise).

    layers: those of this rank's pipeline stage.
    """

    def __init__(
        self,
        engine: Any,
        pages: int,
        page_size: int,
        *,
        layout: DcpLayout = NO_DCP,
        rank: int = 0,
        kv_dtype: str = "bfloat16",
        seed: int = 0,
        layers: range = range(LAYERS),
    ) -> None:
        self.kv = buffers(pages * layout.rows_per_virtual_page(page_size), np.random.default_rng(seed))[: len(layers)]
        self.layers = layers
        self.aux = np.arange(64, dtype=np.uint64)
        self.page_size, self.layout = page_size, layout
        args = kv_args(self.kv, self.aux, page_size, rank)
        args.prefill_start_layer = layers.start
        m = self.manager = self.make_manager(args, layout, rank, engine, kv_dtype)
        m.transfer_infos, m.req_to_decode_prefix_len = {}, {}
        m.decode_kv_args_table, m._kv_replica_factor = {}, None
        self.start()

    make_manager = staticmethod(manager)

    def start(self) -> None:
        from sglang.srt.disaggregation.common.utils import FastQueue

        m = self.manager
        m.session_failures, m.failed_sessions, m.failed_session_probes = defaultdict(int), set(), {}
        m.state_layout_rejections, m.state_strides_validated = {}, set()
        m.session_lock, m.transfer_queues = threading.Lock(), [FastQueue()]
        executor = concurrent.futures.ThreadPoolExecutor(1)
        m.start_prefill_thread()
        self.worker = threading.Thread(target=m.transfer_worker, args=(m.transfer_queues[0], executor), daemon=True)
        self.worker.start()

    def sender(self, address: str, room: int) -> Any:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        return MooncakeKVSender(self.manager, address, room)

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.manager.rank_port}"

    def threads_alive(self) -> bool:
        return self.worker.is_alive() and all(t.is_alive() for t in self.manager._worker_threads)

    def open_room(self, room: int) -> None:
        from sglang.srt.disaggregation.base.conn import KVPoll

        self.manager.update_status(room, KVPoll.Bootstrapping)

    def send(self, room: int, pages: np.ndarray, offset: int, tokens: int, last: bool) -> None:
        """Queue one chunk: ``pages`` are page ``offset`` and on of what this request sends."""
        from sglang.srt.disaggregation.common.utils import TransferKVChunk

        self.manager.transfer_queues[0].put(
            TransferKVChunk(
                room=room,
                prefill_kv_indices=pages.astype(np.int32),
                index_slice=slice(offset, offset + len(pages)),
                is_last_chunk=last,
                prefill_aux_index=1 if last else None,
                state_indices=[],
                num_kv_tokens=tokens,
            )
        )


class Peer:
    """One decode rank. Its rows hold CANARY until something is written to them."""

    def __init__(
        self,
        layout: DcpLayout,
        rank: int,
        virtual_pages: int,
        page_size: int,
        *,
        engine: Any | None = None,
        kv_dtype: str = "bfloat16",
        row_bytes: int = ROW_BYTES,
    ) -> None:
        self.layout, self.rank, self.page_size = layout, rank, page_size
        self.rows = virtual_pages * layout.rows_per_virtual_page(page_size)
        self.kv = buffers(self.rows, CANARY)
        self.aux = np.zeros(64, np.uint64)
        args = kv_args(self.kv, self.aux, page_size, rank)
        self.manager = self.make_manager(args, layout, rank, engine, kv_dtype)
        args.kv_item_lens = [row_bytes * page_size] * LAYERS
        self.session = self.session_name()

    def make_manager(self, args: SimpleNamespace, layout: DcpLayout, rank: int, engine: Any, kv_dtype: str) -> Any:
        session = f"127.0.0.1:{next(_ports)}"
        return manager(args, layout, rank, engine or SimpleNamespace(get_session_id=lambda: session), kv_dtype)

    def session_name(self) -> str:
        """What prefill knows this rank by."""
        return self.manager.get_session_id()

    def listen(self) -> None:
        self.manager.start_decode_thread()

    def receiver(self, address: str, room: int) -> Any:
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVReceiver

        return MooncakeKVReceiver(self.manager, address, room)

    def clear(self) -> None:
        for layer in self.kv:
            layer.base[:] = CANARY

    def registration(self) -> list[bytes]:
        with layout_in_force(self.layout):
            return self.manager.build_receiver_registration_message()

    def metadata(self, room: int, pages: np.ndarray, prefix: int, peers: int) -> list[bytes]:
        return self.manager.build_receiver_metadata_message(
            bootstrap_room=room,
            required_dst_info_num=peers,
            kv_indices=pages.astype(np.int32),
            aux_index=2,
            state_indices=None,
            decode_prefix_len=prefix,
            is_dummy=False,
        )

    def tell(self, prefill_endpoint: str, message: list[bytes]) -> None:
        self.manager._send_multipart_locked(prefill_endpoint, message)

    def verdict(self, timeout_s: float = 20.0) -> tuple[int, Any, str | None]:
        """(room, status, reason) of the next status message from prefill, read by SGLang's own parser."""
        assert self.manager.server_socket.poll(timeout_s * 1000), "no status message from prefill"
        room, status, _, reason = self.manager.parse_kv_status_message(self.manager.server_socket.recv_multipart())
        return room, status, reason

    def silent(self, for_s: float = 0.2) -> bool:
        return not self.manager.server_socket.poll(for_s * 1000)


def expected_rows(
    prefill: Prefill, peer: Peer, src_pages: np.ndarray, dst_pages: np.ndarray, start: int, end: int, prefix: int
) -> list[np.ndarray]:
    """What ``peer`` must hold after [start, end) arrived: one token at a time, dealt out block after block.

    src_pages hold position ``start`` and on, dst_pages position ``prefix`` and on.
    """
    layout, ps = peer.layout, peer.page_size
    rows_per_page = layout.rows_per_virtual_page(ps)
    want = [np.full_like(b, CANARY) for b in peer.kv]
    row = -1
    for t in range(end):
        if t == prefix:
            row = -1  # the prefix is whole virtual pages; dst_pages begin after it
        if t // layout.block_size % layout.dcp_size != peer.rank:
            continue
        row += 1
        if t < start:
            continue
        src = src_pages[t // ps - start // ps] * ps + t % ps
        dst = dst_pages[row // rows_per_page] * rows_per_page + row % rows_per_page
        for layer in range(LAYERS):
            want[layer][dst] = prefill.kv[layer][src]
    return want


def assert_rows(peer: Peer, want: list[np.ndarray]) -> None:
    for layer in range(LAYERS):
        np.testing.assert_array_equal(peer.kv[layer], want[layer], err_msg=f"rank {peer.rank}, layer {layer}")
        guards = peer.kv[layer].base[:GUARD_ROWS], peer.kv[layer].base[-GUARD_ROWS:]
        assert all((g == CANARY).all() for g in guards), f"rank {peer.rank}, layer {layer}: written outside the pool"


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        time.sleep(0.005)


def assert_all_rows(peers: Sequence[Peer], want: Sequence[list[np.ndarray]]) -> None:
    for peer, rows in zip(peers, want, strict=True):
        assert_rows(peer, rows)


# -- a decode rank in another process ----------------------------------------------------------------------------------


def serve_buffers(pipe: Connection, address: Any, kv: list[np.ndarray], aux: np.ndarray) -> None:
    """In that process: tell ``address`` and where the buffers are; on 'read' hand over all bytes, then CANARY again."""
    pipe.send((address, [b.ctypes.data for b in kv], aux.ctypes.data))
    while pipe.recv() == "read":
        pipe.send(([b.base for b in kv], int(aux[2])))
        for b in kv:
            b.base[:] = CANARY


class RemotePeer(Peer):
    """A rank whose buffers are in another process; ``read`` brings their bytes here for the audit."""

    def __init__(self, layout: DcpLayout, rank: int, virtual_pages: int, page_size: int, pipe: Connection) -> None:
        assert pipe.poll(60), "a decode process did not start"
        address, kv_ptrs, aux_ptr = pipe.recv()
        super().__init__(layout, rank, virtual_pages, page_size, engine=self.engine_at(address))
        self.manager.kv_args.kv_data_ptrs, self.manager.kv_args.aux_data_ptrs = kv_ptrs, [aux_ptr]
        self.pipe = pipe

    def engine_at(self, address: Any) -> Any:
        """What the registration asks the engine of ``address`` for."""
        raise NotImplementedError

    def read(self) -> None:
        self.pipe.send("read")
        layers, self.aux[2] = self.pipe.recv()
        self.kv = [b[GUARD_ROWS:-GUARD_ROWS] for b in layers]
        assert len(self.kv) == LAYERS


def remote_ranks(process: Callable[[Connection, int], None], kind: type[RemotePeer]) -> Iterator[Callable[..., Any]]:
    """Body of a fixture: (layout, virtual pages, page size) -> peers of ``kind`` and their processes, one a rank.

    process: (pipe, rows), ends in :func:`serve_buffers`.
    """
    context = multiprocessing.get_context("spawn")
    running = []

    def start(layout: DcpLayout, virtual_pages: int, page_size: int, tp_size: int | None = None) -> Any:
        pipes = []
        for _ in range(tp_size or layout.dcp_size):
            mine, theirs = context.Pipe()
            rows = virtual_pages * layout.rows_per_virtual_page(page_size)
            running.append(context.Process(target=process, args=(theirs, rows), daemon=True))
            running[-1].start()
            pipes.append(mine)
        peers = [kind(layout, rank, virtual_pages, page_size, pipe) for rank, pipe in enumerate(pipes)]
        return peers, running[-len(peers) :]

    yield start
    for one in running:
        one.kill()
        one.join()
