"""Everything this package changes in SGLang, in one table, and when each change is installed.

SGLang's plugin loader calls :func:`register` in every server process. Launch hooks go in at once. A scheduler process
installs the rest, strictly, when its ``Scheduler`` is built: before any KV pool exists and after the settings are
final. See :mod:`sglang_dcp_block.hooks` for what "strictly" means.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dcp_block import __version__, hooks, metrics, runtime, server_args
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.common import COMMON_HOOKS, COMMON_SCOPES
from sglang_dcp_block.disaggregation.mooncake import MOONCAKE_HOOKS, MOONCAKE_SCOPES
from sglang_dcp_block.disaggregation.nixl import NIXL_HOOKS, NIXL_SCOPES
from sglang_dcp_block.disaggregation.placement import PLACEMENT_HOOKS, PLACEMENT_SCOPES
from sglang_dcp_block.hooks import Hook, HookError
from sglang_dcp_block.mem_cache.allocator import take_any_page_size

logger = logging.getLogger(__name__)

SGLANG_VERSION = "0.5.23"
_ADVICE = f"install sglang=={SGLANG_VERSION}, which sglang-dcp-block {__version__} is written for"


@dataclass(frozen=True)
class Setup:
    """What decides which hooks a scheduler process needs."""

    layout: DcpLayout
    backend: str
    is_mla: bool
    disaggregation_mode: str
    transfer_backend: str

    @property
    def _dcp_mla(self) -> bool:
        return self.layout.dcp_size > 1 and self.is_mla

    @property
    def triton(self) -> bool:
        """Triton MLA under DCP, which SGLang does not wire at all, not even at B = 1."""
        return self._dcp_mla and self.backend == "triton"

    @property
    def mla(self) -> bool:
        """A layout other than SGLang's own, or a backend that we wire: the rule comes from layout.py everywhere."""
        return self._dcp_mla and (self.layout.block_size > 1 or self.backend == "triton")

    @property
    def gqa(self) -> bool:
        """Grouped queries with blocks; token round-robin is SGLang's own."""
        return self.layout.dcp_size > 1 and self.layout.block_size > 1 and not self.is_mla

    @property
    def flashinfer_block(self) -> bool:
        return self._dcp_mla and self.layout.block_size > 1 and self.backend == "flashinfer"


#: When a hook is installed. "launch", "engine", "controller" and "scheduler" need no settings; see register().
SCOPES: dict[str, str | Callable[[Setup], bool]] = {
    "launch": "every process, when the plugin loads",
    "engine": "the launcher, once its engine module is loaded",
    "controller": "the controller of data-parallel ranks, when the plugin loads",
    "scheduler": "scheduler processes, when the plugin loads",
    "block": lambda s: s.mla or s.gqa,
    "mla": lambda s: s.mla,
    "triton": lambda s: s.triton or s.gqa,
    "triton_mla": lambda s: s.triton,
    "gqa": lambda s: s.gqa,
    "flashinfer": lambda s: s.flashinfer_block,
    **COMMON_SCOPES,
    **PLACEMENT_SCOPES,
    **MOONCAKE_SCOPES,
    **NIXL_SCOPES,
}

