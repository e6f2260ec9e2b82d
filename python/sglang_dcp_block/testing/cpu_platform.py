"""The platform class that SGLang instantiates on the CPU test bed (:mod:`sglang_dcp_block.testing.cpu_testbed`)."""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_dcp_block.testing import cpu_testbed


class CpuTestbedPlatform(CpuDeviceMixin, SRTPlatform):
    """CPU tensors, gloo, Triton kernels, torch fallbacks for everything else.

    It is out of tree on purpose: SGLang's own CPU platform takes CPU-only attention and write paths, and its CUDA
    platform imports compiled kernels. This one takes the generic paths, which are those a GPU runs.
    """

    _enum = PlatformEnum.OOT
    #: Asked by the launch checks: a block layout is tested on this platform.
    dcp_block_testbed = True
    capabilities = PlatformCapabilities(supports_triton=True, graph_capture=False)

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return "triton"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def post_load_model(self, model: Any) -> None:
        """Runs in the scheduler process after the weights, before the attention backend is built."""
        from sglang.srt.runtime_context import get_disagg, get_memory

        cpu_testbed.install("model")
        if get_memory().enable_hierarchical_cache:
            cpu_testbed.install("hicache")
        if get_disagg().disaggregation_mode != "null":
            cpu_testbed.install("disaggregation")
