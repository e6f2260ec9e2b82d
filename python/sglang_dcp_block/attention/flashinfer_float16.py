"""FlashInfer's partial results in float16: FlashInfer's own kernels, compiled for another dtype of their results.

FlashInfer's FA2 and FA3 kernels for MLA are templates over the dtype of their results, in which they also keep the
pieces of a request that they cut. FlashInfer's wrapper asks for no other than the queries'. Plans don't depend on it,
as all of them have 16 bits. So a wrapper is planned as ever, and where it would run the module for bfloat16 results,
:class:`Float16Results` runs the one for float16.

Where that module can't be compiled on some rank of a DCP group, partial results stay in bfloat16 on all of them, and
the log says so. Another FlashInfer stops the server, as another SGLang does.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from sglang_dcp_block import hooks, runtime
from sglang_dcp_block.attention import partials

logger = logging.getLogger(__name__)

FLASHINFER_VERSION = "0.7.2"
#: :func:`hooks.source_hash` of the function that calls a module's run: the order of its arguments is no public matter.
_RUN_HASH = "a7df775f42a77950"
_OUT, _LSE = 8, 9


class Float16Results:
    """FlashInfer's compiled module for one wrapper, with the module for float16 results in its place at every run.

    A run without an LSE goes to no merge (a group that idles under DP attention): it is left to the module that the
    wrapper was planned with.
    """

    def __init__(self, planned: Any, float16: Any) -> None:
        self._planned, self._float16 = planned, float16
        self._partial: torch.Tensor | None = None

    def run(self, *args: Any) -> None:
        if args[_LSE] is None:
            self._planned.run(*args)
            return
        out = args[_OUT]
        self._partial = torch.empty(out.shape, dtype=torch.float16, device=out.device)
        self._float16.run(*args[:_OUT], self._partial, *args[_LSE:])

    def take(self) -> torch.Tensor:
        """Results of the last run, once: (n, H, D) float16.

        Raises:
            RuntimeError: there was none since, so that FlashInfer ran something else.
        """
        partial, self._partial = self._partial, None
        if partial is None:
            raise RuntimeError("FlashInfer did not run the module for float16 results that its wrapper was given")
        return partial


def load_module(backend: str, model_dtype: torch.dtype, lora_dim: int, rope_dim: int) -> Any:
    """FlashInfer's MLA module for queries and KV of ``model_dtype`` and float16 results, compiled if need be.

    Args:
        backend: "fa2" or "fa3".

    Raises:
        HookError: another FlashInfer is installed. And whatever FlashInfer raises when it can't compile.
    """
    import flashinfer

    if flashinfer.__version__ != FLASHINFER_VERSION:
        raise hooks.HookError(
            f"sglang-dcp-block: flashinfer {flashinfer.__version__} is installed, not {FLASHINFER_VERSION}: "
            f"install flashinfer-python=={FLASHINFER_VERSION}, which this SGLang asks for."
        )
    from flashinfer.jit import gen_batch_mla_module
    from flashinfer.mla._batch_mla._backends._fa_common import _BatchMLAGeneratedFaMechanics

    if hooks.source_hash(_BatchMLAGeneratedFaMechanics._run_generated_fa) != _RUN_HASH:
        raise hooks.HookError(
            "sglang-dcp-block: flashinfer's _run_generated_fa has changed: reinstall "
            f"flashinfer-python=={FLASHINFER_VERSION}."
        )
    dtypes = (model_dtype, model_dtype, torch.float16, torch.int32)  # queries, KV, results, indices
    return gen_batch_mla_module(backend, *dtypes, lora_dim, rope_dim, False).build_and_load()


def over_dcp_group(mine: str) -> list[str]:
    """``mine`` of every rank of the DCP group, in order of rank."""
    from sglang.srt.runtime_context import get_parallel

    return runtime.of_every_rank(mine, get_parallel().dcp_group)


@functools.cache
def module_on_all_ranks(backend: str, model_dtype: torch.dtype, lora_dim: int, rope_dim: int) -> Any | None:
    """:func:`load_module`, or None where a rank of the DCP group can't have it: a merge takes one dtype from all.

    Called by all ranks at once, with the first plan of a decode: before a CUDA graph is captured, or in the warm-up
    request. Says in the log which it is. A rank that raised would leave the others waiting.
    """
    module, problem = None, ""
    try:
        module = load_module(backend, model_dtype, lora_dim, rope_dim)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    problems = {rank: text for rank, text in enumerate(over_dcp_group(problem)) if text}
    if not problems:
        logger.info("FlashInfer's partial results go to the DCP merge in float16 (%s)", backend)
        return module
    logger.warning(
        "FlashInfer's partial results go to the DCP merge in %s, rounded once more than in float16: %s",
        model_dtype,
        "; ".join(f"rank {rank}: {text}" for rank, text in problems.items()),
    )
    return None


def gains(model_dtype: torch.dtype) -> bool:
    """Whether float16 keeps more of a partial result than the dtype of the model's activations."""
    return model_dtype == torch.bfloat16


def use_float16(wrapper: Any, model_dtype: torch.dtype, lora_dim: int, rope_dim: int) -> None:
    """Let a planned wrapper give float16 partial results, if that gains anything; twice is as good as once.

    Args:
        wrapper: FlashInfer's BatchMLAPagedAttentionWrapper. Only its FA2 and FA3 backends have such a module.

    Raises:
        RuntimeError: it was planned for another. None takes queries and KV as SGLang gives them, in two tensors each;
            if one did on some ranks, the merge would take bfloat16 for float16.
    """
    if not gains(model_dtype):
        return
    planned = wrapper._planned_backend
    if planned._backend not in ("fa2", "fa3"):
        raise RuntimeError(f"FlashInfer planned {planned._backend} for MLA decode, which has no float16 results")
    if isinstance(planned._cached_module, Float16Results):
        return
    module = module_on_all_ranks(planned._backend, model_dtype, lora_dim, rope_dim)
    if module is not None:
        partials.keep_model_dtype(model_dtype)
        planned._cached_module = Float16Results(planned._cached_module, module)


def partial_result(wrapper: Any, out: torch.Tensor) -> torch.Tensor:
    """What goes to the merge of a run that was given ``out``: its float16 results, or ``out`` itself."""
    module = wrapper._planned_backend._cached_module
    if not isinstance(module, Float16Results):
        return out
    partial = module.take().view(out.shape)
    return partial if partials.is_merged() else partial.to(out.dtype)
