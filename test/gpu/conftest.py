"""GPU tests: visibly skipped without a CUDA device, unless ``TRITON_INTERPRET=1`` asks for tiny ones on the CPU.

With ``GPU_TEST_REPORT=FILE`` every measured error is appended to FILE as one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    runs = torch.cuda.is_available() or INTERPRETED
    for item in items:
        if here not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if not runs:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        elif INTERPRETED and item.get_closest_marker("cuda_only"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device: CUDA graphs, streams or FlashInfer"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cuda_only: can't run under Triton's interpreter")


@pytest.fixture
def report(request: pytest.FixtureRequest):
    """report(**numbers): print them, and keep them in GPU_TEST_REPORT."""

    def write(**numbers: object) -> None:
        line = json.dumps({"test": request.node.nodeid.split("/")[-1], **numbers})
        print(line)
        if path := os.environ.get("GPU_TEST_REPORT"):
            with open(path, "a") as file:
                file.write(line + "\n")

    return write
