"""Unit tests run on CPU tensors in Triton's interpreter; TRITON_INTERPRET=0 runs the same tests compiled on a GPU."""

import contextlib
import os

# Triton decides at import of a kernel whether it is interpreted.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

from sglang_dcp_block.testing import cpu_testbed

if os.environ["TRITON_INTERPRET"] == "1":
    cpu_testbed.install("interpreter")
# Tensors are tiny, and a test forks: no thread pool may exist in the parent.
torch.set_num_threads(1)
settings.register_profile(
    "unit", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("unit")


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


@pytest.fixture(scope="session")
def no_sync(device):
    """Context in which a GPU refuses to make the host wait. On the CPU there is nothing to wait for."""

    @contextlib.contextmanager
    def context():
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    return context
