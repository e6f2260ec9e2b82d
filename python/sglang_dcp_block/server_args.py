"""``--dcp-block-size`` and ``--dcp-rotate``: the flags, what they are refused with, and how they reach every process.

SGLang's ``ServerArgs`` is sealed, so the values travel beside its fields, in an object of this package's own class.
A process that unpickles the arguments without this package fails at once instead of running token round-robin.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dcp_block import __version__
from sglang_dcp_block.dcp.layout import DcpLayout

logger = logging.getLogger(__name__)

FLAG = "--dcp-block-size"
ROTATE_FLAG = "--dcp-rotate"
_ATTRIBUTE = "_dcp_block"

#: Architectures whose KV this project has checked row by row under a block layout.
TESTED_ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
#: The same of grouped-query attention, which runs on the Triton backend only.
TESTED_GQA_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
TESTED_BACKENDS = ("flashinfer", "triton")
TESTED_KV_DTYPES = ("auto", "bfloat16", "bf16", "fp8_e4m3")
#: What "auto" may become: the checkpoint decides, and only the pool knows.
TESTED_POOL_DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn")
TESTED_COMM_BACKENDS = ("a2a", "ag_rs")
TESTED_TRANSFER_BACKENDS = ("mooncake", "nixl")
#: (--hicache-io-backend, --hicache-mem-layout), as SGLang resolves them.
TESTED_HOST_COPIES = (
    ("kernel", "page_first"),
    ("kernel", "layer_first"),
    ("direct", "layer_first"),
    ("direct", "page_first_direct"),
)
TESTED_STORAGE_BACKENDS = ("file",)


class DcpBlockError(ValueError):
    """The layout and another setting don't fit; the message says what to change."""


@dataclass(frozen=True)
class DcpBlockConfig:
    """The flags on their way to another process. Unpickling them arms the plugin there."""

    block_size: int
    rotate: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.block_size, self.rotate, __version__)


def _rebuild(block_size: int, rotate: bool, version: str) -> DcpBlockConfig:
    if version != __version__:
        raise DcpBlockError(
            f"the launcher runs sglang-dcp-block {version} but this process has {__version__}: install one version."
        )
    # SGLang's loader may be told to skip this plugin (SGLANG_PLUGINS); a process that is handed a block size needs it.
    from sglang_dcp_block import plugin

    plugin.register()
    return DcpBlockConfig(block_size, rotate)


# -- the value ---------------------------------------------------------------------------------------------------------


def parse_block_size(text: Any) -> int:
    """``--dcp-block-size`` as an int >= 1.

    Raises:
        DcpBlockError: it is not one; argparse prints the message.
    """
    try:
        value = int(text)
    except (TypeError, ValueError):
        value = 0
    if value < 1 or isinstance(text, (bool, float)):
        raise DcpBlockError(f"{FLAG} must be a whole number of tokens >= 1, got {text!r}.")
    return value


def _argparse_block_size(text: str) -> int:
    try:
        return parse_block_size(text)
    except DcpBlockError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def attach(server_args: Any, block_size: Any, rotate: bool = False) -> Any:
    """Put the flags on a ``ServerArgs`` record (a block size of 1 leaves it untouched) and return the record.

    Raises:
        DcpBlockError: a value is not of its kind, or rotation is asked for without blocks.
    """
    block_size = parse_block_size(block_size)
    if not isinstance(rotate, bool):
        raise DcpBlockError(f"{ROTATE_FLAG} must be true or false, got {rotate!r}.")
    if rotate and block_size == 1:
        raise DcpBlockError(
            f"{ROTATE_FLAG} needs blocks, because token round-robin gives no rank more than one row of a request more "
            f"than another: add {FLAG}, or drop {ROTATE_FLAG}."
        )
    if block_size > 1:
        setattr(server_args, _ATTRIBUTE, DcpBlockConfig(block_size, rotate))
    return server_args


def config_of(server_args: Any) -> DcpBlockConfig:
    """Flags of a ``ServerArgs`` record; a block size of 1 where none was given."""
    return getattr(server_args, _ATTRIBUTE, None) or DcpBlockConfig(1)


