"""What PD servers tell each other about their KV layouts, who sends to whom, and when a pair must be refused.

A decode server asks for :data:`ROUTE` on the prefill's bootstrap server first: the answer names the prefill's layout,
and a server without this package answers 404. If the pair is more than SGLang's own (:func:`is_stock`), decode appends
a frame of ours to SGLang's registration message (a list of frames): a magic word, the frame's version, and a JSON
object with the fields of :class:`KvGeometry`. A prefill server without this package would ignore it and send rows in
its own order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from sglang_dcp_block.dcp.layout import DcpLayout

#: The versions that this package reads. Rotated pages (--dcp-rotate) need the last; all else is said in the first, as
#: peers that know no rotation read it.
FRAME_VERSIONS = (2, 3)
MAGIC = b"sglang-dcp-block"
#: Frames of a stock registration message of Mooncake; ours follows.
STOCK_FRAMES = 20
#: GET on the prefill's bootstrap server; :func:`capability` makes the answer.
ROUTE = "/dcp_block_capability"

_READS = "versions " + " and ".join(map(str, FRAME_VERSIONS))
_SAME_PLUGIN = "install the same sglang-dcp-block version on both servers"


class WireError(ValueError):
    """A peer said something this version can't act on; the message is one sentence for both operators."""


@dataclass(frozen=True)
class KvGeometry:
    """How one PD server stores KV: its DCP size and block size, tokens per physical page, KV dtype by name, and whether
    each virtual page begins at another rank."""

    dcp_size: int
    block_size: int
    page_size: int
    kv_dtype: str
    rotate: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rotate, bool) or (self.rotate and self.block_size == 1):
            raise ValueError(f"bad layout: {self}")

    @property
    def layout(self) -> DcpLayout:
        layout = DcpLayout(self.dcp_size, self.block_size)
        return layout.rotated(self.page_size) if self.rotate else layout

    @property
    def frame_version(self) -> int:
        """Of the frame that says it."""
        return FRAME_VERSIONS[self.rotate]


def encode(geometry: KvGeometry) -> bytes:
    """The frame of a decode server."""
    fields = asdict(geometry)
    if not geometry.rotate:
        del fields["rotate"]
    return b"%s %d %s" % (MAGIC, geometry.frame_version, json.dumps(fields).encode())


def find(message: Sequence[bytes], stock_frames: int = STOCK_FRAMES) -> bytes | None:
    """Our frame in a registration message, None where the decode server sent none (it runs B = 1)."""
    return next((frame for frame in message[stock_frames:] if bytes(frame).startswith(MAGIC)), None)


def decode(frame: bytes) -> KvGeometry:
    """Inverse of :func:`encode`.

    Raises:
        WireError: another frame version, or no such frame at all.
    """
    try:
        _, version, body = bytes(frame).split(b" ", 2)
        if int(version) not in FRAME_VERSIONS:
            raise WireError(
                f"the decode server sends version {int(version)} of the sglang-dcp-block frame and this prefill server "
                f"reads {_READS}: {_SAME_PLUGIN}."
            )
        geometry = KvGeometry(**json.loads(body))
        _ = geometry.layout.virtual_page_size(geometry.page_size)
        if geometry.frame_version > int(version):
            raise ValueError(f"needs version {geometry.frame_version}")
        return geometry
    except WireError:
        raise
    except (ValueError, TypeError) as error:
        raise WireError(
            f"the decode server sent an unreadable sglang-dcp-block frame ({error}): {_SAME_PLUGIN}."
        ) from None


def is_stock(prefill: KvGeometry, decode: KvGeometry) -> bool:
    """SGLang serves this pair itself: token round-robin and one page size, from one rank or rank to rank."""
    return (
        prefill.block_size == decode.block_size == 1
        and prefill.page_size == decode.page_size
        and prefill.dcp_size in (1, decode.dcp_size)
    )


def is_rank_to_rank(prefill: KvGeometry, decode: KvGeometry) -> bool:
    """Each prefill rank holds what one decode rank will hold. Rotated pages begin elsewhere on the other side."""
    return prefill.layout == decode.layout and not prefill.rotate


def refusal(prefill: KvGeometry, decode: KvGeometry) -> str | None:
    """Why ``prefill`` can't send to ``decode``, in one sentence; None when it can. Any two layouts and page sizes fit.

    Bytes per token are compared elsewhere.
    """
    if prefill.kv_dtype != decode.kv_dtype:
        return (
            f"--kv-cache-dtype differs (prefill {prefill.kv_dtype}, decode {decode.kv_dtype}): "
            "start both servers with the same --kv-cache-dtype."
        )
    return None


def missing_frame(prefill: KvGeometry) -> str:
    """Refusal of a decode server that registered without our frame where the pair is not SGLang's own."""
    return (
        f"this prefill server has --dcp-size {prefill.dcp_size} --dcp-block-size {prefill.block_size} and the decode "
        f"server did not say that it can receive from it: {_SAME_PLUGIN}."
    )


# -- who sends to whom -------------------------------------------------------------------------------------------------


