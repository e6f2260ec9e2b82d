"""The hook table against the installed SGLang, when each row is installed, and the checks between processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import types

import pytest

from sglang_dcp_block import __version__, hooks, plugin
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.hooks import HookError
from sglang_dcp_block.plugin import HOOKS, SCOPES, Setup
from sglang_dcp_block.server_args import DcpBlockConfig
from sglang_dcp_block.testing.engine import free_port


def setup(dcp: int, block: int, backend: str, is_mla: bool = True, mode: str = "null") -> Setup:
    return Setup(DcpLayout(dcp, block), backend, is_mla, mode, "mooncake")


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: h.target)
def test_every_target_exists_unchanged_in_the_pinned_sglang(hook):
    assert hooks.check(hook) is None
    assert hook.scope in SCOPES and hook.why
    assert hook.test.split("::")[0].startswith("test/") and os.path.exists(hook.test.split("::")[0]), hook.test


def test_no_target_is_listed_twice():
    assert len({h.target for h in HOOKS}) == len(HOOKS)


def test_flashinfer_at_block_size_1_and_servers_without_dcp_get_no_kv_hook():
    for quiet in (setup(8, 1, "flashinfer"), setup(1, 1, "triton"), setup(1, 1, "fa3"), setup(8, 1, "triton", False)):
        assert plugin.hooks_for(quiet) == []


def test_block_layouts_get_their_backends_hooks():
    flashinfer = {h.target for h in plugin.hooks_for(setup(8, 64, "flashinfer"))}
    triton = {h.target for h in plugin.hooks_for(setup(8, 64, "triton"))}
    shared = {h.target for h in HOOKS if h.scope in ("block", "mla")}
    assert shared <= flashinfer and shared <= triton
    assert any("FlashInferMLA" in t for t in flashinfer - triton) and any("Triton" in t for t in triton - flashinfer)
    assert triton == {h.target for h in plugin.hooks_for(setup(8, 1, "triton"))}, "Triton MLA needs wiring at B = 1 too"


def test_grouped_query_models_get_no_hook_of_mla():
    gqa = plugin.hooks_for(setup(2, 64, "triton", False))
    assert {h.scope for h in gqa} == {"block", "triton", "gqa"}
    assert not {h.target for h in gqa if h.scope == "gqa"} & {
        h.target for h in plugin.hooks_for(setup(2, 64, "triton"))
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(layout="hnd"), "MHATokenToKVPool in layout hnd: unset SGLANG_USE_HND_KVCACHE"),
        (dict(kind="SWAKVPool"), "not tested with a SWAKVPool"),
        (dict(kind="PageMajorMHATokenToKVPool"), "not tested with a PageMajorMHATokenToKVPool"),
        (
            dict(dtype="float16"),
            "torch.float16 KV cache of a grouped-query model in torch.bfloat16: give the KV cache",
        ),
    ],
)
def test_pools_that_grouped_query_blocks_are_not_tested_with_stop_the_server(change, message):
    import torch
    from sglang.srt.mem_cache import memory_pool

    asked = dict(layout="nhd", kind="MHATokenToKVPool", dtype="bfloat16")

    def pool(layout, kind, dtype):
        made = object.__new__(getattr(memory_pool, kind, type(kind, (), {})))
        made.kv_cache_layout, made.dtype = layout, getattr(torch, dtype)
        return made

    plugin.check_gqa_pool(pool(**asked), torch.bfloat16)
    with pytest.raises(HookError, match=message):
        plugin.check_gqa_pool(pool(**(asked | change)), torch.bfloat16)


def test_the_layout_record_tells_layouts_apart():
    records = [
        plugin.layout_record(DcpLayout(p, b), page)["hash"]
        for p in (1, 2, 8)
        for b in (1, 16, 64)
        for page in (64, 128)
    ]
    records.append(plugin.layout_record(DcpLayout(8, 64).rotated(64), 64)["hash"])
    assert len(set(records)) == len(records)
    assert plugin.layout_record(DcpLayout(8, 64).rotated(64), 64)["rule"] == "rotated_block_round_robin"


def test_an_allocator_with_other_pages_stops_the_process():
    plugin.check_virtual_page(DcpLayout(8, 64), 64, 512)
    plugin.check_virtual_page(DcpLayout(1, 1), 16, 16)
    with pytest.raises(HookError, match=r"pages have 64 slots, but DcpLayout\(dcp_size=8, block_size=64\).* needs 512"):
        plugin.check_virtual_page(DcpLayout(8, 64), 64, 64)


def test_the_dtype_of_the_pool_decides_not_the_setting():
    """--kv-cache-dtype stays "auto" in the settings; SGLang's own rule and pool say what became of it."""
    import torch
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    def pool_dtype(setting, kv_cache_quant_algo=None):
        model = types.SimpleNamespace(quant_config=types.SimpleNamespace(kv_cache_quant_algo=kv_cache_quant_algo))
        fixed = dict(is_draft_worker=False, is_dflash=False, speculative_draft_attention_backend=None)
        _, dtype = configure_kv_cache_dtype(
            server_args_kv_cache_dtype=setting, model=model, model_dtype=torch.bfloat16, **fixed
        )
        return MLATokenToKVPool(64, 64, dtype, 8, 8, 1, "cpu", False).dtype

    assert pool_dtype("auto", "FP8") == pool_dtype("fp8_e4m3") == torch.float8_e4m3fn
    for dtype in (pool_dtype("auto"), pool_dtype("auto", "FP8")):
        plugin.check_kv_dtype(DcpLayout(8, 64), dtype)
    with pytest.raises(HookError, match=r"asks for a float8_e5m2 KV cache.*use --kv-cache-dtype bfloat16\."):
        plugin.check_kv_dtype(DcpLayout(8, 64), pool_dtype("fp8_e5m2"))
    plugin.check_kv_dtype(DcpLayout(8, 1), pool_dtype("fp8_e5m2"))


