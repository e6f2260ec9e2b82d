"""What SGLang's Mooncake backend alone needs beside :mod:`common`: its registration, its refusals, and its send.

:data:`MOONCAKE_HOOKS` is the part of the hook table that installs the functions below.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_dcp_block import metrics
from sglang_dcp_block.disaggregation import placement, wire
from sglang_dcp_block.disaggregation.common import (
    Chunk,
    described_peer,
    is_stock,
    log_chunk,
    paired_layers,
    pd_row,
    plan_chunk,
)
from sglang_dcp_block.hooks import Hook

logger = logging.getLogger(__name__)

#: Segments of one batch. Mooncake's TCP lane queues 2,048 transfers per peer (seen with 0.3.13.post1). A batch above
#: that is refused, and the lane then refuses everything for more than a minute. Half of it leaves room for other sends.
MAX_BATCH_SEGMENTS = 1024
#: Bytes of one batch, so that a slow link finishes it within Mooncake's timeout.
MAX_BATCH_BYTES = 256 << 20
#: A failed batch is tried again, each time with a quarter of the segments, at most this often in one send.
MAX_RETRIES = 4
#: A batch that failed only after this long was not refused: it timed out and may still be running. Not tried again.
REFUSED_WITHIN_S = 2.0
#: First pause before a retry; doubles.
RETRY_PAUSE_S = 0.05

_failure = threading.local()  # .cause: why the last send of this worker thread failed, for conclude_failure


# -- prefill side: registration of a decode peer -----------------------------------------------------------------------


def from_zmq(original: Callable[..., Any], cls: type, message: list[bytes]) -> Any:
    info = original(cls, message)
    rank, size = info.dst_tp_rank % info.dst_attn_tp_size, info.dst_attn_tp_size
    info.dst_dcp_size = described_peer(info.dst_dcp_size, rank, size, wire.find(message))
    placement.expect(info.dst_dcp_size)
    return info


def validate_peer_state_layout(
    original: Callable[..., tuple[bool, str | None]], manager: Any, registration: Any
) -> tuple[bool, str | None]:
    refusal = getattr(registration.dst_dcp_size, "refusal", None)
    if refusal:
        metrics.record_refused_peer("layout")
        return False, refusal
    return original(manager, registration)


# -- prefill side: the send --------------------------------------------------------------------------------------------


def send_kvcache_dcp(
    original: Callable[..., int],
    manager: Any,
    mooncake_session_id: str,
    prefill_kv_indices: np.ndarray,
    dst_kv_ptrs: list[int],
    dst_kv_indices: np.ndarray,
    *,
    dcp_token_item_lens: list[int],
    dst_dcp_size: int,
    dst_dcp_rank: int,
    src_page_offset: int,
    decode_prefix_len: int,
    num_kv_tokens: int | None,
    dst_layer_ids: list[int],
    **rest: Any,
) -> int:
    """Send what this rank has of one chunk for one decode rank: 0 when it arrived, otherwise the chunk's request fails.

    The arguments are those of :class:`Chunk`.
    """
    if is_stock(manager, dst_dcp_size):
        return original(
            manager,
            mooncake_session_id,
            prefill_kv_indices,
            dst_kv_ptrs,
            dst_kv_indices,
            dcp_token_item_lens=dcp_token_item_lens,
            dst_dcp_size=int(dst_dcp_size),
            dst_dcp_rank=dst_dcp_rank,
            src_page_offset=src_page_offset,
            decode_prefix_len=decode_prefix_len,
            num_kv_tokens=num_kv_tokens,
            dst_layer_ids=dst_layer_ids,
            **rest,
        )
    began = time.perf_counter()
    chunk = Chunk(prefill_kv_indices, dst_kv_indices, src_page_offset, decode_prefix_len, num_kv_tokens)
    try:
        src_ptrs, dst_ptrs = paired_layers(manager, dst_kv_ptrs, dst_layer_ids)
        row_bytes = dcp_token_item_lens[: len(src_ptrs)]
        transfer = plan_chunk(manager, dst_dcp_size, dst_dcp_rank, chunk, src_ptrs, dst_ptrs, row_bytes)
    except (ValueError, RuntimeError) as error:
        return _fail_request(manager, mooncake_session_id, str(error))
    _, src, dst, sizes = transfer
    planned = time.perf_counter()
    limit = getattr(manager, "max_transfer_batch_indices", 0)
    problem, batches = send_batches(manager.engine, mooncake_session_id, src, dst, sizes, limit)
    log_chunk(logger, mooncake_session_id, dst_dcp_rank, transfer, batches, began, planned, "send")
    if problem is not None:
        return _fail_request(manager, mooncake_session_id, problem)
    metrics.record_transfer(src.size, transfer.n_bytes, time.perf_counter() - planned)
    return 0


def send_batches(
    engine: Any, session: str, src: np.ndarray, dst: np.ndarray, sizes: np.ndarray, limit: int = 0
) -> tuple[str | None, int]:
    """Write ``sizes`` bytes from ``src`` to ``dst`` (uint64 addresses, (n,) each) at the peer, batch by batch.

    Args:
        engine: has ``batch_transfer_sync`` and ``send_probe``, as SGLang's MooncakeTransferEngine.
        limit: segments per batch that the operator allows (SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES), 0 for none.

    Returns:
        None, or why it stopped before everything was sent; and the number of batches handed to the engine.
    """
    if not src.size:
        return None, 0
    # The allocator never moves pages while a request holds them, so sending a part again is harmless.
    batch = min(MAX_BATCH_SEGMENTS, limit or MAX_BATCH_SEGMENTS, max(1, MAX_BATCH_BYTES // int(sizes.max())))
    done = calls = retries = 0
    while done < src.size:
        part = slice(done, done + batch)
        calls += 1
        began = time.perf_counter()
        code = engine.batch_transfer_sync(session, src[part].tolist(), dst[part].tolist(), sizes[part].tolist())
        if code == 0:
            done = part.stop
            continue
        took = time.perf_counter() - began
        what = f"a batch of {src[part].size} segments ({int(sizes[part].sum())} bytes) failed after {took:.1f} s"
        if not _is_alive(engine, session):
            return f"{what} and decode session {session} does not answer", calls
        if took > REFUSED_WITHIN_S or retries == MAX_RETRIES or batch == 1:
            return f"{what} with code {code} on try {retries + 1}, although decode session {session} answers", calls
        time.sleep(RETRY_PAUSE_S * (1 << retries))
        retries += 1
        metrics.record_retry()
        batch = max(1, batch // 4)
        logger.warning("%s with code %d; trying again with %d segments at once", what, code, batch)
    return None, calls


def _is_alive(engine: Any, session: str) -> bool:
    try:
        return engine.send_probe(session) == 0
    except Exception as error:  # SGLang treats a probe that raises the same way
        logger.warning("send_probe(%s) raised %s", session, error)
        return False


def _fail_request(manager: Any, session: str, cause: str) -> int:
    """Fail the chunk's request, and blacklist the peer only if it is dead.

    SGLang takes any failure for a dead peer and adds one to ``session_failures``; one or more blacklists the session
    until it registers again. A peer that answers is no dead peer, so that count is paid in advance.
    """
    logger.error("KV transfer failed: %s", cause)
    _failure.cause = cause
    if _is_alive(manager.engine, session):
        with manager.session_lock:
            manager.session_failures[session] -= 1
    return -1


def conclude_failure(original: Callable[..., Any], manager: Any, *, failure_reason: str, **rest: Any) -> Any:
    """Adds the cause to what both servers report."""
    cause, _failure.cause = getattr(_failure, "cause", None), None
    return original(manager, failure_reason=f"{failure_reason}: {cause}" if cause else failure_reason, **rest)


def encode_kv_status_message(
    original: Callable[..., list[bytes]], manager: Any, *, bootstrap_room: int, failure_reason: str | None, **rest: Any
) -> list[bytes]:
    """Tells decode why, too: SGLang's decode side reads a fourth frame, but its Mooncake prefill side sends three."""
    parts = original(manager, bootstrap_room=bootstrap_room, failure_reason=failure_reason, **rest)
    if failure_reason and not manager.kv_status_msg_carries_reason:
        registered = map(manager.decode_kv_args_table.get, list(manager.transfer_infos.get(bootstrap_room, ())))
        if any(info is not None and not is_stock(manager, info.dst_dcp_size) for info in registered):
            parts.append(failure_reason.encode())
    return parts


