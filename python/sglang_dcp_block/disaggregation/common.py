"""What SGLang's Mooncake and NIXL backends share between any two KV layouts: registration, refusals, plans of a chunk.

docs/pd.md tells the order of messages. For a pair that SGLang serves itself (:func:`wire.is_stock`) every hook calls
the original and nothing else. :mod:`mooncake` and :mod:`nixl` have what their backend alone needs.

Prefill's receiving thread serves all decode servers, so nothing here raises in it: a peer that doesn't fit is
registered with a refusal, and only its requests fail, with that sentence on both servers.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sglang_dcp_block import __version__, hooks, runtime, server_args
from sglang_dcp_block.disaggregation import wire
from sglang_dcp_block.disaggregation.plan import Segments, Side, addresses, plan_pair
from sglang_dcp_block.hooks import Hook

logger = logging.getLogger(__name__)


class PeerDcpSize(int):
    """A decode peer's DCP size as SGLang passes it around, with what else it said.

    tp_rank, tp_size: of the peer. geometry: from its frame, None without one. refusal: why it can't be served, None
    while it can.
    """

    tp_rank: int = 0
    tp_size: int = 1
    geometry: wire.KvGeometry | None = None
    refusal: str | None = None


def geometry_of(manager: Any) -> wire.KvGeometry:
    """Of the server that ``manager`` (a ``CommonKVManager``) belongs to."""
    layout, page_size = runtime.active_layout(), manager.kv_args.page_size
    dtype = str(manager.kv_cache_dtype_str)
    return wire.KvGeometry(manager.dcp_size, layout.block_size, page_size, dtype, layout.is_rotated)


def peer_geometry(manager: Any, peer: Any) -> wire.KvGeometry:
    """Of a decode peer; one that sent no frame has token round-robin and our page size, which SGLang checked."""
    mine = geometry_of(manager)
    return getattr(peer, "geometry", None) or wire.KvGeometry(int(peer), 1, mine.page_size, mine.kv_dtype)


def is_stock(manager: Any, peer: Any) -> bool:
    """SGLang serves this peer itself."""
    return getattr(peer, "refusal", None) is None and wire.is_stock(geometry_of(manager), peer_geometry(manager, peer))


def _is_verbatim(mine: wire.KvGeometry, theirs: wire.KvGeometry, same_tp: bool) -> bool:
    """One layout on both sides and TP rank to TP rank: SGLang's copy of whole virtual pages is right as it is."""
    whole = mine.layout.rows_per_virtual_page(mine.page_size) == mine.page_size
    return same_tp and whole and wire.is_rank_to_rank(mine, theirs) and mine.page_size == theirs.page_size


def described_peer(size: int, tp_rank: int, tp_size: int, frame: bytes | None) -> PeerDcpSize:
    """A decode peer of DCP ``size`` from its registration. ``frame``: ours (:func:`wire.find`), if it sent one."""
    peer = PeerDcpSize(size)
    peer.tp_rank, peer.tp_size = tp_rank, tp_size
    if frame is not None:
        try:
            peer.geometry = wire.decode(frame)
        except wire.WireError as error:
            peer.refusal = str(error)
    return peer


# -- decode side ---------------------------------------------------------------------------------------------------


def build_receiver_registration_message(original: Callable[..., list[bytes]], manager: Any) -> list[bytes]:
    message, mine = original(manager), geometry_of(manager)
    # At B = 1 only a server that has met a prefill with another layout says so; a stock prefill ignores the frame.
    if mine.block_size > 1 or getattr(manager, "dcp_block_pairs", False):
        message.append(wire.encode(mine))
    return message


def try_ensure_parallel_info(original: Callable[..., bool], manager: Any, bootstrap_addr: str) -> bool:
    """Before the first word to a prefill server: which layout has it, does it fit, and which of its ranks send to us?

    A refusal fails the requests that wait for this server, and no other. SGLang asks again for later requests, so a
    prefill server that was restarted with the plugin is taken without a restart here.
    """
    mine = geometry_of(manager)
    if bootstrap_addr in manager.prefill_info_table or (mine.block_size == 1 and not manager.is_mla_backend):
        return original(manager, bootstrap_addr)
    import requests

    refusals_of(manager).pop(bootstrap_addr, None)
    try:
        response = requests.get(f"http://{bootstrap_addr}{wire.route(mine)}", timeout=5)
        if response.status_code >= 500:  # not up yet, or a proxy's word: says nothing about the plugin
            raise requests.HTTPError(f"HTTP status {response.status_code}")
        answer = response.json() if response.status_code == 200 else None
        theirs = wire.served_geometry(response.status_code, answer, mine.kv_dtype)
    except (requests.RequestException, ValueError) as error:
        logger.error("No answer from prefill server %s (%s); will ask again", bootstrap_addr, error)
        return False
    refusal = wire.transfer_backend_refusal(answer, bootstrap_addr, _transfer_backend_of(manager))
    if refusal is None and mine.block_size == 1 and (theirs is None or wire.is_stock(theirs, mine)):
        return original(manager, bootstrap_addr)
    refusal = refusal or wire.capability_refusal(response.status_code, answer, bootstrap_addr, mine)
    if refusal is None:
        assert theirs is not None  # or there would be a refusal
        try:
            return _take_prefill(original, manager, bootstrap_addr, theirs, mine)
        except (RuntimeError, wire.WireError) as error:  # SGLang's checks end the scheduler if nobody handles them
            refusal = str(error)
            manager.prefill_info_table.pop(bootstrap_addr, None)
    _fail_waiting_requests(manager, bootstrap_addr, refusal)
    return False