def block_size_of(server_args: Any) -> int:
    return config_of(server_args).block_size


def layout_of(server_args: Any) -> DcpLayout:
    """Layout a resolved ``ServerArgs`` record asks for."""
    from sglang.srt.arg_groups.overrides import resolving_view

    cfg, config = resolving_view(server_args), config_of(server_args)
    layout = DcpLayout(cfg.dcp_size, config.block_size)
    return layout.rotated(cfg.page_size) if config.rotate else layout


# -- hooks of the launch (rows in plugin.HOOKS) ------------------------------------------------------------------------


def add_cli_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    original(parser)
    parser.add_argument(
        FLAG,
        type=_argparse_block_size,
        default=1,
        metavar="TOKENS",
        help="Decode context parallelism gives each rank blocks of this many consecutive tokens in turn "
        "(1 = SGLang's token round-robin). A --page-size that it does not divide is raised to the least common "
        "multiple of both. (sglang-dcp-block)",
    )
    parser.add_argument(
        ROTATE_FLAG,
        action="store_true",
        help="Begin each virtual page of KV at another rank, so that many short requests don't all put their first "
        "block on rank 0. Needs --dcp-block-size and --attention-backend triton. (sglang-dcp-block)",
    )


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    return attach(original(cls, args), getattr(args, "dcp_block_size", 1), getattr(args, "dcp_rotate", False))


class EngineServerArgs:
    """Stands in for ``Engine.server_args_class``: takes our flags beside the fields of ``ServerArgs``."""

    def __init__(self, server_args_class: type) -> None:
        self._class = server_args_class

    def __call__(self, *, dcp_block_size: Any = 1, dcp_rotate: bool = False, **kwargs: Any) -> Any:
        return attach(self._class(**kwargs), dcp_block_size, dcp_rotate)


# -- what is refused ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """What the refusals look at: resolved settings, the model, and our flags."""

    cfg: Any
    model: Any
    block_size: int
    rotate: bool = False

    @property
    def backends(self) -> set[str]:
        cfg = self.cfg
        chosen = (cfg.prefill_attention_backend, cfg.decode_attention_backend)
        return {name or cfg.attention_backend for name in chosen}

    @property
    def transfer_backend(self) -> str | None:
        """Of a PD server, None for another."""
        return None if self.cfg.disaggregation_mode in (None, "null") else self.cfg.disaggregation_transfer_backend

    @property
    def page_size(self) -> int:
        """--page-size raised to whole blocks: the page that the server runs with."""
        return DcpLayout(self.cfg.dcp_size, self.block_size).rows_per_virtual_page(self.cfg.page_size)

    @property
    def chunked_prefill_size(self) -> int | None:
        """Tokens of a prefill chunk as given, or None where nothing is cut into chunks."""
        size = self.cfg.chunked_prefill_size
        return size if size and size > 0 and self.cfg.disaggregation_mode != "decode" else None


@dataclass(frozen=True)
class Refusal:
    """One combination that does not start with B > 1.

    Attributes:
        id: anchor in docs/troubleshooting.md. feature: its name in docs/support.md.
        applies: whether a launch asks for it. message: one sentence; ``{...}`` are filled from ``values``.
    """

    id: str
    feature: str
    applies: Callable[[Launch], bool]
    message: str
    values: Callable[[Launch], dict[str, Any]] = lambda launch: {}

    def text(self, launch: Launch) -> str:
        return self.message.format(B=launch.block_size, P=launch.cfg.dcp_size, **self.values(launch))


def _flag(id: str, name: str, feature: str) -> Refusal:
    """A boolean or optional setting that is untested with a block layout."""
    option = "--" + name.replace("_", "-")
    return Refusal(
        id,
        feature,
        lambda launch: getattr(launch.cfg, name) not in (None, False, "none", "null"),
        f"{FLAG} {{B}} is not tested with {option}: drop {option}, or drop {FLAG}.",
    )


def _gqa(
    id: str, feature: str, applies: Callable[[Launch], bool], message: str, values: Callable[[Launch], dict[str, Any]]
) -> Refusal:
    """Something that can't be right, or is not tested, with grouped-query attention."""
    return Refusal(f"gqa-{id}", feature, lambda launch: not _is_mla(launch) and applies(launch), message, values)


