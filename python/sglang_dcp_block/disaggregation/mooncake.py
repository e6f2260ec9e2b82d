"""SGLang's Mooncake PD backend between any two KV layouts: registration, refusals, and the send.

:data:`MOONCAKE_HOOKS` is the part of the hook table that installs the functions below. docs/pd.md tells the order of
messages. For a pair that SGLang serves itself (:func:`wire.is_stock`) every function calls the original and nothing
else.

Prefill's receiving thread serves all decode servers, so nothing here raises in it: a peer that doesn't fit is
registered with a refusal, and only its requests fail, with that sentence on both servers.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_dcp_block import __version__, hooks, metrics, runtime, server_args
from sglang_dcp_block.disaggregation import wire
from sglang_dcp_block.disaggregation.plan import Side, addresses, plan_pair
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


class PeerDcpSize(int):
    """A decode peer's DCP size as SGLang passes it around, with what else it said.

    tp_rank, tp_size: of the peer. geometry: from its frame, None without one. refusal: why it can't be served, None
    while it can.
    """

    tp_rank: int = 0
    tp_size: int = 1
    geometry: wire.KvGeometry | None = None
    refusal: str | None = None


def _geometry(manager: Any) -> wire.KvGeometry:
    """Of the server that ``manager`` (a ``CommonKVManager``) belongs to."""
    block_size = runtime.active_layout().block_size
    return wire.KvGeometry(manager.dcp_size, block_size, manager.kv_args.page_size, str(manager.kv_cache_dtype_str))


def _peer_geometry(manager: Any, peer: Any) -> wire.KvGeometry:
    """Of a decode peer; one that sent no frame has token round-robin and our page size, which SGLang checked."""
    mine = _geometry(manager)
    return getattr(peer, "geometry", None) or wire.KvGeometry(int(peer), 1, mine.page_size, mine.kv_dtype)


def _is_stock(manager: Any, peer: Any) -> bool:
    """SGLang serves this peer itself."""
    return getattr(peer, "refusal", None) is None and wire.is_stock(_geometry(manager), _peer_geometry(manager, peer))


def _is_verbatim(mine: wire.KvGeometry, theirs: wire.KvGeometry, same_tp: bool) -> bool:
    """One layout on both sides and TP rank to TP rank: SGLang's copy of whole virtual pages is right as it is."""
    whole = mine.layout.rows_per_virtual_page(mine.page_size) == mine.page_size
    return same_tp and whole and (mine.layout, mine.page_size) == (theirs.layout, theirs.page_size)


# -- decode side ---------------------------------------------------------------------------------------------------


def build_receiver_registration_message(original: Callable[..., list[bytes]], manager: Any) -> list[bytes]:
    message, mine = original(manager), _geometry(manager)
    # At B = 1 only a server that has met a prefill with another layout says so; a stock prefill ignores the frame.
    if mine.block_size > 1 or getattr(manager, "dcp_block_pairs", False):
        message.append(wire.encode(mine))
    return message


def try_ensure_parallel_info(original: Callable[..., bool], manager: Any, bootstrap_addr: str) -> bool:
    """Before the first word to a prefill server: which layout has it, does it fit, and which of its ranks send to us?

    A refusal fails the requests that wait for this server, and no other. SGLang asks again for later requests, so a
    prefill server that was restarted with the plugin is taken without a restart here.
    """
    mine = _geometry(manager)
    if bootstrap_addr in manager.prefill_info_table or (mine.block_size == 1 and not manager.is_mla_backend):
        return original(manager, bootstrap_addr)
    import requests

    try:
        response = requests.get(f"http://{bootstrap_addr}{wire.ROUTE}", timeout=5)
        if response.status_code >= 500:  # not up yet, or a proxy's word: says nothing about the plugin
            raise requests.HTTPError(f"HTTP status {response.status_code}")
        answer = response.json() if response.status_code == 200 else None
        theirs = wire.served_geometry(response.status_code, answer, mine.kv_dtype)
    except (requests.RequestException, ValueError) as error:
        logger.error("No answer from prefill server %s (%s); will ask again", bootstrap_addr, error)
        return False
    if mine.block_size == 1 and (theirs is None or wire.is_stock(theirs, mine)):
        return original(manager, bootstrap_addr)
    refusal = wire.capability_refusal(response.status_code, answer, bootstrap_addr, mine.block_size)
    if refusal is None:
        assert theirs is not None  # or there would be a refusal
        try:
            return _take_prefill(original, manager, bootstrap_addr, theirs, mine)
        except (RuntimeError, wire.WireError) as error:  # SGLang's checks end the scheduler if nobody handles them
            refusal = str(error)
            manager.prefill_info_table.pop(bootstrap_addr, None)
    _fail_waiting_requests(manager, bootstrap_addr, refusal)
    return False