def _transfer_backend_of(manager: Any) -> str:
    """SGLang's name of the backend: the package of its manager's class."""
    packages = (cls.__module__.split(".")[-2:-1] for cls in type(manager).__mro__)
    return next(name for package in packages for name in package if name in BACKENDS)


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
    if theirs.dcp_size > 1 and not (wire.is_rank_to_rank(theirs, mine) and info.attn_tp_size == manager.attn_tp_size):
        rank = manager.kv_args.engine_rank % manager.attn_tp_size
        senders = wire.senders_of(rank, manager.attn_tp_size, info.attn_tp_size, theirs.dcp_size)
        # No rank named as the only real sender: SGLang then waits for all of them, and drains all after an abort.
        info.target_tp_rank, info.target_tp_ranks = None, list(senders.known)
        info.required_dst_info_num = senders.receivers
        info.required_prefill_response_num *= len(senders.known)
    return True


def refusals_of(manager: Any) -> dict[str, str]:
    """Why this decode rank refused a prefill server when it asked last, by bootstrap address."""
    return vars(manager).setdefault("dcp_block_refusals", {})


def failure_exception(original: Callable[..., None], receiver: Any) -> None:
    """Ends a request with the refusal of its prefill server, if this rank was refused when it asked last.

    Each rank asks at most once a second by its own clock, and one rank's refusal fails later requests on all. After
    fifteen refusals SGLang also aborts the request, which would put its own reason in place of ours.
    """
    refusal = refusals_of(receiver.kv_mgr).get(receiver.bootstrap_addr)
    if refusal is not None:
        receiver.kv_mgr.record_failure(receiver.bootstrap_room, refusal)
    original(receiver)


def _fail_waiting_requests(manager: Any, bootstrap_addr: str, refusal: str) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    logger.error("Refusing prefill server %s: %s", bootstrap_addr, refusal)
    refusals_of(manager)[bootstrap_addr] = refusal
    for room in list(manager.addr_to_rooms_tracker.get(bootstrap_addr, ())):
        if manager.request_status.get(room) == KVPoll.Bootstrapping:
            manager.record_failure(room, refusal)
            manager.update_status(room, KVPoll.Failed)


# -- prefill side: registration of a decode peer -----------------------------------------------------------------------


def requires_dcp_relayout(original: Callable[..., bool], manager: Any, dst_dcp_size: Any, dst_dcp_rank: int) -> bool:
    """Whether our plan cuts what this peer gets (or SGLang's, if the pair is its own)."""
    if is_stock(manager, dst_dcp_size):
        return original(manager, dst_dcp_size, dst_dcp_rank)
    peer, mine, theirs = dst_dcp_size, geometry_of(manager), peer_geometry(manager, dst_dcp_size)
    peer.refusal = peer.refusal or _misfit(manager, peer, mine, theirs)
    if peer.refusal is None and _is_verbatim(mine, theirs, peer.tp_size == manager.attn_tp_size):
        return refuse_on_error(peer, False, original, manager, dst_dcp_size, dst_dcp_rank)
    return peer.refusal is None