def _rotation(id: str, feature: str, applies: Callable[[Launch], bool], cause: str, todo: str) -> Refusal:
    """Something that can't be right, or is not tested, where pages begin at other ranks."""
    message = f"{ROTATE_FLAG} {cause}: {todo}, or drop {ROTATE_FLAG}."
    return Refusal(
        f"rotate-{id}", f"{feature}, with {ROTATE_FLAG}", lambda launch: launch.rotate and applies(launch), message
    )


def _heads(launch: Launch) -> int:
    return launch.model.num_attention_heads


def _text_config(launch: Launch) -> Any:
    return launch.model.hf_text_config


def _is_mla(launch: Launch) -> bool:
    return launch.model.attention_arch.name == "MLA"


def _tested_architectures(launch: Launch) -> tuple[str, ...]:
    return TESTED_ARCHITECTURES if _is_mla(launch) else TESTED_GQA_ARCHITECTURES


def _kv_heads(launch: Launch) -> int:
    return launch.model.get_total_num_kv_heads()


def _window(launch: Launch) -> int | None:
    """Tokens that a layer attends to at most, None without such a bound."""
    return launch.model.sliding_window_size or launch.model.attention_chunk_size


def _has_dp_attention(launch: Launch) -> bool:
    return (launch.cfg.attn_dp_size or 1) > 1


def _has_fp8_kv(launch: Launch) -> bool:
    return launch.cfg.kv_cache_dtype.startswith("fp8")


def _has_hicache_on_pd(launch: Launch) -> bool:
    return bool(launch.cfg.enable_hierarchical_cache) and launch.transfer_backend is not None


def _architecture(launch: Launch) -> str:
    return (launch.model.hf_config.architectures or ["unknown"])[0]


def _platform() -> Any:
    from sglang.srt.platforms import current_platform

    return current_platform


def _untested_platform(launch: Launch) -> bool:
    platform = _platform()
    return not (platform.is_cuda() or getattr(platform, "dcp_block_testbed", False))


def _nixl_plugin() -> str:
    from sglang.srt.environ import envs

    return envs.SGLANG_DISAGGREGATION_NIXL_BACKEND.get()


REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        "block-without-dcp",
        "one rank (--dcp-size 1)",
        lambda launch: launch.cfg.dcp_size == 1,
        f"{FLAG} {{B}} needs more than one DCP rank: add --dcp-size, or drop {FLAG} "
        "(a PD prefill server needs no flag, it takes the block size from its decode peers).",
    ),
    Refusal(
        "chunk-below-page",
        "prefill chunks smaller than a page",
        lambda launch: (launch.chunked_prefill_size or launch.page_size) < launch.page_size,
        "--chunked-prefill-size leaves {chunk} tokens to a scheduler, less than a page of {page}, which {flag} {B} and "
        "--page-size {given} make: use --chunked-prefill-size {least} or more.",
        lambda launch: {
            "chunk": launch.chunked_prefill_size,
            "page": launch.page_size,
            "given": launch.cfg.page_size,
            # SGLang has divided the chunk among the DP attention groups by now.
            "least": launch.page_size * (launch.cfg.attn_dp_size or 1),
            "flag": FLAG,
        },
    ),
    Refusal(
        "dcp-not-dividing-tp",
        "DCP size that does not divide the TP size",
        lambda launch: launch.cfg.tp_size % launch.cfg.dcp_size != 0,
        "--dcp-size {P} must divide --tp-size {tp}: choose a divisor of {tp}.",
        lambda launch: {"tp": launch.cfg.tp_size},
    ),
    Refusal(
        "dcp-not-dividing-heads",
        "DCP size that does not divide the attention heads",
        lambda launch: _heads(launch) % launch.cfg.dcp_size != 0,
        "--dcp-size {P} must divide the model's {heads} attention heads: choose a divisor of {heads}.",
        lambda launch: {"heads": _heads(launch)},
    ),
    Refusal(
        "model-untested",
        "architectures other than DeepSeek-V2/V3 (Kimi-K2 is one of these), Kimi-K2.5, Llama, Qwen2 and Qwen3 "
        "(hybrid, mixture-of-experts GQA and multimodal models among them)",
        lambda launch: _architecture(launch) not in _tested_architectures(launch),
        f"{FLAG} {{B}} is not tested with {{arch}} (tested: "
        f"{', '.join((*TESTED_ARCHITECTURES, *TESTED_GQA_ARCHITECTURES))}): drop {FLAG}.",
        lambda launch: {"arch": _architecture(launch)},
    ),
    _gqa(
        "attention-backend",
        "grouped-query models on another attention backend than triton",
        lambda launch: launch.backends != {"triton"},
        f"{FLAG} {{B}} runs {{arch}} on the Triton backend only: use --attention-backend triton.",
        lambda launch: {"arch": _architecture(launch)},
    ),
    _gqa(
        "kv-heads",
        "grouped-query models whose DCP ranks would hold different KV heads",
        lambda launch: launch.cfg.tp_size % (_kv_heads(launch) * launch.cfg.dcp_size) != 0,
        "--dcp-size {P} with {heads} KV heads needs a --tp-size that is a multiple of {least}, so that the ranks of a "
        "DCP group hold the same KV heads, and --tp-size {tp} is none: raise --tp-size or lower --dcp-size.",
        lambda launch: {
            "heads": _kv_heads(launch),
            "least": _kv_heads(launch) * launch.cfg.dcp_size,
            "tp": launch.cfg.tp_size,
        },
    ),
    _gqa(
        "sliding-window",
        "grouped-query models with a sliding window or chunked attention",
        lambda launch: bool(_window(launch)),
        f"{FLAG} {{B}} is not tested with a grouped-query model that attends to a window of {{window}} tokens: "
        f"drop {FLAG}.",
        lambda launch: {"window": _window(launch)},
    ),
    _gqa(
        "fp8",
        "FP8 KV cache of grouped-query models",
        _has_fp8_kv,
        f"{FLAG} {{B}} is not tested with --kv-cache-dtype {{dtype}} and grouped-query attention: use auto.",
        lambda launch: {"dtype": launch.cfg.kv_cache_dtype},
    ),
    _gqa(
        "pd",
        "grouped-query models on a PD prefill or decode server",
        lambda launch: launch.transfer_backend is not None,
        f"{FLAG} {{B}} is not tested with {{arch}} on a PD {{mode}} server, which cuts KV between two layouts only for "
        f"multi-head latent attention (MLA): drop {FLAG}.",
        lambda launch: {"arch": _architecture(launch), "mode": launch.cfg.disaggregation_mode},
    ),
    _gqa(
        "dp-attention",
        "grouped-query models with DP attention",
        _has_dp_attention,
        f"{FLAG} {{B}} is not tested with {{arch}} and DP attention: use --attn-dp-size 1.",
        lambda launch: {"arch": _architecture(launch)},
    ),
    _gqa(
        "hicache",
        "grouped-query models with HiCache",
        lambda launch: bool(launch.cfg.enable_hierarchical_cache),
        f"{FLAG} {{B}} is not tested with {{arch}} and --enable-hierarchical-cache: drop --enable-hierarchical-cache.",
        lambda launch: {"arch": _architecture(launch)},
    ),
    Refusal(
        "model-sparse",
        "sparse attention (DeepSeek-V3.2 and others with an index_topk)",
        lambda launch: getattr(_text_config(launch), "index_topk", None) is not None,
        f"{FLAG} {{B}} is not tested with sparse attention, which this model's index_topk asks for: drop {FLAG}.",
    ),
    Refusal(
        "model-without-rope-part",
        "MLA models without a rotary part (qk_rope_head_dim 0)",
        lambda launch: _is_mla(launch) and getattr(_text_config(launch), "qk_rope_head_dim", 1) == 0,
        f"{FLAG} {{B}} does not support MLA with qk_rope_head_dim 0, whose KV write knows no DCP owner: drop {FLAG}.",
    ),
    Refusal(
        "attention-backend",
        "attention backends other than flashinfer and triton",
        lambda launch: not launch.backends <= set(TESTED_BACKENDS),
        f"{FLAG} {{B}} is not tested with attention backend {{backend}}: "
        "use --attention-backend flashinfer or --attention-backend triton.",
        lambda launch: {"backend": ", ".join(sorted(map(str, launch.backends - set(TESTED_BACKENDS))))},
    ),
    Refusal(
        "mixed-attention-backends",
        "different attention backends for prefill and decode",
        lambda launch: len(launch.backends) > 1,
        f"{FLAG} {{B}} is not tested with two attention backends ({{backends}}): give one --attention-backend.",
        lambda launch: {"backends": ", ".join(sorted(map(str, launch.backends)))},
    ),
    Refusal(
        "comm-backend",
        "DCP merge fi_a2a",
        lambda launch: launch.cfg.dcp_comm_backend not in TESTED_COMM_BACKENDS,
        f"{FLAG} {{B}} is not tested with --dcp-comm-backend {{comm}}: use a2a or ag_rs.",
        lambda launch: {"comm": launch.cfg.dcp_comm_backend},
    ),
    Refusal(
        "kv-cache-dtype",
        "KV cache in FP8 e5m2, MXFP8 and FP4",
        lambda launch: launch.cfg.kv_cache_dtype not in TESTED_KV_DTYPES,
        f"{FLAG} {{B}} is not tested with --kv-cache-dtype {{dtype}}: use auto, bfloat16 or fp8_e4m3.",
        lambda launch: {"dtype": launch.cfg.kv_cache_dtype},
    ),
    Refusal(
        "fp8-pairs",
        "FP8 KV cache with DP attention, or with HiCache on a PD server",
        lambda launch: _has_fp8_kv(launch) and (_has_dp_attention(launch) or _has_hicache_on_pd(launch)),
        f"{FLAG} {{B}} is not tested with --kv-cache-dtype {{dtype}} and {{other}}: use --kv-cache-dtype bfloat16.",
        lambda launch: {
            "dtype": launch.cfg.kv_cache_dtype,
            "other": "DP attention" if _has_dp_attention(launch) else "HiCache on a PD server",
        },
    ),
    Refusal(
        "dcp-beyond-dp-attention",
        "DCP groups that reach over several DP attention groups",
        lambda launch: launch.cfg.tp_size % (launch.cfg.dcp_size * (launch.cfg.attn_dp_size or 1)) != 0,
        "--attn-dp-size {dp} cuts --tp-size {tp} into groups that --dcp-size {P} does not divide: "
        "lower --dcp-size or --attn-dp-size.",
        lambda launch: {"dp": launch.cfg.attn_dp_size, "tp": launch.cfg.tp_size},
    ),
    Refusal(
        "context-parallel",
        "context parallelism of prefill",
        lambda launch: (launch.cfg.attn_cp_size or 1) > 1,
        f"{FLAG} {{B}} is not tested with --attn-cp-size {{cp}}: use --attn-cp-size 1.",
        lambda launch: {"cp": launch.cfg.attn_cp_size},
    ),
    Refusal(
        "data-parallel",
        "data-parallel replicas (--dp-size)",
        lambda launch: (launch.cfg.dp_size or 1) > 1,
        f"{FLAG} {{B}} is not tested with --dp-size {{dp}}: start one server per replica.",
        lambda launch: {"dp": launch.cfg.dp_size},
    ),
    Refusal(
        "pipeline-parallel",
        "pipeline parallelism",
        lambda launch: launch.cfg.pp_size > 1,
        f"{FLAG} {{B}} is not tested with --pp-size {{pp}}: use --pp-size 1.",
        lambda launch: {"pp": launch.cfg.pp_size},
    ),
    Refusal(
        "pd-transfer-backend",
        "PD transfer backends other than Mooncake and NIXL (Mori, Ascend)",
        lambda launch: launch.transfer_backend not in (None, *TESTED_TRANSFER_BACKENDS),
        f"{FLAG} {{B}} is not tested with --disaggregation-transfer-backend {{transfer}}: use mooncake or nixl.",
        lambda launch: {"transfer": launch.transfer_backend},
    ),
    Refusal(
        "nixl-missing",
        "NIXL without its Python package",
        lambda launch: launch.transfer_backend == "nixl" and importlib.util.find_spec("nixl") is None,
        "--disaggregation-transfer-backend nixl needs the package nixl, which is not installed: "
        "pip install 'sglang-dcp-block[nixl]', or use mooncake.",
    ),
    Refusal(
        "nixl-plugin",
        "NIXL plugins other than UCX (SGLANG_DISAGGREGATION_NIXL_BACKEND)",
        lambda launch: launch.transfer_backend == "nixl" and _nixl_plugin() != "UCX",
        f"{FLAG} {{B}} is not tested with SGLANG_DISAGGREGATION_NIXL_BACKEND={{plugin}}: unset it, which means UCX.",
        lambda launch: {"plugin": _nixl_plugin()},
    ),
    Refusal(
        "platform",
        "ROCm, Ascend, Intel and other platforms than CUDA",
        _untested_platform,
        f"{FLAG} {{B}} is tested on CUDA only, and this is {{platform}}: drop {FLAG}.",
        lambda launch: {"platform": _platform().device_name},
    ),
    _flag("speculative-decoding", "speculative_algorithm", "speculative decoding"),
    _flag("decoupled-speculation", "decoupled_spec_role", "speculative decoding in two servers"),
    _flag("disable-ragged", "flashinfer_mla_disable_ragged", "FlashInfer MLA prefill without its ragged kernel"),
    _flag("mixed-chunk", "enable_mixed_chunk", "mixed chunks"),
    Refusal(
        "hicache-copies",
        "HiCache with another pair of io backend and memory layout",
        lambda launch: (
            launch.cfg.enable_hierarchical_cache
            and (launch.cfg.hicache_io_backend, launch.cfg.hicache_mem_layout) not in TESTED_HOST_COPIES
        ),
        f"{FLAG} {{B}} is not tested with --hicache-io-backend {{io}} and --hicache-mem-layout {{layout}}: "
        "use kernel with page_first or layer_first, or direct with layer_first or page_first_direct.",
        lambda launch: {"io": launch.cfg.hicache_io_backend, "layout": launch.cfg.hicache_mem_layout},
    ),
    Refusal(
        "hicache-storage",
        "HiCache storage backends other than file",
        lambda launch: (
            launch.cfg.enable_hierarchical_cache
            and launch.cfg.hicache_storage_backend not in (None, *TESTED_STORAGE_BACKENDS)
        ),
        f"{FLAG} {{B}} is not tested with --hicache-storage-backend {{storage}}: use file, or host memory alone.",
        lambda launch: {"storage": launch.cfg.hicache_storage_backend},
    ),
    Refusal(
        "hicache-dp-attention",
        "HiCache with DP attention on a PD server",
        lambda launch: _has_hicache_on_pd(launch) and _has_dp_attention(launch),
        f"{FLAG} {{B}} is not tested with --enable-hierarchical-cache and DP attention on a PD {{mode}} server: "
        "drop --enable-hierarchical-cache.",
        lambda launch: {"mode": launch.cfg.disaggregation_mode},
    ),
    _flag("lmcache", "enable_lmcache", "LMCache"),
    _flag("flexkv", "enable_flexkv", "FlexKV"),
    _flag("external-linker", "enable_unified_cache_external_linker", "external cache linker"),
    _flag("hisparse", "enable_hisparse", "HiSparse"),
    _flag("unified-memory", "enable_unified_memory", "unified memory pool"),
    _flag("page-major", "enable_page_major_kv_layout", "page-major KV layout"),
    _flag("streaming-session", "enable_streaming_session", "streaming sessions"),
    _flag("session-radix-cache", "enable_session_radix_cache", "session radix cache"),
    _flag("radix-cache-backend", "radix_cache_backend", "other radix cache backends"),
    _flag("kv-checksum", "disaggregation_enable_kv_checksum", "KV checksums"),
    _flag("kv-canary", "kv_canary", "KV canary"),
    _flag("decode-offload", "disaggregation_decode_enable_offload_kvcache", "decode KV offload"),
    _flag("pd-role-switch", "enable_pd_role_switch", "PD role switch"),
    _flag("pdmux", "enable_pdmux", "PD multiplexing"),
    _flag("lora", "enable_lora", "LoRA"),
    _flag("two-batch-overlap", "enable_two_batch_overlap", "two-batch overlap"),
    _flag("single-batch-overlap", "enable_single_batch_overlap", "single-batch overlap"),
    _flag("torch-compile", "enable_torch_compile", "torch.compile"),
    _flag("symmetric-memory", "enable_symm_mem", "symmetric memory"),
    _flag("replicate-q-proj", "dcp_replicate_q_proj", "replicated query projection"),
    _flag("deterministic-inference", "enable_deterministic_inference", "deterministic inference"),
    _flag("megakernel", "enable_nvidia_megakernel", "NVIDIA megakernel"),
    _flag("elastic-ep", "elastic_ep_backend", "elastic expert parallelism"),
    _flag("ray", "use_ray", "Ray"),
    _rotation(
        "attention-backend",
        "attention backend flashinfer",
        lambda launch: launch.backends != {"triton"},
        "needs the last page of each request before a step, which FlashInfer's CUDA graphs would have to read from the "
        "device",
        "use --attention-backend triton",
    ),
    _rotation(
        "hicache",
        "HiCache",
        lambda launch: bool(launch.cfg.enable_hierarchical_cache),
        "can't take pages back from HiCache, which come back into pages that begin at another rank",
        "drop --enable-hierarchical-cache",
    ),
    _rotation(
        "retraction",
        "retracted requests of a PD decode server",
        lambda launch: (
            launch.cfg.disaggregation_mode == "decode" and launch.cfg.disaggregation_decode_retraction_backup != "none"
        ),
        "can't take back the KV of a request that a PD decode server has retracted, which comes back into pages that "
        "begin at another rank",
        "use --disaggregation-decode-retraction-backup none, which fails such requests for the client to retry",
    ),
    _rotation(
        "gqa",
        "grouped-query models",
        lambda launch: not _is_mla(launch),
        "is not tested with grouped-query models",
        "use a model with multi-head latent attention (MLA)",
    ),
    _rotation(
        "dp-attention",
        "DP attention",
        _has_dp_attention,
        "is not tested with DP attention",
        "use --attn-dp-size 1",
    ),
)