def _take_prefill(
    original: Callable[..., bool], manager: Any, bootstrap_addr: str, theirs: wire.KvGeometry, mine: wire.KvGeometry
) -> bool:
    """SGLang's checks and rank mapping, but for the page size, which may differ, and for prefill ranks under DCP.

    Pipeline stages of prefill are SGLang's: it registers with each and counts an answer of each.
    """
    if manager.pp_size > 1:
        raise wire.WireError("decode has --pp-size above 1, which is tested at prefill only: use --pp-size 1 there.")
    view = copy.copy(manager)  # shares the tables
    view.kv_args = copy.copy(manager.kv_args)
    view.kv_args.page_size = theirs.page_size
    if not original(view, bootstrap_addr):
        return False
    manager.dcp_block_pairs = True
    info = manager.prefill_info_table[bootstrap_addr]
    if info.attn_cp_size > 1 or info.enable_kv_cache_sharding:
        cause = "--attn-cp-size above 1" if info.attn_cp_size > 1 else "--enable-kv-cache-sharding"
        raise wire.WireError(f"prefill has {cause}, which is not tested between two layouts: start it without.")
    if theirs.dcp_size > 1 and not (theirs.layout == mine.layout and info.attn_tp_size == manager.attn_tp_size):
        rank = manager.kv_args.engine_rank % manager.attn_tp_size
        senders = wire.senders_of(rank, manager.attn_tp_size, info.attn_tp_size, theirs.dcp_size)
        # No rank named as the only real sender: SGLang then waits for all of them, and drains all after an abort.
        info.target_tp_rank, info.target_tp_ranks = None, list(senders.known)
        info.required_dst_info_num = senders.receivers
        info.required_prefill_response_num *= len(senders.known)
    return True


def _fail_waiting_requests(manager: Any, bootstrap_addr: str, refusal: str) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    logger.error("Refusing prefill server %s: %s", bootstrap_addr, refusal)
    for room in list(manager.addr_to_rooms_tracker.get(bootstrap_addr, ())):
        if manager.request_status.get(room) == KVPoll.Bootstrapping:
            manager.record_failure(room, refusal)
            manager.update_status(room, KVPoll.Failed)


# -- prefill side: registration of a decode peer -----------------------------------------------------------------------


def from_zmq(original: Callable[..., Any], cls: type, message: list[bytes]) -> Any:
    info = original(cls, message)
    info.dst_dcp_size = peer = PeerDcpSize(info.dst_dcp_size)
    peer.tp_rank, peer.tp_size = info.dst_tp_rank % info.dst_attn_tp_size, info.dst_attn_tp_size
    frame = wire.find(message)
    if frame is not None:
        try:
            peer.geometry = wire.decode(frame)
        except wire.WireError as error:
            peer.refusal = str(error)
    return info


def requires_dcp_relayout(original: Callable[..., bool], manager: Any, dst_dcp_size: Any, dst_dcp_rank: int) -> bool:
    """Whether our plan cuts what this peer gets (or SGLang's, if the pair is its own)."""
    if _is_stock(manager, dst_dcp_size):
        return original(manager, dst_dcp_size, dst_dcp_rank)
    peer, mine, theirs = dst_dcp_size, _geometry(manager), _peer_geometry(manager, dst_dcp_size)
    peer.refusal = peer.refusal or _misfit(manager, peer, mine, theirs)
    if peer.refusal is None and _is_verbatim(mine, theirs, peer.tp_size == manager.attn_tp_size):
        return _refuse_on_error(peer, False, original, manager, dst_dcp_size, dst_dcp_rank)
    return peer.refusal is None