_US = "sglang_dcp_block"
HOOKS: tuple[Hook, ...] = (
    # -- the flag and its way into every process
    Hook(
        "sglang.srt.server_args:ServerArgs.add_cli_args",
        f"{_US}.server_args:add_cli_args",
        "around",
        "8d5f9b207365f5ba",
        "launch",
        "the command line and --config know no --dcp-block-size",
        "test/unit/test_server_args.py",
    ),
    Hook(
        "sglang.srt.server_args:ServerArgs.from_cli_args",
        f"{_US}.server_args:from_cli_args",
        "around",
        "32152825e268b6da",
        "launch",
        "the parsed block size is dropped with every other non-field",
        "test/unit/test_server_args.py",
    ),
    Hook(
        "sglang.srt.plugins:load_plugins",
        f"{_US}.plugin:load_plugins",
        "around",
        "cd2a423a31293f61",
        "launch",
        "modules that load after the plugin (engine, scheduler) stay unhooked",
        "test/unit/test_plugin.py",
    ),
    Hook(
        "sglang.srt.entrypoints.engine:_wait_for_scheduler_ready",
        f"{_US}.plugin:wait_for_scheduler_ready",
        "around",
        "dcb661fedfdafb11",
        "engine",
        "a scheduler that came up without the layout is not noticed",
        "test/unit/test_plugin.py",
    ),
    Hook(
        "sglang.srt.managers.data_parallel_controller:DataParallelController.get_init_info",
        f"{_US}.plugin:controller_init_info",
        "around",
        "431256a7b754a65c",
        "controller",
        "a launcher of data-parallel ranks hears no layout from them and stops",
        "test/unit/test_plugin.py",
    ),
    Hook(
        "sglang.srt.managers.scheduler:Scheduler.__init__",
        f"{_US}.plugin:scheduler_init",
        "around",
        "a4a5297acc175a1e",
        "scheduler",
        "no scheduler process installs anything",
        "test/unit/test_plugin.py",
    ),
    Hook(
        "sglang.srt.distributed.bootstrap:init_parallel_runtime",
        f"{_US}.plugin:init_parallel_runtime",
        "around",
        "860ad71010617a1f",
        "scheduler",
        "ranks with different block sizes are not noticed",
        "test/unit/test_plugin.py",
    ),
    Hook(
        "sglang.srt.managers.scheduler:Scheduler.get_init_info",
        f"{_US}.plugin:get_init_info",
        "around",
        "0e69b8b6bf4cb3ac",
        "scheduler",
        "/server_info does not name the layout",
        "test/engine/test_serve.py",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.report_decode_stats",
        f"{_US}.metrics:report_decode_stats",
        "around",
        "941922d64418a787",
        "block",
        "the rows-per-rank and empty-shard gauges stand still",
        "test/unit/test_cli_metrics.py",
    ),
    # -- lengths and ids
    Hook(
        "sglang.srt.layers.dcp.layout:get_dcp_lens",
        f"{_US}.dcp_hooks:get_dcp_lens",
        "replace",
        "773542cad6e1e3e7",
        "block",
        "local lengths are those of token round-robin",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator.translate_dcp_read_ids",
        f"{_US}.dcp_hooks:translate_dcp_read_ids",
        "around",
        "643764646bc48608",
        "mla",
        "a widened slot is read from the row of token round-robin",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.dcp.layout:maybe_dcp_kernel_indices",
        f"{_US}.dcp_hooks:maybe_dcp_kernel_indices",
        "replace",
        "d8edfc7e85ab756c",
        "mla",
        "a PD decode server's retracted KV is copied from and to the wrong rows",
        "test/unit/test_host_tiers.py",
    ),
    Hook(
        "sglang.srt.managers.cache_controller:HiCacheController._generate_storage_config",
        f"{_US}.mem_cache.storage_key:storage_config",
        "around",
        "0c07af4c9973c70a",
        "mla",
        "pages that were stored under another block size are found, and their rows lie where other tokens belong",
        "test/engine/test_hicache.py",
    ),
    Hook(
        "sglang.kernels.ops.kvcache.mla_buffer:set_mla_kv_buffer_dcp_sharded_triton",
        f"{_US}.dcp_hooks:set_mla_kv_buffer",
        "replace",
        "f6ce30bce64fb057",
        "mla",
        "KV is written by the owner of token round-robin",
        "test/engine/test_matrix.py",
    ),
    # -- extend with a prefix
    Hook(
        "sglang.srt.layers.dcp.planner:prepare_decode_context_parallel_metadata",
        f"{_US}.dcp_hooks:prepare_extend_metadata",
        "around",
        "1553dc3116789f7b",
        "mla",
        "an extend selects its prefix rows by stride over the whole batch",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.dcp.comm:all_gather_kv_cache_for_dcp",
        f"{_US}.dcp_hooks:all_gather_kv_cache",
        "replace",
        "188e4f90ac69fa2a",
        "mla",
        "the gathered prefix is put in token round-robin order",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.dcp.layout:filter_dcp_local_chunk_kv_indices",
        f"{_US}.dcp_hooks:filter_chunk_kv_indices",
        "replace",
        "22103aba2a5b2562",
        "mla",
        "a prefix chunk's rows are selected by stride",
        "test/engine/test_matrix.py",
    ),
    # -- FlashInfer-MLA
    Hook(
        "sglang.srt.layers.dcp.planner:plan_dcp_decode_metadata",
        f"{_US}.attention.flashinfer_mla:plan_decode_metadata",
        "replace",
        "b732f0c406d50eb6",
        "flashinfer",
        "decode attends to the tokens of token round-robin",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.flashinfer_mla_backend:FlashInferMLAAttnBackend.forward_decode",
        f"{_US}.attention.flashinfer_mla:forward_decode",
        "around",
        "6de92c208798db37",
        "flashinfer",
        "what a kernel leaves behind for an empty shard reaches the merge",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.flashinfer_mla_backend:FlashInferMLAIndicesUpdaterDecode.call_begin_forward",
        f"{_US}.attention.flashinfer_mla:call_begin_forward",
        "around",
        "ace578e36bb140e5",
        "flashinfer",
        "partial results are rounded to bfloat16 before the merge",
        "test/engine/test_controls.py",
    ),
    # -- the merge of MLA decode
    Hook(
        "sglang.kernels.ops.attention.dcp_kernels:dcp_lse_combine_triton",
        f"{_US}.attention.partials:lse_combine",
        "around",
        "ffcbc10cdcd0bf0e",
        "mla",
        "the layer behind the merge gets float16",
        "test/engine/test_controls.py",
    ),
    Hook(
        "sglang.srt.layers.dcp.comm:cp_lse_ag_out_rs_mla",
        f"{_US}.attention.partials:gather_lse_reduce_scatter",
        "around",
        "63f790d7f47ad2d0",
        "mla",
        "the layer behind the merge gets float16 or float32",
        "test/engine/test_controls.py",
    ),
    # -- Triton MLA
    Hook(
        "sglang.srt.models.deepseek_common.utils:FORWARD_ABSORB_CORE_ATTENTION_BACKENDS",
        "triton",
        "add",
        "9056ffb518064c99",
        "triton_mla",
        "the model hands Triton its own heads only and expects no LSE",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:is_mla_dcp_lse_base_on_e",
        f"{_US}.attention.triton_mla:lse_is_base_e",
        "around",
        "efb9475816722dff",
        "triton_mla",
        "the merge takes Triton's natural-log LSE for base 2",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._dcp_kv_indices",
        f"{_US}.attention.triton_mla:shard_kv_indices",
        "replace",
        "1d0aa634843b5bfd",
        "triton",
        "decode attends to the tokens of token round-robin",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.get_num_kv_splits",
        f"{_US}.attention.triton_mla:plan_decode",
        "around",
        "b9e07504416077c9",
        "triton_mla",
        "decode has no plan of its pieces",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.forward_decode",
        f"{_US}.attention.triton_mla:forward_decode",
        "around",
        "d2e7c06f83565a7b",
        "triton_mla",
        "MLA decode stops at MLATokenToKVPool.set_kv_buffer",
        "test/engine/test_matrix.py",
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend.forward_extend",
        f"{_US}.attention.triton_mla:forward_extend",
        "around",
        "f6f5f46fc397d1f5",
        "triton_mla",
        "prefill pairs query heads with 1/P of the key heads, without an error",
        "test/engine/test_matrix.py",
    ),
    # -- Triton GQA
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._set_kv_buffer",
        f"{_US}.attention.triton_gqa:set_kv_buffer",
        "replace",
        "5a9040272919d608",
        "gqa",
        "KV is written by the owner of token round-robin",
        "test/engine/test_gqa.py",
    ),
    Hook(
        "sglang.srt.layers.attention.triton_backend:TritonAttnBackend._forward_extend_dcp",
        f"{_US}.attention.triton_gqa:forward_extend_dcp",
        "around",
        "f7870699fe6d9b4f",
        "gqa",
        "ranks with rows of a prefix wait forever for a rank without",
        "test/engine/test_gqa.py",
    ),
    # -- P->D: both backends, Mooncake, NIXL
    *COMMON_HOOKS,
    *PLACEMENT_HOOKS,
    *MOONCAKE_HOOKS,
    *NIXL_HOOKS,
)