def test_a_checkpoint_that_scales_its_kv_stops_the_process():
    import torch
    from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod
    from sglang.srt.layers.radix_attention import RadixAttention

    def model(scale):
        """As after loading: -1 is SGLang's mark of a scale that the checkpoint doesn't have."""
        layer = RadixAttention(1, 8, 1.0, 1, 0)
        method = BaseKVCacheMethod(None)
        method.create_weights(layer)
        layer.k_scale.fill_(scale)
        method.process_weights_after_loading(layer)
        return torch.nn.ModuleDict({"attn_mqa": layer, "plain": RadixAttention(1, 8, 1.0, 1, 0)})

    for is_mla, remedy in ((True, "--kv-cache-dtype bfloat16"), (False, "a checkpoint without KV scales")):
        for scale in (-1.0, 1.0):
            plugin.check_kv_scales(DcpLayout(8, 64), model(scale), is_mla)
        with pytest.raises(HookError, match=rf"scales its FP8 KV by 0\.5 in attn_mqa.*use {remedy}\."):
            plugin.check_kv_scales(DcpLayout(8, 64), model(0.5), is_mla)
        plugin.check_kv_scales(DcpLayout(8, 1), model(0.5), is_mla)


def test_another_sglang_version_stops_the_process(monkeypatch):
    import sglang

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(HookError, match=r"sglang 0\.5\.24 is installed; install sglang==0\.5\.23"):
        plugin.register()


# -- between processes -------------------------------------------------------------------------------------------------


