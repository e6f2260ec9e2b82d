"""A CPU platform for SGLang on which DCP runs (MLA and GQA), chosen with ``SGLANG_PLATFORM=dcp_cpu_testbed``.

For tests. The real Scheduler, radix cache, paged allocator, KV pool, forward passes and DCP collectives (over
gloo) run on CPU tensors; Triton kernels run through Triton's interpreter (``TRITON_INTERPRET=1``). SGLang has no DCP on
CPU, so a few places are told otherwise. :data:`SHIMS` is the whole list. Without the variable, neither entry point does
anything.

This module is loaded in every SGLang process of everybody who installs the package: it imports only the standard
library, the rest comes when the test bed is asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

NAME = "dcp_cpu_testbed"
PLATFORM_CLASS = "sglang_dcp_block.testing.cpu_platform:CpuTestbedPlatform"
#: A folder: every scheduler writes its KV rows there, see :mod:`sglang_dcp_block.testing.probe`. On any platform.
AUDIT_VARIABLE = "SGLANG_DCP_BLOCK_AUDIT"
#: A fault of :mod:`sglang_dcp_block.testing.sabotage`: a layout that is broken on purpose.
SABOTAGE_VARIABLE = "SGLANG_DCP_BLOCK_SABOTAGE"
#: Attention reads FP8 KV in float32. For references: SGLang's Triton kernels round queries and weights to FP8.
WIDE_KV_VARIABLE = "SGLANG_DCP_BLOCK_WIDE_KV"


class Shim(NamedTuple):
    """One replaced name: ``module`` and dotted ``attribute``, ``make(original) -> replacement``.

    when: "interpreter" and "start" (as the plugin loads; unit tests want the former as well), "wide" (then as well, for
    WIDE_KV_VARIABLE), "model" (after the model is loaded: modules that SGLang imports late), "disaggregation" or
    "hicache" (the same moment, in a prefill or decode server, or with a host cache). adds: the name doesn't exist
    without a GPU.
    """

    when: str
    module: str
    attribute: str
    make: Callable[[Any], Any]
    why: str
    adds: bool = False


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _original: value


def _with_cuda_branch(original: Callable) -> Callable:
    """``original`` with its module's ``_is_cuda`` true while it runs, so that it takes the branch a GPU takes."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        module_globals = original.__globals__
        before = module_globals["_is_cuda"]
        module_globals["_is_cuda"] = True
        try:
            return original(*args, **kwargs)
        finally:
            module_globals["_is_cuda"] = before

    return wrapper


def _kv_heads_as_on_a_gpu(original: Callable) -> Callable:
    """``original``, but KV heads that several ranks share stay as they are."""

    @functools.wraps(original)
    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        kv_heads = model_config.get_total_num_kv_heads()
        if kv_heads < tp_size and tp_size % kv_heads == 0:
            return model_config
        return original(model_config, load_config, tp_size)

    return adjust


def _patched_once(original: Callable) -> Callable:
    """``original`` called once for the functions of a module, and never undone: nothing is compiled on this bed."""
    scopes: dict[str, Any] = {}

    @functools.wraps(original)
    def patch_lang(fn: Any) -> Any:
        if fn.__module__ not in scopes:
            scopes[fn.__module__] = type(original(fn))()  # a scope that has nothing to restore
        return scopes[fn.__module__]

    return patch_lang


def _cached_by_name(original: Callable) -> Callable:
    """``original`` of Triton's types, which can't all be hashed."""
    known: dict[str, Any] = {}

    @functools.wraps(original)
    def np_dtype(triton_type: Any) -> Any:
        if triton_type.name not in known:
            known[triton_type.name] = original(triton_type)
        return known[triton_type.name]

    return np_dtype


