"""What SGLang's NIXL backend alone needs beside :mod:`common`: its registration, its refusals, and its send.

SGLang's worker asks a module function for its plan, packs by it, and hands it to a method that sends: the plan that it
is given here is the chunk itself (:class:`NixlChunk`), and the send computes what to do with it. :data:`NIXL_HOOKS` is
the part of the hook table that installs the functions below.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sglang_dcp_block import metrics
from sglang_dcp_block.disaggregation import placement, wire
from sglang_dcp_block.disaggregation.common import (
    Chunk,
    PeerDcpSize,
    Transfer,
    described_peer,
    is_stock,
    log_chunk,
    paired_layers,
    pd_row,
    plan_chunk,
    refuse_on_error,
)
from sglang_dcp_block.hooks import Hook

logger = logging.getLogger(__name__)

#: Frames of a stock registration message, without the word that it begins with.
STOCK_FRAMES = 24


class NixlChunk(NamedTuple):
    """A chunk in the place of SGLang's plan. target_src_token_indices: what SGLang would pack, nothing."""

    chunk: Chunk
    target_src_token_indices: np.ndarray = np.empty(0, np.int64)


class _Posted(NamedTuple):
    segments: int
    n_bytes: int
    at: float


_posted = threading.local()  # .transfers: list of _Posted, those of this worker thread's chunk


# -- prefill side: registration of a decode peer -----------------------------------------------------------------------


def from_zmq(original: Callable[..., Any], cls: type, message: list[bytes]) -> Any:
    info = original(cls, message)
    rank, size = info.decode_tp_rank % info.decode_tp_size, info.decode_tp_size
    info.dst_dcp_size = described_peer(info.dst_dcp_size, rank, size, wire.find(message, STOCK_FRAMES))
    placement.expect(info.dst_dcp_size)
    return info


def add_remote_peer(original: Callable[..., None], manager: Any, registration: Any) -> None:
    """A peer that doesn't fit is known with its refusal, and nothing is sent to it."""
    peer, name = registration.dst_dcp_size, registration.agent_name
    known = manager.decode_kv_args_table.get(name)
    if known is not None and getattr(known.dst_dcp_size, "refusal", None):
        del manager.decode_kv_args_table[name]  # it may have become another one
    if is_stock(manager, peer):
        registration.dst_dcp_size = int(peer)  # nothing of ours is on its path from here on
    else:
        if manager.pp_size > 1:  # each stage sends its own first token, and which one stays is not tested
            peer.refusal = "NIXL is not tested with --pp-size above 1: use --pp-size 1 at prefill, or mooncake."
        manager.requires_dcp_relayout(peer, registration.dst_dcp_rank)
    if peer.refusal is None:
        refuse_on_error(peer, None, original, manager, registration)
    if peer.refusal is not None:
        logger.error("Refusing decode server %s:%d: %s", registration.endpoint, registration.dst_port, peer.refusal)
        metrics.record_refused_peer("layout")
        registration.dst_dcp_size = peer
        manager.decode_kv_args_table[name] = registration


def add_transfer_request(
    original: Callable[..., None], manager: Any, bootstrap_room: int, *args: Any, **kwargs: Any
) -> None:
    """Requests of a refused peer fail here, before a worker has them."""
    for name in list(manager.transfer_infos.get(bootstrap_room, ())):
        known = manager.decode_kv_args_table.get(name)
        refusal = known and getattr(known.dst_dcp_size, "refusal", None)
        if refusal:
            manager.conclude_failure(bootstrap_room=bootstrap_room, failure_reason=refusal)
            return
    original(manager, bootstrap_room, *args, **kwargs)


# -- prefill side: the send --------------------------------------------------------------------------------------------


def build_dcp_token_transfer_plan(
    original: Callable[..., Any],
    src_page_indices: np.ndarray,
    dst_page_indices: np.ndarray,
    *,
    dcp_size: int,
    src_page_offset: int = 0,
    decode_prefix_len: int = 0,
    num_kv_tokens: int | None = None,
    **rest: Any,
) -> Any:
    """SGLang's plan for its own peers; for ours the chunk, as :func:`send_kvcache_dcp` knows which rank plans."""
    if isinstance(dcp_size, PeerDcpSize):
        return NixlChunk(Chunk(src_page_indices, dst_page_indices, src_page_offset, decode_prefix_len, num_kv_tokens))
    return original(
        src_page_indices,
        dst_page_indices,
        dcp_size=dcp_size,
        src_page_offset=src_page_offset,
        decode_prefix_len=decode_prefix_len,
        num_kv_tokens=num_kv_tokens,
        **rest,
    )