# -- the rows --------------------------------------------------------------------------------------------------------

_CONN = "sglang.srt.disaggregation.mooncake.conn"
_COMMON = "sglang.srt.disaggregation.common.conn"

#: When these rows are installed; entries of plugin.SCOPES. A function takes a plugin.Setup.
MOONCAKE_SCOPES: dict[str, str | Callable[[Any], bool]] = {
    "mooncake_prefill": lambda s: s.disaggregation_mode == "prefill" and s.transfer_backend == "mooncake",
    "mooncake_decode": lambda s: s.disaggregation_mode == "decode" and s.transfer_backend == "mooncake",
}

MOONCAKE_HOOKS: tuple[Hook, ...] = (
    pd_row(
        f"{_CONN}:MooncakeKVManager.build_receiver_registration_message",
        "common:build_receiver_registration_message",
        "bb567c4bbc6978ef",
        "mooncake_decode",
        "prefill is not told the layout and sends token round-robin rows",
    ),
    pd_row(
        f"{_CONN}:KVArgsRegisterInfo.from_zmq",
        "mooncake:from_zmq",
        "bd1eaec12794c30c",
        "mooncake_prefill",
        "the layout that decode sent is not read",
    ),
    pd_row(
        f"{_CONN}:MooncakeKVManager._validate_peer_state_layout",
        "mooncake:validate_peer_state_layout",
        "af8791939cf11529",
        "mooncake_prefill",
        "a refused peer is served",
    ),
    pd_row(
        f"{_CONN}:MooncakeKVManager.send_kvcache_dcp",
        "mooncake:send_kvcache_dcp",
        "9e40b1e377dd6025",
        "mooncake_prefill",
        "rows are sent one by one, to the owners of token round-robin, and never from a prefill with DCP",
    ),
    pd_row(
        f"{_COMMON}:CommonKVManager.conclude_failure",
        "mooncake:conclude_failure",
        "101d22014b68955a",
        "mooncake_prefill",
        "a failed transfer is reported without its cause",
    ),
    pd_row(
        f"{_COMMON}:CommonKVManager._encode_kv_status_message",
        "mooncake:encode_kv_status_message",
        "0e5e83883a028ba0",
        "mooncake_prefill",
        "decode reports that prefill might be dead instead of the reason for a refusal or failure",
    ),
)
