"""What engine and PD tests share: SGLang is imported once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sglang_dcp_block.testing.warm import WarmServer


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmServer]:
    # Not at the top: unit tests choose Triton's interpreter before anything else is imported.
    from sglang_dcp_block.testing.engine import EngineSpec
    from sglang_dcp_block.testing.warm import WarmServer

    with WarmServer(EngineSpec().environment()) as server:
        yield server