def _compare(rank: int, flags: list[tuple[int, bool]], port: int, queue) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=len(flags))
    try:
        plugin.check_same_layout(DcpBlockConfig(*flags[rank]), types.SimpleNamespace(cpu_group=dist.group.WORLD))
        queue.put((rank, None))
    except HookError as error:
        queue.put((rank, str(error)))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ((64, False), None),
        ((16, False), "rank 1: block size 16 (plugin"),
        ((64, True), "rank 1: block size 64 rotated"),
    ],
    ids=["same", "rank 1 differs", "rank 1 rotates"],
)
def test_ranks_with_different_layouts_all_stop(other, said):
    port = free_port()
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    flags = [(64, False), other]
    ranks = [context.Process(target=_compare, args=(r, flags, port, queue)) for r in range(2)]
    for process in ranks:
        process.start()
    answers = dict(queue.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join()
    if said is None:
        assert answers == {0: None, 1: None}
    else:
        for message in answers.values():
            assert "rank 0: block size 64 (plugin" in message and said in message


def test_the_launcher_stops_when_a_scheduler_reports_no_or_another_layout():
    record = plugin.layout_record(DcpLayout(2, 64), 64)
    other = plugin.layout_record(DcpLayout(2, 16), 64)
    assert plugin.wait_for_scheduler_ready(lambda: [{"dcp_layout": record}] * 2) == [{"dcp_layout": record}] * 2
    for infos in ([{"status": "ready"}], [{"dcp_layout": record}, {"dcp_layout": other}]):
        with pytest.raises(HookError, match="install the plugin for every process"):
            plugin.wait_for_scheduler_ready(lambda infos=infos: infos)


def test_a_controller_of_data_parallel_ranks_passes_their_layout_on():
    record = plugin.layout_record(DcpLayout(2, 64), 64)
    ranks = [{"dcp_layout": record, "dcp_block_size": 64}] * 2
    controller = types.SimpleNamespace(_scheduler_init_infos=ranks)
    assert plugin.controller_init_info(lambda c: {"status": "ready"}, controller) == {"status": "ready"} | ranks[0]
    controller._scheduler_init_infos = [ranks[0], {"status": "ready"}]
    with pytest.raises(HookError, match="report different layouts"):
        plugin.controller_init_info(lambda c: {}, controller)


def _python(code: str, environment: dict[str, str] | None = None, data: bytes = b"") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], input=data, capture_output=True, timeout=300, env=os.environ | (environment or {})
    )


def test_a_child_without_the_plugin_fails_to_read_its_arguments():
    hide = "import sys; sys.modules['sglang_dcp_block'] = None; import pickle; pickle.load(sys.stdin.buffer)"
    result = _python(hide, data=pickle.dumps(DcpBlockConfig(64)))
    assert result.returncode == 1 and b"sglang_dcp_block" in result.stderr, result.stderr


def test_a_child_with_another_plugin_version_fails_to_read_its_arguments():
    data = pickle.dumps(DcpBlockConfig(64)).replace(__version__.encode(), b"9.9.9")
    result = _python("import sys, pickle; pickle.load(sys.stdin.buffer)", data=data)
    assert result.returncode == 1 and b"the launcher runs sglang-dcp-block 9.9.9" in result.stderr, result.stderr


def test_a_child_whose_loader_skips_the_plugin_is_armed_by_its_arguments():
    code = (
        "import sys, pickle, sglang.srt.managers.scheduler\n"
        "config = pickle.load(sys.stdin.buffer)\n"
        "from sglang_dcp_block import hooks\n"
        "assert 'sglang.srt.managers.scheduler:Scheduler.__init__' in hooks.installed()\n"
        "print('armed', config.block_size)"
    )
    result = _python(code, {"SGLANG_PLUGINS": "nothing"}, pickle.dumps(DcpBlockConfig(64)))
    assert result.stdout.split()[-2:] == [b"armed", b"64"], result.stderr


def test_excluding_the_plugin_while_giving_the_flag_is_an_error():
    code = (
        "import sys\n"
        "import sglang\n"
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.server_args import prepare_server_args\n"
        "try: sglang.Engine(model_path='none', dcp_block_size=64)\n"
        "except TypeError as error: print('engine:', error)\n"
        "prepare_server_args(['--model-path', 'none', '--dcp-block-size', '64'])"
    )
    result = _python(code, {"SGLANG_PLUGINS": "nothing"})
    assert result.returncode == 2 and b"unrecognized arguments: --dcp-block-size 64" in result.stderr, result.stderr
    assert b"engine:" in result.stdout and b"dcp_block_size" in result.stdout, result.stdout