def refuse_on_error(peer: PeerDcpSize, otherwise: Any, original: Callable[..., Any], *args: Any) -> Any:
    """``original(*args)``. Where SGLang's checks raise, which would end the thread that serves all peers, the peer is
    refused, and the result is ``otherwise``."""
    try:
        return original(*args)
    except Exception as error:
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
    if is_stock(manager, dst_dcp_size):
        return original(manager, dst_page_item_lens, dst_dcp_size)
    # SGLang divides both sides by our page size.
    mine, theirs = geometry_of(manager), peer_geometry(manager, dst_dcp_size)
    scaled = [n and n // theirs.page_size * mine.page_size for n in dst_page_item_lens]
    return refuse_on_error(dst_dcp_size, [], original, manager, scaled, dst_dcp_size)


def init_dcp_pack_buffers_once(
    original: Callable[..., None], manager: Any, dcp_size: int, *, include_draft: bool = False
) -> None:
    """Rows are sent from where they lie: a peer that our plan serves needs no pack buffer, so none is allocated."""
    if is_stock(manager, dcp_size):
        original(manager, dcp_size, include_draft=include_draft)


# -- prefill side: the plan of one chunk -------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """One chunk of a request on its way to one decode rank, as SGLang counts it.

    src_pages: (n,) int, virtual page ids of this chunk. dst_pages: (n,) int, virtual page ids of the whole request
    after decode's cached prefix. src_page_offset: virtual pages of the request before this chunk, counted from
    :func:`pop_decode_prefix_len`. decode_prefix_len: tokens. num_kv_tokens: tokens of this chunk, None for all that
    ``src_pages`` hold.
    """

    src_pages: np.ndarray
    dst_pages: np.ndarray
    src_page_offset: int
    decode_prefix_len: int
    num_kv_tokens: int | None


class Transfer(NamedTuple):
    """What to copy: ``segments`` of rows, and their addresses and sizes in every layer (:func:`addresses`)."""

    segments: Segments
    src: np.ndarray
    dst: np.ndarray
    sizes: np.ndarray

    @property
    def n_bytes(self) -> int:
        return int(self.sizes.sum())


def plan_chunk(
    manager: Any,
    peer: Any,
    dcp_rank: int,
    chunk: Chunk,
    src_ptrs: Sequence[int],
    dst_ptrs: Sequence[int],
    row_bytes: Sequence[int],
) -> Transfer:
    """What this prefill rank sends of ``chunk`` to rank ``dcp_rank`` of ``peer`` (a :class:`PeerDcpSize`).

    Args:
        src_ptrs, dst_ptrs, row_bytes: one for each layer, as in :func:`addresses`.

    Raises:
        ValueError: the numbers don't fit together (the message names the side).
    """
    mine, theirs = geometry_of(manager), peer_geometry(manager, peer)
    page = mine.layout.virtual_page_size(mine.page_size)
    first = chunk.decode_prefix_len // page * page + chunk.src_page_offset * page
    end = first + (len(chunk.src_pages) * page if chunk.num_kv_tokens is None else chunk.num_kv_tokens)
    start = max(first, chunk.decode_prefix_len)  # a page of ours may begin inside decode's prefix
    if not _is_sender(manager, peer, mine):
        start = end
    src = Side(mine.layout, manager.dcp_rank, mine.page_size, chunk.src_pages, first)
    dst = Side(theirs.layout, dcp_rank, theirs.page_size, chunk.dst_pages, chunk.decode_prefix_len)
    try:
        segments = plan_pair(src, dst, start, max(0, end - start))
        return Transfer(segments, *addresses(segments, src_ptrs, dst_ptrs, row_bytes))
    except ValueError as error:
        raise ValueError(f"no transfer plan for this chunk: {error}") from error


def paired_layers(manager: Any, dst_ptrs: list[int], dst_layer_ids: Sequence[int]) -> tuple[list[int], list[int]]:
    """Base addresses of the layers on this prefill server and of the same layers at the peer."""
    from sglang.srt.disaggregation.utils import resolve_dcp_dst_entry_indices

    src_ptrs, src_layer_ids = manager.kv_args.kv_data_ptrs, manager.kv_args.kv_layer_ids
    if src_layer_ids or dst_layer_ids:
        order = resolve_dcp_dst_entry_indices(src_layer_ids, dst_layer_ids, len(src_ptrs), len(dst_ptrs))
        return src_ptrs, [dst_ptrs[i] for i in order]
    src_ptrs, dst_ptrs, _ = manager.get_mla_kv_ptrs_with_pp(src_ptrs, dst_ptrs)
    return src_ptrs, dst_ptrs


def log_chunk(
    log: logging.Logger,
    session: str,
    rank: int,
    transfer: Transfer,
    batches: int,
    began: float,
    planned: float,
    did: str,
) -> None:
    """A line of docs/pd.md. began, planned: time.perf_counter(). did: what came after the plan and ends now."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug(
            "kv_chunk session=%s rank=%d tokens=%d segments=%d bytes=%d batches=%d plan_us=%.0f %s_us=%.0f",
            session,
            rank,
            transfer.segments.total_rows,
            transfer.src.size,
            transfer.n_bytes,
            batches,
            (planned - began) * 1e6,
            did,
            (time.perf_counter() - planned) * 1e6,
        )


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
    mine, prefix = geometry_of(sender.kv_mgr), original(sender)
    return prefix - prefix % mine.layout.virtual_page_size(mine.page_size)


# -- prefill side: the bootstrap server (launcher process) -------------------------------------------------------------


