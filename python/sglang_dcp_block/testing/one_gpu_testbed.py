"""All ranks of a tensor-parallel group on one GPU: for tests of DCP where there is one card, ``SGLANG_DCP_ONE_GPU=1``.

NCCL refuses two ranks on one device, so every collective goes through host memory and gloo; compiled kernels, KV pools,
scheduler and models are the real ones. A collective waits for the device, which a CUDA graph can't hold: start engines
with :data:`ENGINE_ARGUMENTS` and read no speed off them. :data:`SHIMS` is everything that is replaced.

This module is loaded in every SGLang process of everybody who installs the package: it imports only the standard
library, and does nothing without the variable.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

NAME = "dcp_one_gpu_testbed"
VARIABLE = "SGLANG_DCP_ONE_GPU"
#: A file: what a prefill server sends is written there (see :mod:`sglang_dcp_block.testing.pd_trace`).
TRACE_VARIABLE = "SGLANG_DCP_PD_TRACE"
#: Schedulers can fill their radix cache without prefill (see :mod:`sglang_dcp_block.testing.preload`).
PRELOAD_VARIABLE = "SGLANG_DCP_BLOCK_PRELOAD"
#: What an engine on this bed has to be started with besides its own settings.
ENGINE_ARGUMENTS = {
    "disable_decode_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "disable_overlap_schedule": True,
    "disable_custom_all_reduce": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
ENVIRONMENT = {VARIABLE: "1", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


def _gather(group: Any, tensor: Any) -> list[Any]:
    """Every rank's ``tensor`` on this rank's device, in rank order, bit for bit."""
    import torch
    import torch.distributed

    mine = tensor.contiguous().view(-1).view(torch.uint8).cpu()
    parts = [torch.empty_like(mine) for _ in range(group.world_size)]
    torch.distributed.all_gather(parts, mine, group=group.cpu_group)
    return [part.to(tensor.device).view(tensor.dtype).view(tensor.shape) for part in parts]


def _sum(parts: list[Any]) -> Any:
    """In float32 and in rank order, so that all ranks get the same bits."""
    total = parts[0].float() if parts[0].is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def all_reduce(group: Any, tensor: Any) -> None:
    tensor.copy_(_sum(_gather(group, tensor)))


def reduce_scatter(group: Any, output: Any, input: Any) -> Any:
    total = _sum(_gather(group, input)).view(group.world_size, -1)
    output.copy_(total[group.rank_in_group].view(output.shape))
    return output


def all_gather_into(group: Any, output: Any, input: Any) -> None:
    import torch

    output.copy_(torch.cat([part.reshape(-1) for part in _gather(group, input)]).view(output.shape))


def all_to_all(group: Any, output: Any, input: Any) -> None:
    import torch

    mine = [part.reshape(group.world_size, -1)[group.rank_in_group] for part in _gather(group, input)]
    output.copy_(torch.cat(mine).view(output.shape))


def broadcast(group: Any, input_: Any, src: int = 0) -> Any:
    if group.world_size > 1:
        input_.copy_(_gather(group, input_)[src])
    return input_


def _host_groups(original: Callable) -> Callable:
    """A GroupCoordinator without any device communicator."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        off = (
            "use_pynccl",
            "use_mscclpp",
            "use_custom_allreduce",
            "use_torch_symm_mem_all_reduce",
            "use_hpu_communicator",
            "use_xpu_communicator",
        )
        original(self, *args, **(kwargs | dict.fromkeys(off, False)))

    return init


@contextlib.contextmanager
def _first_device(gpu_id: int) -> Iterator[int]:
    yield 0


class Shim(NamedTuple):
    """``module`` and dotted ``attribute`` are replaced by ``make(original)``."""

    module: str
    attribute: str
    make: Callable[[Any], Any]
    why: str


_STATE = "sglang.srt.distributed.parallel_state"
_GROUP = "GroupCoordinator"

SHIMS: tuple[Shim, ...] = (
    Shim("sglang.srt.utils.common", "maybe_reindex_device_id", lambda _: _first_device, "every rank takes GPU 0"),
    Shim("sglang.srt.distributed.bootstrap", "_resolve_backend", lambda _: lambda *, device: "gloo", "not NCCL"),
    Shim(_STATE, f"{_GROUP}.__init__", _host_groups, "pynccl and the other device communicators open one rank per GPU"),
    Shim(_STATE, f"{_GROUP}._all_reduce_in_place", lambda _: all_reduce, "through the host"),
    Shim(_STATE, f"{_GROUP}._reduce_scatter_tensor", lambda _: reduce_scatter, "through the host"),
    Shim(_STATE, f"{_GROUP}._all_gather_into_tensor", lambda _: all_gather_into, "through the host"),
    Shim(_STATE, f"{_GROUP}._all_to_all_single", lambda _: all_to_all, "through the host"),
    Shim(_STATE, f"{_GROUP}.broadcast", lambda _: broadcast, "through the host"),
)

_installed = False


def register() -> None:
    """Entry point ``sglang.srt.plugins``: shims, PD trace and preload, each only when its variable asks for it."""
    if os.environ.get(VARIABLE) == "1":
        install()
    if trace := os.environ.get(TRACE_VARIABLE):
        importlib.import_module("sglang_dcp_block.testing.pd_trace").install(trace)
    if os.environ.get(PRELOAD_VARIABLE) == "1":
        importlib.import_module("sglang_dcp_block.testing.preload").install()


def install() -> None:
    """Apply the shims, once. A missing target stops the process: half a test bed proves nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    for shim in SHIMS:
        owner: Any = importlib.import_module(shim.module)
        *path, name = shim.attribute.split(".")
        try:
            for part in path:
                owner = getattr(owner, part)
            original = getattr(owner, name)
        except AttributeError as error:
            raise SystemExit(f"one-GPU bed: {shim.module} has no {shim.attribute}; it knows sglang 0.5.23") from error
        replacement = shim.make(original)
        setattr(owner, name, replacement)
        for module in list(sys.modules.values()):  # copies made by `from module import name`
            if getattr(module, "__dict__", {}).get(name) is original:
                setattr(module, name, replacement)
