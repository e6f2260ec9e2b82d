from types import SimpleNamespace

import pytest

from sglang_dcp_block import hooks, runtime
from sglang_dcp_block.dcp.layout import DcpLayout


@pytest.fixture(scope="session")
def _patched():
    """The hooks of both backends in this process, each checked against the installed SGLang."""
    from sglang_dcp_block.disaggregation.common import COMMON_HOOKS
    from sglang_dcp_block.disaggregation.mooncake import MOONCAKE_HOOKS
    from sglang_dcp_block.disaggregation.nixl import NIXL_HOOKS
    from sglang_dcp_block.disaggregation.placement import PLACEMENT_HOOKS

    hooks.install([*COMMON_HOOKS, *PLACEMENT_HOOKS, *MOONCAKE_HOOKS, *NIXL_HOOKS])


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


@pytest.fixture
def nixl(mooncake):
    """The same for NIXL."""
    import harness
    import nixl_harness

    yield
    harness.close_all()
    nixl_harness.close_all()


@pytest.fixture
def servers(mooncake, monkeypatch):
    """(prefill, decode, engine) -> test_any_pair.Pair. What SGLang reads of its published settings is given here."""
    from harness import CopyEngine
    from sglang.srt.disaggregation.common import conn as common
    from sglang.srt.disaggregation.mooncake import conn
    from test_any_pair import Pair

    from sglang_dcp_block.disaggregation import common as ours
    from sglang_dcp_block.disaggregation import wire

    parallel = SimpleNamespace(
        num_dp_ranks=1,
        dp_size=1,
        enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False,
        enable_cp_tp_group_sharing=False,
    )
    for module in (common, conn):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel, raising=False)
    monkeypatch.setattr(common, "get_disagg", lambda: SimpleNamespace(disaggregation_decode_allocation_policy="early"))
    monkeypatch.setattr(common, "get_observability", lambda: SimpleNamespace(enable_trace=False))
    # Both servers live in this process; each manager acts under its own layout.
    monkeypatch.setattr(
        ours,
        "geometry_of",
        lambda m: wire.KvGeometry(m.dcp_size, m.block_size, m.kv_args.page_size, m.kv_cache_dtype_str, m.rotate),
    )
    pairs = []

    def start(prefill, decode, engine=None, **options):
        monkeypatch.setattr(ours, "_launched", lambda: wire.capability(prefill.layout, prefill.page))
        pairs.append(Pair(prefill, decode, engine or CopyEngine(), **options))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()