def _fp8_as_torch(original: Callable) -> Callable:
    """``original`` of any types but FP8 (e4m3), which widens as in torch, NaN too, and narrows as a GPU does: to the
    nearest, ties to even, 448 at most."""

    @functools.wraps(original)
    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        import torch
        from triton import language as tl

        kinds = {tl.float8e4nv: torch.float8_e4m3fn, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
        kinds[tl.float32] = torch.float32
        if tl.float8e4nv not in (source, target):
            return original(data, source, target, rounding)
        values = torch.from_numpy(data.copy()).view(kinds[source])
        if target == tl.float8e4nv:
            values = values.float().clamp(-448, 448)
        bits = getattr(torch, f"uint{target.primitive_bitwidth}")
        return values.to(kinds[target]).view(bits).numpy()

    return convert


def _widened(original: Callable) -> Callable:
    @functools.wraps(original)
    def buffer(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs).float()

    return buffer


def _gloo_all_to_all_single(_original: Callable) -> Callable:
    def all_to_all_single(self: Any, output: Any, input: Any) -> None:
        import torch.distributed

        if self.world_size == 1:
            output.copy_(input)
        else:
            torch.distributed.all_to_all_single(output, input, group=self.device_group)

    return all_to_all_single


def _flashinfer(name: str) -> Callable[[Any], Any]:
    def make(_original: Any) -> Any:
        return getattr(importlib.import_module("sglang_dcp_block.testing.flashinfer_torch"), name)

    return make


def _host_memory(normalize: Any) -> Any:
    return lambda kinds, expected_len: normalize(["DRAM"] * expected_len, expected_len)


def _cpu_factories(torch_module: Any) -> Any:
    return importlib.import_module("sglang_dcp_block.testing.flashinfer_torch").CpuFactories(torch_module)


def _host_copy(name: str) -> Callable[[Any], Any]:
    def make(_original: Any) -> Any:
        return getattr(importlib.import_module("sglang_dcp_block.testing.host_copies"), name)

    return make


def _deferred(original: Callable) -> Callable:
    return importlib.import_module("sglang_dcp_block.testing.host_copies").deferred(original)


def _done_when_asked_again(original: Callable) -> Callable:
    return importlib.import_module("sglang_dcp_block.testing.host_copies").done_when_asked_again(original)


def _unpinned(original: Callable) -> Any:
    return functools.partialmethod(original, pin_memory=False)


_INTERPRETER = "triton.runtime.interpreter"
_STATE = "sglang.srt.distributed.parallel_state"
_FLASHINFER_MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"
_FORWARD_MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha"
_MOONCAKE = "sglang.srt.disaggregation.mooncake.conn"
_NIXL = "sglang.srt.disaggregation.nixl.conn"
_POOL = "sglang.srt.mem_cache.memory_pool"
_HOST_POOL = "sglang.srt.mem_cache.pool_host.mla"
_CACHE_CONTROLLER = "sglang.srt.managers.cache_controller"

SHIMS: tuple[Shim, ...] = (
    Shim(
        "interpreter",
        _INTERPRETER,
        "_patch_lang",
        _patched_once,
        "it replaces all of triton.language at every call of a function inside a kernel: half of a kernel's time",
    ),
    Shim(
        "interpreter",
        _INTERPRETER,
        "_get_np_dtype",
        _cached_by_name,
        "it builds its table of types at every load, store and cast",
    ),
    Shim(
        "interpreter",
        _INTERPRETER,
        "_convert_float",
        _fp8_as_torch,
        "it narrows to FP8 by cutting bits off, and widens FP8's NaN to 480",
    ),
    *(
        Shim("wide", _POOL, f"MLATokenToKVPool.get_{side}_buffer", _widened, "WIDE_KV_VARIABLE asks for it")
        for side in ("key", "value")
    ),
    Shim(
        "interpreter",
        _INTERPRETER,
        "GridExecutor._restore_args_dev",
        _constant(lambda *_args: None),
        "it copies every argument's storage, such as the KV pool, back from host memory: here onto itself",
    ),
    Shim(
        "start",
        _STATE,
        "is_cuda",
        _constant(lambda: True),
        "initialize_model_parallel, the module's only caller, refuses DCP off CUDA, HIP, NPU and XPU",
    ),
    Shim(
        "start",
        _STATE,
        "_is_cpu",
        _constant(True),
        "collectives through torch.distributed: the custom ops have no CPU kernel",
    ),
    Shim(
        "start",
        _STATE,
        "GroupCoordinator.all_to_all_single",
        _gloo_all_to_all_single,
        "the a2a merge calls a custom op without asking for _is_cpu",
    ),
    Shim(
        "start",
        "sglang.srt.mem_cache.allocation",
        "_is_cuda",
        _constant(True),
        "_alloc_page_size, its only reader, widens the page under DCP on accelerators only",
    ),
    Shim(
        "start",
        "sglang.srt.model_executor.model_runner",
        "adjust_config_with_unaligned_cpu_tp",
        _kv_heads_as_on_a_gpu,
        "on a CPU a model with fewer KV heads than ranks gets heads of zeros; on a GPU ranks share a head",
    ),
    Shim(
        "model",
        _FORWARD_MHA,
        "DeepseekMHAForwardMixin._set_mla_kv_buffer",
        _with_cuda_branch,
        "other devices write through set_kv_buffer, which refuses DCP",
    ),
    Shim(
        "model",
        _FLASHINFER_MLA,
        "BatchMLAPagedAttentionWrapper",
        _flashinfer("BatchMLAPagedAttentionWrapper"),
        "FlashInfer needs a GPU",
        adds=True,
    ),
    Shim(
        "model",
        _FLASHINFER_MLA,
        "BatchPrefillWithRaggedKVCacheWrapper",
        _flashinfer("BatchPrefillWithRaggedKVCacheWrapper"),
        "FlashInfer needs a GPU",
        adds=True,
    ),
    Shim(
        "model",
        "sglang_dcp_block.attention.flashinfer_float16",
        "load_module",
        _flashinfer("load_module"),
        "FlashInfer needs a GPU",
    ),
    Shim(
        "model",
        _FLASHINFER_MLA,
        "torch",
        _cpu_factories,
        'the module says device="cuda" and pin_memory=True literally',
    ),
    Shim(
        "model",
        "sglang_dcp_block.attention.mla_decode",
        "_join_shape",
        _constant(lambda *_sizes: (4, 1, 4)),
        "the interpreter runs programs one after another: a GPU's 32 for each request and layer take seconds a token",
    ),
    Shim(
        "model",
        "sglang.srt.model_executor.forward_batch_info",
        "torch",
        _cpu_factories,
        "DP attention pins the ranks' token counts wherever the platform isn't SGLang's own CPU",
    ),
    Shim(
        "disaggregation",
        _MOONCAKE,
        "MooncakeKVSender.supports_host_tensor_indices",
        _constant(False),
        "the true branch pins host memory and records CUDA events; SGLang has a synchronous one",
    ),
    Shim(
        "disaggregation",
        _NIXL,
        "_normalize_kv_mem_kinds",
        _host_memory,
        "every pool is called device memory, and NIXL refuses to register that without a GPU",
    ),
    Shim(
        "hicache",
        _HOST_POOL,
        "MLATokenToKVPoolHost.__init__",
        _unpinned,
        "host memory is registered with CUDA",
    ),
    Shim(
        "hicache",
        "sglang.srt.mem_cache.pool_host.base",
        "HICACHE_HOST_MEMORY_RESERVE_BYTES",
        _constant(0),
        "10 GiB stay free for other processes, more than some machines have",
    ),
    Shim(
        "hicache",
        _HOST_POOL,
        "MLATokenToKVPoolHost.load_to_device_per_layer",
        _deferred,
        "a load is seen by those only who wait for it, as on a GPU",
    ),
    Shim("hicache", _CACHE_CONTROLLER, "LayerLoadingEvent.complete", _host_copy("complete"), "the same"),
    Shim("hicache", _CACHE_CONTROLLER, "LayerLoadingEvent.wait", _host_copy("wait"), "the same"),
    Shim(
        "hicache",
        "sglang.srt.mem_cache.unified_radix_cache",
        "UnifiedRadixCache.is_load_back_event_done",
        _done_when_asked_again,
        "the same, where a PD decode server asks instead of waiting",
    ),
    *(
        Shim("hicache", _HOST_POOL, name, _host_copy(name), "the copy kernels need a GPU", adds=True)
        for name in (
            "transfer_kv_direct",
            "transfer_kv_per_layer_direct_pf_lf",
            "transfer_kv_all_layer_direct_lf_pf",
            "transfer_kv_per_layer_mla",
            "transfer_kv_per_layer_mla_pf_lf",
            "transfer_kv_all_layer_mla",
            "transfer_kv_all_layer_mla_lf_pf",
        )
    ),
)


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class, or None when the test bed wasn't asked for."""
    return PLATFORM_CLASS if os.environ.get("SGLANG_PLATFORM") == NAME else None


def register() -> None:
    """Entry point ``sglang.srt.plugins``: the shims of the test bed, and on any platform a fault and the KV probe; each
    only when asked for."""
    if os.environ.get("SGLANG_PLATFORM") == NAME:
        install("interpreter")
        install("start")
        if os.environ.get(WIDE_KV_VARIABLE):
            install("wide")
    if fault := os.environ.get(SABOTAGE_VARIABLE):
        logger.error("%s=%s: this server breaks its KV layout on purpose; unset it", SABOTAGE_VARIABLE, fault)
        importlib.import_module("sglang_dcp_block.testing.sabotage").FAULTS[fault]()
    if os.environ.get(AUDIT_VARIABLE):
        importlib.import_module("sglang_dcp_block.testing.probe").install(os.environ[AUDIT_VARIABLE])


_installed: set[str] = set()


def install(when: str) -> None:
    """Apply the shims of one moment, once. A missing target stops the process: half a test bed proves nothing."""
    if when in _installed:
        return
    _installed.add(when)
    for shim in SHIMS:
        if shim.when != when:
            continue
        owner: Any = importlib.import_module(shim.module)
        *path, name = shim.attribute.split(".")
        try:
            for part in path:
                owner = getattr(owner, part)
            original = None if shim.adds else getattr(owner, name)
        except AttributeError as error:
            raise SystemExit(f"CPU test bed: {shim.module} has no {shim.attribute}; it knows sglang 0.5.23") from error
        setattr(owner, name, shim.make(original))
