from types import SimpleNamespace

import pytest

from sglang_dcp_block import hooks, runtime
from sglang_dcp_block.dcp.layout import DcpLayout


@pytest.fixture(scope="session")
def _patched():
    """The Mooncake hooks in this process, each checked against the installed SGLang."""
    from sglang_dcp_block.disaggregation.mooncake import MOONCAKE_HOOKS

    hooks.install(MOONCAKE_HOOKS)


@pytest.fixture
def mooncake(_patched, monkeypatch):
    """Hooked SGLang, in a server without a layout of its own (a DCP1 prefill server)."""
    import harness
    from sglang.srt.disaggregation.common import conn as common
    from sglang.srt.disaggregation.mooncake import conn

    monkeypatch.setattr(runtime, "_layout", DcpLayout(1))
    # Settings that a server publishes at its start; the transfer reads these.
    monkeypatch.setattr(conn, "get_spec", lambda: SimpleNamespace(speculative_algorithm=None))
    monkeypatch.setattr(conn, "get_memory", lambda: SimpleNamespace(enable_unified_memory=False))
    monkeypatch.setattr(common, "max_prefill_buffer_tokens", lambda: 4096)
    monkeypatch.setattr(common, "get_device", lambda: SimpleNamespace(device="cpu"))
    yield
    harness.close_all()