def hooks_for(setup: Setup) -> list[Hook]:
    """Rows of the table that a scheduler process with this setup installs when its Scheduler is built."""
    return [h for h in HOOKS if callable(scope := SCOPES[h.scope]) and scope(setup)]


def _in_scope(scope: str) -> list[Hook]:
    return [h for h in HOOKS if h.scope == scope]


def setup_of(record: Any) -> Setup:
    """Setup of a resolved ``ServerArgs`` record."""
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg = resolving_view(record)
    return Setup(
        layout=server_args.layout_of(record),
        backend=cfg.decode_attention_backend or cfg.attention_backend,
        is_mla=cfg.dcp_size > 1 and model_config_of(record).attention_arch.name == "MLA",
        disaggregation_mode=cfg.disaggregation_mode,
        transfer_backend=cfg.disaggregation_transfer_backend,
    )


def layout_record(layout: DcpLayout, page_size: int) -> dict[str, Any]:
    """What peers compare and people read: /server_info's ``dcp_layout``."""
    rule: tuple[object, ...] = (layout.dcp_size, layout.block_size, page_size, layout.virtual_page_size(page_size))
    name = "token_round_robin" if layout.block_size == 1 else "block_round_robin"
    if layout.is_rotated:
        rule, name = (*rule, "rotated"), f"rotated_{name}"
    return {
        "rule": name,
        "dcp_size": layout.dcp_size,
        "block_size": layout.block_size,
        "page_size": page_size,
        "virtual_page_size": layout.virtual_page_size(page_size),
        "plugin_version": __version__,
        "hash": hashlib.sha256(repr((rule, __version__)).encode()).hexdigest()[:16],
    }