class Senders(NamedTuple):
    """The prefill TP ranks that one decode TP rank registers with.

    known: all of them; each answers for each request. sending: those that send KV, one DCP group. receivers: decode
    ranks that register with each of ``known``.
    """

    known: range
    sending: range
    receivers: int


def senders_of(decode_rank: int, decode_tp: int, prefill_tp: int, prefill_dcp: int) -> Senders:
    """Prefill ranks for TP rank ``decode_rank`` of ``decode_tp``.

    DCP groups are consecutive TP ranks, and all of them hold the same KV. So each decode rank is served by the ranks
    of one group, the decode ranks are spread over the groups, and a group that is left over is told and sends nothing.

    Raises:
        WireError: the groups can't be shared out evenly.
    """
    groups = [range(first, first + prefill_dcp) for first in range(0, prefill_tp, prefill_dcp)]
    n = len(groups)
    if decode_tp % n and n % decode_tp:
        raise WireError(
            f"prefill has {n} DCP groups (--tp-size {prefill_tp}, --dcp-size {prefill_dcp}) for {decode_tp} decode "
            "ranks: choose sizes of which one divides the other."
        )
    first = decode_rank * n // decode_tp
    last = max(first, (decode_rank + 1) * n // decode_tp - 1)
    return Senders(range(groups[first].start, groups[last].stop), groups[first], max(1, decode_tp // n))


# -- before the first word ---------------------------------------------------------------------------------------------


def route(decode: KvGeometry) -> str:
    """What a decode server asks for: :data:`ROUTE`, with the version of its frame where that isn't the first."""
    version = decode.frame_version
    return ROUTE if version == FRAME_VERSIONS[0] else f"{ROUTE}?frame_version={version}"


def capability(layout: DcpLayout, page_size: int) -> dict[str, int]:
    """A prefill server's answer at :data:`ROUTE`, but for its transfer backend and the plugin version."""
    sizes = {"dcp_size": layout.dcp_size, "block_size": layout.block_size, "page_size": page_size}
    if layout.is_rotated:
        sizes["rotate"] = True
    return {"frame_version": FRAME_VERSIONS[layout.is_rotated], **sizes}


def answer_in_version(answer: dict[str, Any], asked: str | None) -> dict[str, Any]:
    """``answer`` in a later version of the frame, if decode asks for one that this package reads (:func:`route`)."""
    version = next((v for v in FRAME_VERSIONS if str(v) == asked), 0)
    return answer | {"frame_version": max(version, answer["frame_version"])}


def served_geometry(status: int, answer: object, kv_dtype: str) -> KvGeometry | None:
    """Inverse of :func:`capability`; None where the server has not this version of the plugin, or answers nonsense.

    Args:
        status: HTTP status. answer: the decoded JSON body (anything for a failed status). kv_dtype: SGLang compares it
            itself and it is not in the answer: the asking side's.
    """
    if status != 200 or not isinstance(answer, dict) or answer.get("frame_version") not in FRAME_VERSIONS:
        return None
    try:
        dcp_size, block_size, page_size = (int(answer[size]) for size in ("dcp_size", "block_size", "page_size"))
        geometry = KvGeometry(dcp_size, block_size, page_size, kv_dtype, answer.get("rotate", False))
        _ = geometry.layout.virtual_page_size(geometry.page_size)
    except (KeyError, TypeError, ValueError):
        return None
    return geometry if geometry.frame_version <= answer["frame_version"] else None


def transfer_backend_refusal(answer: object, address: str, transfer_backend: str) -> str | None:
    """A prefill server with another transfer backend reads nothing that this one writes; None where it has the same.

    Args:
        answer: the decoded JSON body. address: the bootstrap server, host:port. transfer_backend: of the asking side.
    """
    theirs = answer.get("transfer_backend", transfer_backend) if isinstance(answer, dict) else transfer_backend
    if theirs == transfer_backend:
        return None
    return (
        f"the prefill server at {address} has --disaggregation-transfer-backend {theirs} and this decode server has "
        f"{transfer_backend}: start both with the same."
    )


def capability_refusal(status: int, answer: object, address: str, decode: KvGeometry) -> str | None:
    """Judge a prefill's answer to GET :data:`ROUTE`: None if it can read our frame, else one sentence.

    Args:
        status: HTTP status. answer: the decoded JSON body (anything for a failed status).
        address: the bootstrap server, host:port. decode: of the decode server that asks.
    """
    if status != 200 or not isinstance(answer, dict):
        return (
            f"the prefill server at {address} does not run sglang-dcp-block and would send KV in token round-robin "
            f"order, but this decode server has --dcp-block-size {decode.block_size}: install sglang-dcp-block there "
            "(no flag needed), or start this server with --dcp-block-size 1."
        )
    version = answer.get("frame_version")
    if version not in FRAME_VERSIONS or version < decode.frame_version:
        return (
            f"the prefill server at {address} reads version {version} of the sglang-dcp-block frame and this decode "
            f"server sends version {decode.frame_version}: {_SAME_PLUGIN}."
        )
    if served_geometry(status, answer, "") is None:
        return f"the prefill server at {address} sent an unreadable layout: {_SAME_PLUGIN}."
    return None