def refusals_for(launch: Launch) -> list[str]:
    """Messages of every refusal that applies, in the order of :data:`REFUSALS`."""
    # Later rows presuppose earlier ones (a page size, a divisor), so the caller shows the first.
    return [r.text(launch) for r in REFUSALS if launch.block_size > 1 and r.applies(launch)]


def whole_blocks(launch: Launch) -> dict[str, int]:
    """Settings that change so that a page, and with it a prefill chunk, is a whole number of blocks.

    SGLang's allocator, radix tree and KV events all take page_size * dcp_size for a virtual page. A page of
    lcm(page_size, B) tokens makes that the layout's, and kernels that take row ids don't care.
    """
    page, chunk = launch.page_size, launch.chunked_prefill_size
    if page == launch.cfg.page_size:
        return {}
    changes = {"page_size": page}
    if chunk is not None and chunk % page:
        changes["chunked_prefill_size"] = chunk // page * page
    return changes


def resolve(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution step: refuse a launch that B > 1 is not tested with, then make pages of whole blocks.

    Raises:
        DcpBlockError: the first refusal that applies, in one sentence.
    """
    previous(server_args)
    if block_size_of(server_args) == 1:
        return
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    cfg = resolving_view(server_args)
    config = config_of(server_args)
    launch = Launch(cfg, model_config_of(server_args), config.block_size, config.rotate)
    for message in refusals_for(launch)[:1]:
        raise DcpBlockError(message)
    changes = whole_blocks(launch)
    if changes:
        told = ", ".join(f"{name} {getattr(cfg, name)} becomes {value}" for name, value in changes.items())
        logger.warning("%s %d needs pages of whole blocks: %s.", FLAG, launch.block_size, told)
        declare_resolution(server_args, "sglang-dcp-block", **changes)