# -- registration ------------------------------------------------------------------------------------------------------

_registered = False


def register() -> None:
    """Entry point in group ``sglang.srt.plugins``; safe to call again.

    Raises:
        HookError: SGLang is not what this package is written for. It is a ``SystemExit``, because SGLang's loader
            logs any other exception and starts a server without the plugin.
    """
    global _registered
    try:
        if not _registered:
            import sglang
            from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

            if sglang.__version__ != SGLANG_VERSION:
                raise HookError(f"sglang-dcp-block: sglang {sglang.__version__} is installed; {_ADVICE}.")
            hooks.install(_in_scope("launch"), _ADVICE)
            # Runs twice; the last time is the end of resolution, when backend and page size are final.
            register_resolution_hook("handle_kv_cache_sharding")(server_args.resolve)
            _registered = True
        _register_late()
    except Exception as error:
        raise HookError(
            f"sglang-dcp-block could not be set up ({type(error).__name__}: {error}); {_ADVICE}."
        ) from error


def _register_late() -> None:
    """Hook modules that must not be imported for their own sake: doing so has side effects in a launcher."""
    if engine := sys.modules.get("sglang.srt.entrypoints.engine"):
        hooks.install(_in_scope("engine"), _ADVICE)
        if not isinstance(engine.Engine.server_args_class, server_args.EngineServerArgs):
            engine.Engine.server_args_class = server_args.EngineServerArgs(engine.Engine.server_args_class)
    if "sglang.srt.managers.data_parallel_controller" in sys.modules:
        hooks.install(_in_scope("controller"), _ADVICE)
    if "sglang.srt.managers.scheduler" in sys.modules:
        hooks.install(_in_scope("scheduler"), _ADVICE)


def load_plugins(original: Callable[[], None]) -> None:
    original()
    register()


# -- hooks of the scheduler process ------------------------------------------------------------------------------------


def scheduler_init(original: Callable[..., None], scheduler: Any, record: Any, *args: Any, **kwargs: Any) -> None:
    setup = setup_of(record)
    wanted = hooks_for(setup)
    if wanted:
        runtime.activate(setup.layout)
        hooks.install(wanted, _ADVICE)
    original(scheduler, record, *args, **kwargs)
    # Attention backends and models were imported in between.
    hooks.verify()
    if wanted:
        allocator = scheduler.token_to_kv_pool_allocator
        check_virtual_page(setup.layout, scheduler.page_size, allocator.page_size)
        pool = allocator.get_kvcache()
        check_kv_dtype(setup.layout, pool.dtype)
        if setup.gqa:
            check_gqa_pool(pool, scheduler.model_config.dtype)
        if setup.gqa or pool.dtype.itemsize == 1:
            check_kv_scales(setup.layout, scheduler.tp_worker.model_runner.model, setup.is_mla)
        take_any_page_size(allocator)
        metrics.start_for_scheduler(scheduler)
        described = layout_record(setup.layout, scheduler.page_size)
        logger.info("DCP layout in force: %s, %d hooks", json.dumps(described), len(wanted))
        logger.info("DCP tail: %s", tail_text(setup.layout, scheduler.page_size, allocator.size))


def check_virtual_page(layout: DcpLayout, page_size: int, allocator_page: int) -> None:
    """Slots obey the rule of positions only if the allocator hands them out in whole virtual pages of the layout.

    Raises:
        HookError: it does not; the message has both sizes.
    """
    wanted = layout.virtual_page_size(page_size)
    if allocator_page != wanted:
        raise HookError(
            f"sglang-dcp-block: the allocator's pages have {allocator_page} slots, but {layout} with --page-size "
            f"{page_size} needs {wanted}: start without what changes the allocator."
        )


def check_kv_dtype(layout: DcpLayout, dtype: Any) -> None:
    """A quantized checkpoint may name the dtype of its KV, and --kv-cache-dtype auto follows it.

    Args:
        dtype: of the KV pool, a torch.dtype.

    Raises:
        HookError: it is not tested with blocks.
    """
    name = str(dtype).removeprefix("torch.")
    if layout.block_size > 1 and name not in server_args.TESTED_POOL_DTYPES:
        raise HookError(
            f"sglang-dcp-block: the checkpoint asks for a {name} KV cache, which {server_args.FLAG} "
            f"{layout.block_size} is not tested with: use --kv-cache-dtype bfloat16."
        )


