"""What a PD prefill server hands to Mooncake, one JSON line per event, in ``SGLANG_DCP_PD_TRACE=FILE``.

Works with and without this project's hooks, so that both can be measured alike:

- ``batch``: one call of the transport, with its segments, bytes and seconds;
- ``pack``: stock's gather of token rows into its pack buffer, with its seconds;
- ``pack_buffers``: device memory allocated for that, in bytes.

``at`` is the machine's monotonic clock in seconds, comparable between processes of one machine.
"""

from __future__ import annotations

import functools
import importlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "SGLANG_DCP_PD_TRACE"

_lock = threading.Lock()


def install(file: str) -> None:
    def write(**event: Any) -> None:
        line = json.dumps({"at": time.monotonic(), **event})
        with _lock, open(file, "a") as out:
            out.write(line + "\n")

    engine = importlib.import_module("sglang.srt.distributed.device_communicators.mooncake_transfer_engine")
    pack = importlib.import_module("sglang.srt.disaggregation.common.dcp_pack")

    def batch(original: Callable, self: Any, session: str, buffers: Any, peers: Any, lengths: Any) -> int:
        began = time.perf_counter()
        code = original(self, session, buffers, peers, lengths)
        took = time.perf_counter() - began
        write(event="batch", segments=len(lengths), bytes=int(sum(lengths)), seconds=took, code=code, session=session)
        return code

    def packed(original: Callable, **arguments: Any) -> Any:
        began = time.perf_counter()
        result = original(**arguments)
        rows = int(arguments["src_token_indices"].size)
        write(event="pack", rows=rows, seconds=time.perf_counter() - began, fits=result is not None)
        return result

    def allocated(original: Callable, *arguments: Any, **more: Any) -> Any:
        buffers = original(*arguments, **more)
        write(event="pack_buffers", count=len(buffers), bytes=sum(buffer.get_size() for buffer in buffers))
        return buffers

    _around(engine.MooncakeTransferEngine, "batch_transfer_sync", batch)
    _around(pack, "try_pack_dcp_src", packed)
    _around(pack, "init_dcp_pack_buffers", allocated)


def _around(owner: Any, name: str, ours: Callable) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    setattr(owner, name, wrapper)