def send_kvcache_dcp(
    original: Callable[..., list[Any]], manager: Any, peer_name: str, dst_info: Any, plan: Any, packed_src: Any
) -> list[Any]:
    """Post what this rank has of one chunk for one decode rank. Returns NIXL's handles, which SGLang waits for.

    Raises:
        ValueError: no plan (:func:`plan_chunk`). RuntimeError: NIXL refused the transfer. SGLang fails the chunk's
            request with the text of either.
    """
    if not isinstance(plan, NixlChunk):
        return original(manager, peer_name, dst_info, plan, packed_src)
    began = time.perf_counter()
    src_ptrs, dst_ptrs = paired_layers(manager, dst_info.dst_kv_ptrs, dst_info.dst_kv_layer_ids)
    peer, rank, row_bytes = dst_info.dst_dcp_size, dst_info.dst_dcp_rank, dst_info.dcp_token_item_lens
    transfer = plan_chunk(manager, peer, rank, plan.chunk, src_ptrs, dst_ptrs, row_bytes)
    planned = time.perf_counter()
    handles = []
    if transfer.src.size:
        handles.append(_post(manager, peer_name, dst_info, transfer))
        _transfers().append(_Posted(transfer.src.size, transfer.n_bytes, planned))
    log_chunk(logger, peer_name, rank, transfer, len(handles), began, planned, "post")
    return handles


def _post(manager: Any, peer_name: str, dst_info: Any, transfer: Transfer) -> Any:
    """Hand ``transfer`` to NIXL as one write. Returns its handle."""
    from sglang.srt.disaggregation.nixl.conn import _nixl_device_id

    def descriptors(at: np.ndarray, kind: str, gpu_id: int) -> Any:
        device = np.full(at.size, _nixl_device_id(kind, gpu_id), np.uint64)
        return manager.agent.get_xfer_descs(np.column_stack((at, transfer.sizes, device)), kind)

    handle = manager.agent.initialize_xfer(
        "WRITE",
        descriptors(transfer.src, manager.src_mem_kind, manager.kv_args.gpu_id),
        descriptors(transfer.dst, dst_info.dst_homogeneous_mem_kind, dst_info.gpu_id),
        peer_name,
    )
    manager._post_xfer(handle, "NIXL refused a transfer")
    return handle


def _transfers() -> list[_Posted]:
    if not hasattr(_posted, "transfers"):
        _posted.transfers = []
    return _posted.transfers


def await_handles(
    original: Callable[..., tuple[bool, bool]], manager: Any, handles: list[Any], *, failure_seen: bool
) -> tuple[bool, bool]:
    """Count what this worker posted once it has arrived."""
    settled, failed = original(manager, handles, failure_seen=failure_seen)
    now = time.perf_counter()
    for transfer in _transfers():
        if settled and not failed:
            metrics.record_transfer(transfer.segments, transfer.n_bytes, now - transfer.at)
    _transfers().clear()
    return settled, failed


# -- the rows --------------------------------------------------------------------------------------------------------

_CONN = "sglang.srt.disaggregation.nixl.conn"
_TEST = "test/pd/test_nixl_hooks.py"

#: When these rows are installed; entries of plugin.SCOPES. A function takes a plugin.Setup.
NIXL_SCOPES: dict[str, str | Callable[[Any], bool]] = {
    "nixl_prefill": lambda s: s.disaggregation_mode == "prefill" and s.transfer_backend == "nixl",
    "nixl_decode": lambda s: s.disaggregation_mode == "decode" and s.transfer_backend == "nixl",
}

NIXL_HOOKS: tuple[Hook, ...] = (
    pd_row(
        f"{_CONN}:NixlKVManager.build_receiver_registration_message",
        "common:build_receiver_registration_message",
        "38cac5740f614cc3",
        "nixl_decode",
        "prefill is not told the layout and sends token round-robin rows",
        _TEST,
    ),
    pd_row(
        f"{_CONN}:KVArgsRegisterInfo.from_zmq",
        "nixl:from_zmq",
        "5ad0dc318ea905f7",
        "nixl_prefill",
        "the layout that decode sent is not read",
        _TEST,
    ),
    pd_row(
        f"{_CONN}:NixlKVManager._add_remote_peer",
        "nixl:add_remote_peer",
        "a21ddc35199943aa",
        "nixl_prefill",
        "a peer that does not fit ends the thread that serves all peers",
        _TEST,
    ),
    pd_row(
        f"{_CONN}:NixlKVManager.add_transfer_request",
        "nixl:add_transfer_request",
        "ef24d2d7cf2b5972",
        "nixl_prefill",
        "a refused peer is served",
        _TEST,
    ),
    pd_row(
        "sglang.srt.disaggregation.common.utils:build_dcp_token_transfer_plan",
        "nixl:build_dcp_token_transfer_plan",
        "fa25d9e05ad20acb",
        "nixl_prefill",
        "rows are planned one by one for the owners of token round-robin",
        _TEST,
    ),
    pd_row(
        f"{_CONN}:NixlKVManager.send_kvcache_dcp",
        "nixl:send_kvcache_dcp",
        "55c590a2f28ef74c",
        "nixl_prefill",
        "a chunk that our plan cuts can't be sent",
        _TEST,
    ),
    pd_row(
        f"{_CONN}:NixlKVManager._await_handles",
        "nixl:await_handles",
        "6b92794a73662ee5",
        "nixl_prefill",
        "the transfer metrics stand still",
        _TEST,
    ),
)