def _refuse_on_error(peer: PeerDcpSize, otherwise: Any, original: Callable[..., Any], *args: Any) -> Any:
    """SGLang's checks raise, which would end the thread that serves all peers."""
    try:
        return original(*args)
    except RuntimeError as error:
        peer.refusal = f"{error}: start both servers with the same model and dtype."
        return otherwise


def _misfit(manager: Any, peer: PeerDcpSize, mine: wire.KvGeometry, theirs: wire.KvGeometry) -> str | None:
    """Why this peer can't be served, in one sentence; None when it can."""
    if theirs.dcp_size != int(peer):
        return f"the decode server registered DCP size {int(peer)} but its frame says {theirs.dcp_size}."
    if peer.geometry is None:
        return wire.missing_frame(mine)
    if manager.kv_args.num_draft_entries:
        return "speculative decoding is not supported with --dcp-block-size: start prefill without it."
    if not manager.is_mla_backend or manager.kv_args.state_types:
        return (
            "KV is cut between two layouts only where all of it is multi-head latent attention (MLA): "
            "give both servers the same --dcp-size and --page-size and drop --dcp-block-size."
        )
    if mine.dcp_size > 1:
        try:
            wire.senders_of(peer.tp_rank, peer.tp_size, manager.attn_tp_size, mine.dcp_size)
        except wire.WireError as error:
            return str(error)
    return wire.refusal(mine, theirs)


