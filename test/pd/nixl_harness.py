"""Both ends of SGLang's NIXL transfer without a model: as harness.py, on NixlKVManager and NIXL's real agents.

The agents move host memory over UCX inside this process, or between two for :class:`RemoteNixlPeer`. An agent takes a
second to start, so those of a closed manager serve the next one. Each polls in a thread of its own, so
:func:`end_agents` comes after the last test.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import threading
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from harness import CANARY, Peer, Prefill, RemotePeer, bare_manager, buffers, serve_buffers

from sglang_dcp_block.dcp.layout import DcpLayout

# UCX's InfiniBand module crashes the process at its end on a machine without such a card (seen with nixl 1.5.1: a
# destructor of libnl-route). It must be set before UCX is loaded.
os.environ.setdefault("UCX_MODULES", "^ib")

_names = itertools.count()
_idle: list[Agent] = []
_used: list[Any] = []


class Agent:
    """A NIXL agent that counts what it is asked to write.

    segments: of KV, (source address, bytes) of every descriptor.
    """

    def __init__(self) -> None:
        self.inner = real_agent(f"agent-{next(_names)}")
        self.segments: list[tuple[int, int]] = []
        self.refuse = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def initialize_xfer(self, operation: str, src: Any, dst: Any, peer: str) -> Any:
        sizes = [(src[i][0], src[i][1]) for i in range(src.descCount())]
        self.segments += [s for s in sizes if s[1] != 8]  # aux values have 8 bytes here
        if self.refuse:
            raise RuntimeError("refused by this test")
        return self.inner.initialize_xfer(operation, src, dst, peer)


def real_agent(name: str) -> Any:
    """As SGLang makes it, but for one UCX thread."""
    from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

    config = nixl_agent_config(backends=[], num_threads=1, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
    agent = nixl_agent(name, config)
    agent.create_backend("UCX", {"num_threads": "1"})
    return agent


class _Socket:
    """Ends the thread that reads it, which SGLang's NIXL threads have no flag for."""

    def __init__(self, inner: Any, manager: Any) -> None:
        self.inner, self.manager = inner, manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def recv_multipart(self) -> list[bytes]:
        while not self.inner.poll(50):
            if self.manager._stopped:
                raise SystemExit
        return self.inner.recv_multipart()


class _Thread(threading.Thread):
    """Ends without a word at SystemExit, also under pytest."""

    def run(self) -> None:
        with contextlib.suppress(SystemExit):
            super().run()


def start_thread(manager: Any, method: str) -> None:
    """Call one of the manager's methods that start a thread, and keep that thread."""
    from sglang.srt.disaggregation.nixl import conn

    def make(**options: Any) -> threading.Thread:
        manager._worker_threads.append(_Thread(**options))
        return manager._worker_threads[-1]

    with mock.patch.object(conn, "threading", SimpleNamespace(Thread=make)):
        getattr(manager, method)()


def nixl_manager(args: SimpleNamespace, layout: DcpLayout, rank: int, agent: Any, kv_dtype: str) -> Any:
    """A NixlKVManager; its memory is registered with ``agent`` by SGLang's method, as host memory."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    m = bare_manager(NixlKVManager, args, layout, rank, kv_dtype)
    m.server_socket = _Socket(m.server_socket, m)
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    args.state_data_lens = []
    m.agent = agent or (_idle.pop() if _idle else Agent())
    if agent is None:
        m.agent.segments, m.agent.refuse = [], False
        m.register_buffer_to_engine()
        _used.append(m)
    m.src_mem_kind, m._num_slots_src = "DRAM", len(args.kv_data_ptrs) and args.kv_data_lens[0] // args.kv_item_lens[0]
    m.prep_handles, m.prep_handle_slice_src, m.prep_handles_slice_dst, m.prep_handles_segment_src = {}, None, {}, {}
    m._prepared_state_plans, m._state_layout_rejections, m._prepared_state_components = {}, {}, frozenset()
    m._peer_reload_lock, m._peer_reload_times = threading.Lock(), {}
    return m


def close_all() -> None:
    """Give the agents back, without the memory that they knew. Call after harness.close_all."""
    for m in _used:
        for name in getattr(m, "decode_kv_args_table", ()):
            if m.agent.check_remote_metadata(name):
                m.agent.remove_remote_agent(name)
        for descriptors in [*m.kv_descs, m.aux_descs]:
            m.agent.deregister_memory(descriptors)
        _idle.append(m.agent)
        m.agent = None
    _used.clear()


def end_agents() -> None:
    _idle.clear()
    gc.collect()


class NixlPrefill(Prefill):
    def make_manager(self, args: SimpleNamespace, layout: DcpLayout, rank: int, engine: Any, kv_dtype: str) -> Any:
        return nixl_manager(args, layout, rank, None, kv_dtype)

    def start(self) -> None:
        from sglang.srt.disaggregation.common.utils import FastQueue
        from sglang.srt.disaggregation.utils import DisaggregationMode

        m = self.manager
        m.disaggregation_mode = DisaggregationMode.PREFILL
        m.transfer_queues = [FastQueue()]
        self.worker = threading.Thread(target=self._work, daemon=True)
        self.worker.start()
        start_thread(m, "_start_bootstrap_thread")
        m._worker_threads.append(self.worker)

    def _work(self) -> None:
        try:
            self.manager.transfer_worker(self.manager.transfer_queues[0])
        except AttributeError:  # the None that ends the test
            assert self.manager._stopped

    def send(self, room: int, pages: np.ndarray, offset: int, tokens: int, last: bool) -> None:
        """As SGLang's sender."""
        self.manager.add_transfer_request(
            room,
            pages.astype(np.int32),
            slice(offset, offset + len(pages)),
            last,
            aux_index=1 if last else None,
            state_indices=[],
            num_kv_tokens=tokens,
        )

    def sender(self, address: str, room: int) -> Any:
        from sglang.srt.disaggregation.nixl.conn import NixlKVSender

        return NixlKVSender(self.manager, address, room)

    @property
    def segments(self) -> list[tuple[int, int]]:
        return self.manager.agent.segments


class NixlPeer(Peer):
    def make_manager(self, args: SimpleNamespace, layout: DcpLayout, rank: int, engine: Any, kv_dtype: str) -> Any:
        return nixl_manager(args, layout, rank, engine, kv_dtype)

    def session_name(self) -> str:
        return self.manager.agent.name

    def listen(self) -> None:
        start_thread(self.manager, "_start_decode_listener_thread")

    def receiver(self, address: str, room: int) -> Any:
        from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver

        return NixlKVReceiver(self.manager, address, room)


# -- a decode rank in another process ----------------------------------------------------------------------------------


def decode_process(pipe: Connection, rows: int) -> None:
    agent = real_agent(f"remote-{os.getpid()}")
    kv, aux = buffers(rows, CANARY), np.zeros(64, np.uint64)
    for whole in [*(b.base for b in kv), aux]:
        agent.register_memory([(whole.ctypes.data, whole.nbytes, 0, "")], "DRAM")
    serve_buffers(pipe, (agent.name, agent.get_agent_metadata()), kv, aux)


class RemoteNixlPeer(RemotePeer, NixlPeer):
    def engine_at(self, address: tuple[str, bytes]) -> Any:
        name, metadata = address
        return SimpleNamespace(name=name, get_agent_metadata=lambda: metadata)