def start_disagg_service(original: Callable[[], Any]) -> Any:
    """The bootstrap server builds its routes as it starts, in the launcher, where its module is loaded only now."""
    from sglang.srt.runtime_context import get_disagg

    config = get_disagg()
    if config.disaggregation_mode == "prefill" and config.disaggregation_transfer_backend in BACKENDS:
        hooks.install([h for h in COMMON_HOOKS if h.scope == "pd_bootstrap"])
    return original()


def setup_routes(original: Callable[..., None], server: Any) -> None:
    original(server)
    described = {**_launched(), "plugin_version": __version__}

    async def answer_capability(request: Any) -> Any:
        from aiohttp import web

        return web.json_response(wire.answer_in_version(described, request.query.get("frame_version")))

    server.app.router.add_get(wire.ROUTE, answer_capability)


def _launched() -> dict[str, int | str]:
    """What this launcher's server answers at :data:`wire.ROUTE`."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.runtime_context import get_server_args

    record = get_server_args()
    cfg = resolving_view(record)
    described = wire.capability(server_args.layout_of(record), cfg.page_size)
    return described | {"transfer_backend": cfg.disaggregation_transfer_backend}


# -- the rows --------------------------------------------------------------------------------------------------------

#: SGLang's names of the transfer backends that these rows serve.
BACKENDS = ("mooncake", "nixl")

_COMMON = "sglang.srt.disaggregation.common.conn"


def pd_row(
    target: str, function: str, source: str, scope: str, why: str, test: str = "test/pd/test_mooncake_hooks.py"
) -> Hook:
    """A row of the hook table; ``function`` is ``module:name`` in this folder."""
    return Hook(target, f"sglang_dcp_block.disaggregation.{function}", "around", source, scope, why, test)


#: When these rows are installed; entries of plugin.SCOPES. A function takes a plugin.Setup.
COMMON_SCOPES: dict[str, str | Callable[[Any], bool]] = {
    "pd_bootstrap": "the launcher of a Mooncake or NIXL prefill server, before its bootstrap server starts",
    # Whatever its flags: the block size comes with each decode peer.
    "pd_prefill": lambda s: s.disaggregation_mode == "prefill" and s.transfer_backend in BACKENDS,
    # Also at B = 1: the prefill server may have blocks.
    "pd_decode": lambda s: s.disaggregation_mode == "decode" and s.transfer_backend in BACKENDS,
}

COMMON_HOOKS: tuple[Hook, ...] = (
    pd_row(
        f"{_COMMON}:CommonKVManager.try_ensure_parallel_info",
        "common:try_ensure_parallel_info",
        "7b7cdcf5e0a38f4e",
        "pd_decode",
        "a prefill server without the plugin fills the wrong rows; only one rank of a prefill DCP is asked for KV",
    ),
    pd_row(
        f"{_COMMON}:CommonKVReceiver.failure_exception",
        "common:failure_exception",
        "78839c59d2a6ab1c",
        "pd_decode",
        "a request that another rank refused first, or that is refused for the fifteenth time, ends without the reason",
    ),
    pd_row(
        f"{_COMMON}:CommonKVManager.requires_dcp_relayout",
        "common:requires_dcp_relayout",
        "effe732b0f24e910",
        "pd_prefill",
        "same DCP size with another block size counts as the same layout; any other pair ends the thread",
    ),
    pd_row(
        f"{_COMMON}:CommonKVManager.prepare_dcp_token_item_lens",
        "common:prepare_dcp_token_item_lens",
        "7473734d76ef3b90",
        "pd_prefill",
        "a peer with other row sizes ends the thread that serves all peers",
    ),
    pd_row(
        f"{_COMMON}:CommonKVManager._init_dcp_pack_buffers_once",
        "common:init_dcp_pack_buffers_once",
        "a56de9725cffcb6a",
        "pd_prefill",
        "gigabytes of pack buffer are allocated that no block needs",
    ),
    pd_row(
        f"{_COMMON}:CommonKVSender.pop_decode_prefix_len",
        "common:pop_decode_prefix_len",
        "029837411bfef573",
        "pd_prefill",
        "a decode prefix that ends inside a prefill page shifts every page that is sent after it",
        "test/pd/test_any_pair.py",
    ),
    pd_row(
        "sglang.srt.managers.disagg_service:start_disagg_service",
        "common:start_disagg_service",
        "770b633bac92fbba",
        "engine",
        "the bootstrap server starts without our route",
    ),
    pd_row(
        f"{_COMMON}:CommonKVBootstrapServer._setup_routes",
        "common:setup_routes",
        "6cd5f2e4fedb56b6",
        "pd_bootstrap",
        "decode can't tell a prefill server with the plugin from a stock one",
    ),
)