def prepare_dcp_token_item_lens(
    original: Callable[..., list[int]], manager: Any, dst_page_item_lens: list[int | None], dst_dcp_size: Any
) -> list[int]:
    """Bytes of a row in each layer; those of the peer must be the same."""
    if _is_stock(manager, dst_dcp_size):
        return original(manager, dst_page_item_lens, dst_dcp_size)
    # SGLang divides both sides by our page size.
    mine, theirs = _geometry(manager), _peer_geometry(manager, dst_dcp_size)
    scaled = [n and n // theirs.page_size * mine.page_size for n in dst_page_item_lens]
    return _refuse_on_error(dst_dcp_size, [], original, manager, scaled, dst_dcp_size)


def init_dcp_pack_buffers_once(
    original: Callable[..., None], manager: Any, dcp_size: int, *, include_draft: bool = False
) -> None:
    """Rows are sent from where they lie: a peer that our plan serves needs no pack buffer, so none is allocated."""
    if _is_stock(manager, dcp_size):
        original(manager, dcp_size, include_draft=include_draft)


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

    prefill_kv_indices: virtual page ids of this chunk. dst_kv_indices: virtual page ids of the whole request after
    decode's cached prefix. src_page_offset: virtual pages of the request before this chunk, counted from
    :func:`pop_decode_prefix_len`.
    """
    if _is_stock(manager, dst_dcp_size):
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
    mine, theirs = _geometry(manager), _peer_geometry(manager, dst_dcp_size)
    page = mine.layout.virtual_page_size(mine.page_size)
    first = decode_prefix_len // page * page + src_page_offset * page
    end = first + (len(prefill_kv_indices) * page if num_kv_tokens is None else num_kv_tokens)
    start = max(first, decode_prefix_len)  # a page of ours may begin inside decode's prefix
    try:
        if not _is_sender(manager, dst_dcp_size, mine):
            start = end
        src_ptrs, dst_ptrs = _paired_layers(manager, dst_kv_ptrs, dst_layer_ids)
        segments = plan_pair(
            Side(mine.layout, manager.dcp_rank, mine.page_size, prefill_kv_indices, first),
            Side(theirs.layout, dst_dcp_rank, theirs.page_size, dst_kv_indices, decode_prefix_len),
            start,
            max(0, end - start),
        )
        src, dst, sizes = addresses(segments, src_ptrs, dst_ptrs, dcp_token_item_lens[: len(src_ptrs)])
    except (ValueError, RuntimeError) as error:
        return _fail_request(manager, mooncake_session_id, f"no transfer plan for this chunk: {error}")
    planned = time.perf_counter()
    problem, batches = send_batches(
        manager.engine, mooncake_session_id, src, dst, sizes, getattr(manager, "max_transfer_batch_indices", 0)
    )
    if logger.isEnabledFor(logging.DEBUG):
        logger.debug(
            "kv_chunk session=%s rank=%d tokens=%d segments=%d bytes=%d batches=%d plan_us=%.0f send_us=%.0f",
            mooncake_session_id,
            dst_dcp_rank,
            segments.total_rows,
            src.size,
            int(sizes.sum()),
            batches,
            (planned - began) * 1e6,
            (time.perf_counter() - planned) * 1e6,
        )
    if problem is not None:
        return _fail_request(manager, mooncake_session_id, problem)
    metrics.record_transfer(src.size, int(sizes.sum()), time.perf_counter() - planned)
    return 0


def _is_sender(manager: Any, peer: Any, mine: wire.KvGeometry) -> bool:
    """Other ranks may hold the same KV; one DCP group sends it to this peer, the others only answer for the request."""
    if mine.dcp_size == 1:  # SGLang tells the ranks that don't send
        return True
    senders = wire.senders_of(peer.tp_rank, peer.tp_size, manager.attn_tp_size, mine.dcp_size)
    return manager.attn_tp_rank in senders.sending


def pop_decode_prefix_len(original: Callable[..., int], sender: Any) -> int:
    """Tokens that needn't be sent, in whole pages of ours: SGLang counts pages from there.

    Decode's prefix is whole pages of decode, which can be smaller.
    """
    mine, prefix = _geometry(sender.kv_mgr), original(sender)
    return prefix - prefix % mine.layout.virtual_page_size(mine.page_size)


def _paired_layers(manager: Any, dst_ptrs: list[int], dst_layer_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Base addresses of the layers on this prefill server and of the same layers at the peer."""
    from sglang.srt.disaggregation.utils import resolve_dcp_dst_entry_indices

    src_ptrs, src_layer_ids = manager.kv_args.kv_data_ptrs, manager.kv_args.kv_layer_ids
    if src_layer_ids or dst_layer_ids:
        order = resolve_dcp_dst_entry_indices(src_layer_ids, dst_layer_ids, len(src_ptrs), len(dst_ptrs))
        return src_ptrs, [dst_ptrs[i] for i in order]
    src_ptrs, dst_ptrs, _ = manager.get_mla_kv_ptrs_with_pp(src_ptrs, dst_ptrs)
    return src_ptrs, dst_ptrs


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
        if any(info is not None and not _is_stock(manager, info.dst_dcp_size) for info in registered):
            parts.append(failure_reason.encode())
    return parts


# -- prefill side: the bootstrap server (launcher process) -------------------------------------------------------------


def start_disagg_service(original: Callable[[], Any]) -> Any:
    """The bootstrap server builds its routes as it starts, in the launcher, where its module is loaded only now."""
    from sglang.srt.runtime_context import get_disagg

    config = get_disagg()
    if config.disaggregation_mode == "prefill" and config.disaggregation_transfer_backend == "mooncake":
        hooks.install([h for h in MOONCAKE_HOOKS if h.scope == "pd_bootstrap"])
    return original()


def setup_routes(original: Callable[..., None], server: Any) -> None:
    original(server)
    described = {**_launched(), "plugin_version": __version__}

    async def answer_capability(_request: Any) -> Any:
        from aiohttp import web

        return web.json_response(described)

    server.app.router.add_get(wire.ROUTE, answer_capability)


def _launched() -> dict[str, int]:
    """What this launcher's server answers at :data:`wire.ROUTE`."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_server_args

    record = get_server_args()
    return wire.capability(server_args.layout_of(record), resolving_view(record).page_size)


# -- the rows --------------------------------------------------------------------------------------------------------

_CONN = "sglang.srt.disaggregation.mooncake.conn"
_COMMON = "sglang.srt.disaggregation.common.conn"
_US = "sglang_dcp_block.disaggregation.mooncake"


def _row(
    target: str, function: str, source: str, scope: str, why: str, test: str = "test/pd/test_mooncake_hooks.py"
) -> Hook:
    return Hook(target, f"{_US}:{function}", "around", source, scope, why, test)


#: When these rows are installed; entries of plugin.SCOPES. A function takes a plugin.Setup.
MOONCAKE_SCOPES: dict[str, str | Callable[[Any], bool]] = {
    "pd_bootstrap": "the launcher of a Mooncake prefill server, before its bootstrap server starts",
    # Whatever its flags: the block size comes with each decode peer.
    "pd_prefill": lambda s: s.disaggregation_mode == "prefill" and s.transfer_backend == "mooncake",
    # Also at B = 1: the prefill server may have blocks.
    "pd_decode": lambda s: s.disaggregation_mode == "decode" and s.transfer_backend == "mooncake",
}

MOONCAKE_HOOKS: tuple[Hook, ...] = (
    _row(
        f"{_CONN}:MooncakeKVManager.build_receiver_registration_message",
        "build_receiver_registration_message",
        "bb567c4bbc6978ef",
        "pd_decode",
        "prefill is not told the layout and sends token round-robin rows",
    ),
    _row(
        f"{_COMMON}:CommonKVManager.try_ensure_parallel_info",
        "try_ensure_parallel_info",
        "7b7cdcf5e0a38f4e",
        "pd_decode",
        "a prefill server without the plugin fills the wrong rows; only one rank of a prefill DCP is asked for KV",
    ),
    _row(
        f"{_CONN}:KVArgsRegisterInfo.from_zmq",
        "from_zmq",
        "bd1eaec12794c30c",
        "pd_prefill",
        "the layout that decode sent is not read",
    ),
    _row(
        f"{_COMMON}:CommonKVManager.requires_dcp_relayout",
        "requires_dcp_relayout",
        "effe732b0f24e910",
        "pd_prefill",
        "same DCP size with another block size counts as the same layout; any other pair ends the thread",
    ),
    _row(
        f"{_COMMON}:CommonKVManager.prepare_dcp_token_item_lens",
        "prepare_dcp_token_item_lens",
        "7473734d76ef3b90",
        "pd_prefill",
        "a peer with other row sizes ends the thread that serves all peers",
    ),
    _row(
        f"{_COMMON}:CommonKVManager._init_dcp_pack_buffers_once",
        "init_dcp_pack_buffers_once",
        "a56de9725cffcb6a",
        "pd_prefill",
        "gigabytes of pack buffer are allocated that no block needs",
    ),
    _row(
        f"{_CONN}:MooncakeKVManager._validate_peer_state_layout",
        "validate_peer_state_layout",
        "af8791939cf11529",
        "pd_prefill",
        "a refused peer is served",
    ),
    _row(
        f"{_CONN}:MooncakeKVManager.send_kvcache_dcp",
        "send_kvcache_dcp",
        "9e40b1e377dd6025",
        "pd_prefill",
        "rows are sent one by one, to the owners of token round-robin, and never from a prefill with DCP",
    ),
    _row(
        f"{_COMMON}:CommonKVSender.pop_decode_prefix_len",
        "pop_decode_prefix_len",
        "029837411bfef573",
        "pd_prefill",
        "a decode prefix that ends inside a prefill page shifts every page that is sent after it",
        "test/pd/test_any_pair.py",
    ),
    _row(
        f"{_COMMON}:CommonKVManager.conclude_failure",
        "conclude_failure",
        "101d22014b68955a",
        "pd_prefill",
        "a failed transfer is reported without its cause",
    ),
    _row(
        f"{_COMMON}:CommonKVManager._encode_kv_status_message",
        "encode_kv_status_message",
        "0e5e83883a028ba0",
        "pd_prefill",
        "decode reports that prefill might be dead instead of the reason for a refusal or failure",
    ),
    _row(
        "sglang.srt.managers.disagg_service:start_disagg_service",
        "start_disagg_service",
        "770b633bac92fbba",
        "engine",
        "the bootstrap server starts without our route",
    ),
    _row(
        f"{_COMMON}:CommonKVBootstrapServer._setup_routes",
        "setup_routes",
        "6cd5f2e4fedb56b6",
        "pd_bootstrap",
        "decode can't tell a prefill server with the plugin from a stock one",
    ),
)
