"""What a PD decode server says about its KV layout when it registers, and when a prefill server must refuse it.

The registration message of SGLang's Mooncake backend is a list of frames. A decode server with B > 1 appends one of
ours: a magic word, the frame's version, and a JSON object with the fields of :class:`KvGeometry`. A prefill server
without this package would ignore the frame and send token round-robin rows, so decode asks for :data:`ROUTE` on the
prefill's bootstrap server first; a stock server answers 404 there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from sglang_dcp_block.dcp.layout import DcpLayout

FRAME_VERSION = 1
MAGIC = b"sglang-dcp-block"
#: Frames of a stock registration message; ours follows.
STOCK_FRAMES = 20
#: GET on the prefill's bootstrap server: ``{"frame_version": ..., "plugin_version": ...}``.
ROUTE = "/dcp_block_capability"

_SAME_PLUGIN = "install the same sglang-dcp-block version on both servers"


class WireError(ValueError):
    """A peer said something this version can't act on; the message is one sentence for both operators."""


@dataclass(frozen=True)
class KvGeometry:
    """How one PD server stores KV: its DCP size and block size, tokens per physical page, and KV dtype by name."""

    dcp_size: int
    block_size: int
    page_size: int
    kv_dtype: str

    @property
    def layout(self) -> DcpLayout:
        return DcpLayout(self.dcp_size, self.block_size)


def encode(geometry: KvGeometry) -> bytes:
    """The frame of a decode server."""
    return b"%s %d %s" % (MAGIC, FRAME_VERSION, json.dumps(asdict(geometry)).encode())


def find(message: Sequence[bytes]) -> bytes | None:
    """Our frame in a registration message, None where the decode server sent none (it runs B = 1)."""
    return next((frame for frame in message[STOCK_FRAMES:] if bytes(frame).startswith(MAGIC)), None)


def decode(frame: bytes) -> KvGeometry:
    """Inverse of :func:`encode`.

    Raises:
        WireError: another frame version, or no such frame at all.
    """
    try:
        _, version, body = bytes(frame).split(b" ", 2)
        if int(version) != FRAME_VERSION:
            raise WireError(
                f"the decode server sends version {int(version)} of the sglang-dcp-block frame and this prefill server "
                f"reads version {FRAME_VERSION}: {_SAME_PLUGIN}."
            )
        geometry = KvGeometry(**json.loads(body))
        _ = geometry.layout
        return geometry
    except WireError:
        raise
    except (ValueError, TypeError) as error:
        raise WireError(
            f"the decode server sent an unreadable sglang-dcp-block frame ({error}): {_SAME_PLUGIN}."
        ) from None


def refusal(prefill: KvGeometry, decode: KvGeometry) -> str | None:
    """Why ``prefill`` can't send to ``decode``, in one sentence; None when it can.

    It can when both have one layout (rank to rank), or when prefill has no DCP. Row sizes are compared elsewhere.
    """
    for option, ours, theirs in (
        ("--page-size", prefill.page_size, decode.page_size),
        ("--kv-cache-dtype", prefill.kv_dtype, decode.kv_dtype),
    ):
        if ours != theirs:
            return f"{option} differs (prefill {ours}, decode {theirs}): start both servers with the same {option}."
    if prefill.dcp_size == 1:
        return None
    if prefill.dcp_size != decode.dcp_size:
        return (
            f"--dcp-size differs (prefill {prefill.dcp_size}, decode {decode.dcp_size}): start both servers with the "
            "same --dcp-size, or prefill without DCP."
        )
    if prefill.block_size != decode.block_size:
        return (
            f"--dcp-block-size differs (prefill {prefill.block_size}, decode {decode.block_size}): start both servers "
            "with the same --dcp-block-size, or prefill without DCP."
        )
    return None


def capability_refusal(status: int, answer: object, address: str, block_size: int) -> str | None:
    """Judge a prefill's answer to GET :data:`ROUTE`: None if it can read our frame, else one sentence.

    Args:
        status: HTTP status. answer: the decoded JSON body (anything for a failed status).
        address: the bootstrap server, host:port. block_size: B of the decode server that asks.
    """
    if status != 200 or not isinstance(answer, dict):
        return (
            f"the prefill server at {address} does not run sglang-dcp-block and would send KV in token round-robin "
            f"order, but this decode server has --dcp-block-size {block_size}: install sglang-dcp-block there "
            "(no flag needed), or start this server with --dcp-block-size 1."
        )
    version = answer.get("frame_version")
    if version != FRAME_VERSION:
        return (
            f"the prefill server at {address} reads version {version} of the sglang-dcp-block frame and this decode "
            f"server sends version {FRAME_VERSION}: {_SAME_PLUGIN}."
        )
    return None
