"""The layout in force in this process, for hooked code that SGLang calls without it."""

from __future__ import annotations

from typing import Any

from sglang_dcp_block.dcp.layout import DcpLayout

_layout: DcpLayout | None = None


def activate(layout: DcpLayout) -> None:
    """Set the process's layout, once, before any KV is written.

    Raises:
        RuntimeError: another layout is active already.
    """
    global _layout
    if _layout is not None and _layout != layout:
        raise RuntimeError(f"the DCP layout is {_layout} already and can't become {layout} in a running process")
    _layout = layout


def active_layout() -> DcpLayout:
    """Layout of this process.

    Raises:
        RuntimeError: none was activated, so the caller runs in a process that the plugin did not set up.
    """
    if _layout is None:
        raise RuntimeError("no DCP layout is active in this process: sglang-dcp-block was not set up here")
    return _layout


def active_rank() -> int:
    """This process's rank in its DCP group, 0 <= rank < dcp_size."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_dcp_rank


def of_every_rank(mine: str, group: Any) -> list[str]:
    """``mine`` of every rank of SGLang's ``group``, in order of rank. All of them call it at once."""
    import torch.distributed as dist

    everyone: list[Any] = [None] * dist.get_world_size(group.cpu_group)
    dist.all_gather_object(everyone, mine, group=group.cpu_group)
    return everyone