def check_gqa_pool(pool: Any, model_dtype: Any) -> None:
    """Keys and values are written as they are computed, each token a row of SGLang's plain pool.

    Args:
        pool: the server's KV pool. model_dtype: of the activations, a torch.dtype.

    Raises:
        HookError: another kind of pool (sliding window, hybrid), another order of its elements, or another dtype.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise HookError(
            f"sglang-dcp-block: {server_args.FLAG} is not tested with a {type(pool).__name__} in layout "
            f"{pool.kv_cache_layout}: unset SGLANG_USE_HND_KVCACHE and what else changes the KV pool."
        )
    if pool.dtype != model_dtype:
        raise HookError(
            f"sglang-dcp-block: {server_args.FLAG} is not tested with a {pool.dtype} KV cache of a grouped-query model "
            f"in {model_dtype}: give the KV cache the model's own dtype with --kv-cache-dtype."
        )


def check_kv_scales(layout: DcpLayout, model: Any, is_mla: bool) -> None:
    """Rows are stored and read as the model computed them: the writes under DCP take no scale.

    With grouped queries SGLang's Triton kernels multiply by a layer's scales whatever the pool's dtype; 16-bit MLA rows
    are read without.

    Args:
        model: a torch.nn.Module. SGLang's FP8 checkpoints leave ``k_scale_float`` and ``v_scale_float`` on its layers.

    Raises:
        HookError: a scale of the checkpoint is not 1.
    """
    for name, layer in model.named_modules():
        scales: set[Any] = {getattr(layer, side, None) for side in ("k_scale_float", "v_scale_float")} - {None, 1.0}
        if layout.block_size > 1 and scales:
            remedy = "--kv-cache-dtype bfloat16" if is_mla else "a checkpoint without KV scales"
            raise HookError(
                f"sglang-dcp-block: the checkpoint scales its FP8 KV by {max(scales):g} in {name}, which "
                f"{server_args.FLAG} {layout.block_size} is not tested with: use {remedy}."
            )


def tail_text(layout: DcpLayout, page_size: int, slots: int) -> str:
    """What whole virtual pages cost in a pool of ``slots``, in one sentence for the start log."""
    page = layout.virtual_page_size(page_size)
    worst = layout.unused_slots(1, page_size)
    return (
        f"every request takes whole virtual pages of {page:,} slots and leaves up to {worst:,} of them unused, "
        f"so {slots:,} slots hold at most {slots // page:,} requests at once."
    )


def init_parallel_runtime(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.attn_dcp_size > 1:
        record = kwargs.get("server_args", args[0] if args else None)
        check_same_layout(server_args.config_of(record), parallel.dcp_group)
    return result


def check_same_layout(config: server_args.DcpBlockConfig, group: Any) -> None:
    """Compare the flags and the plugin version over the DCP group.

    Raises:
        HookError: some rank has another; the message lists them by rank.
    """
    rotated = " rotated" if config.rotate else ""
    mine = f"block size {config.block_size}{rotated} (plugin {__version__})"
    everyone = runtime.of_every_rank(mine, group)
    if any(other != mine for other in everyone):
        listing = ", ".join(f"rank {rank}: {flags}" for rank, flags in enumerate(everyone))
        raise HookError(f"sglang-dcp-block: the DCP ranks don't share one layout ({listing}): start all with one flag.")


def get_init_info(original: Callable[..., dict[str, Any]], scheduler: Any) -> dict[str, Any]:
    info = original(scheduler)
    layout = server_args.layout_of(scheduler.server_args)
    info["dcp_block_size"] = layout.block_size
    info["dcp_layout"] = layout_record(layout, scheduler.page_size)
    return info


# -- hooks of the launcher ---------------------------------------------------------------------------------------------


def wait_for_scheduler_ready(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    infos = original(*args, **kwargs)
    _check_reports(infos)
    return infos


def controller_init_info(original: Callable[..., dict[str, Any]], controller: Any) -> dict[str, Any]:
    """SGLang's controller picks what it passes on to the launcher; the layout of its schedulers goes along."""
    infos = controller._scheduler_init_infos
    _check_reports(infos)
    return original(controller) | {key: infos[0][key] for key in ("dcp_block_size", "dcp_layout")}


def _check_reports(infos: list[dict[str, Any]]) -> None:
    layouts = [info.get("dcp_layout") for info in infos]
    if any(layout is None or layout != layouts[0] for layout in layouts):
        raise HookError(
            f"sglang-dcp-block: the scheduler processes report different layouts ({layouts}): "
            "install the plugin for every process."
        )
