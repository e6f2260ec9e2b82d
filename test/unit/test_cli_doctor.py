"""``doctor``: each kind of broken setup is made for real where a test can make it, and must be named."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib import util
from pathlib import Path

import pytest

from sglang_dcp_block import __version__, doctor, plugin
from sglang_dcp_block.doctor import Check, Settings

SITE = Path(util.find_spec("sglang").origin).parent.parent


def run_doctor(*arguments, **environ):
    """The command in a process of its own: (exit status, checks)."""
    run = subprocess.run(
        [sys.executable, "-m", "sglang_dcp_block", "doctor", "--json", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | environ,
        timeout=120,
    )
    report = json.loads(run.stdout)
    assert report["ok"] == (run.returncode == 0)
    for check in report["checks"]:
        assert "\n" not in check["message"] and check["message"].endswith(".")
    return run.returncode, report["checks"]


def faults(checks):
    return {c["name"]: c["message"] for c in checks if c["status"] == "fail"}


def test_this_installation_is_healthy():
    status, checks = run_doctor()
    assert (status, faults(checks)) == (0, {})


# -- SGLang


def test_wrong_sglang(tmp_path):
    info = tmp_path / "sglang-0.5.22.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.22\n")
    status, checks = run_doctor(PYTHONPATH=str(tmp_path))
    assert status == 1
    assert faults(checks) == {"sglang": "sglang 0.5.22 is installed, this package needs 0.5.23: install that."}


def test_plugin_left_out():
    status, checks = run_doctor(SGLANG_PLUGINS="another")
    assert status == 1 and "add dcp_block to it" in faults(checks)["plugin"]
    assert doctor.check_plugin({"SGLANG_PLUGINS": "another, dcp_block"}).status == "ok"


@pytest.mark.parametrize("hook", plugin.HOOKS, ids=lambda hook: hook.target.split(":")[1])
def test_sources_are_read_as_inspect_reads_them(hook):
    # The expected hashes were taken with inspect from imported modules: equality here is equality of both readers.
    assert doctor.check_hooks([hook]) == [Check("hooks", "ok", "1 hook targets found, all with the expected source.")]


@pytest.fixture
def copied_sglang(tmp_path):
    """The files that hooks point into, copied so that they can be broken."""
    for hook in plugin.HOOKS:
        parts = hook.target.split(":")[0].split(".")
        for candidate in (Path(*parts).with_suffix(".py"), Path(*parts) / "__init__.py"):
            if (SITE / candidate).exists():
                (tmp_path / candidate).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(SITE / candidate, tmp_path / candidate)
    return tmp_path


def test_changed_and_missing_targets(copied_sglang):
    assert [c.status for c in doctor.check_hooks(root=copied_sglang)] == ["ok"]
    layout = copied_sglang / "sglang/srt/layers/dcp/layout.py"
    text = layout.read_text()
    layout.write_text(text.replace("def get_dcp_lens(", "def get_dcp_lengths("))
    comm = copied_sglang / "sglang/srt/layers/dcp/comm.py"
    body = re.search(r"def all_gather_kv_cache_for_dcp\(.*?\n    return ", comm.read_text(), re.S)
    comm.write_text(comm.read_text().replace(body[0], body[0].removesuffix("return ") + "pass\n    return "))
    (copied_sglang / "sglang/srt/managers/scheduler.py").unlink()
    named = {c.message.split(" ")[0]: c.message for c in doctor.check_hooks(root=copied_sglang)}
    assert "get_dcp_lens is not defined" in named["sglang.srt.layers.dcp.layout:get_dcp_lens"]
    assert "has changed (source hash" in named["sglang.srt.layers.dcp.comm:all_gather_kv_cache_for_dcp"]
    assert "scheduler.py is missing" in named["sglang.srt.managers.scheduler:Scheduler.__init__"]
    assert len(named) == 2 + sum("managers.scheduler:" in h.target for h in plugin.HOOKS)


def test_no_sglang_at_all(tmp_path):
    assert all("is missing" in c.message for c in doctor.check_hooks(root=tmp_path))


# -- Mooncake and libraries


PLAIN, CUDA13, NON_CUDA = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
)


@pytest.mark.parametrize(
    ("installed", "cuda", "gpus", "status", "words"),
    [
        ([PLAIN], "13.0", 8, "fail", f"built for CUDA 12 but torch has CUDA 13.0: install {CUDA13} instead"),
        ([CUDA13], "12.9", 8, "fail", f"install {PLAIN} instead"),
        ([CUDA13], "13.0", 8, "ok", "fits"),
        ([PLAIN], "12.9", 1, "ok", "fits"),
        ([NON_CUDA], "13.0", 8, "fail", "can't send GPU memory"),
        ([NON_CUDA], "13.0", 0, "ok", "fits"),
        ([PLAIN], None, 0, "fail", f"torch has no CUDA: install {NON_CUDA}"),
        ([], "13.0", 8, "warn", f"install {CUDA13}"),
        ([PLAIN, NON_CUDA], "13.0", 8, "fail", "share one import name"),
        (["mooncake-transfer-engine-efa"], "13.0", 8, "warn", "has not tried"),
    ],
)
def test_mooncake_wheel_and_machine(installed, cuda, gpus, status, words):
    (check,) = doctor.check_mooncake(dict.fromkeys(installed, "0.3.13"), cuda, gpus)
    assert check.status == status and words in check.message


def test_two_mooncake_wheels_for_real(tmp_path):
    info = tmp_path / "mooncake_transfer_engine-0.3.13.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-transfer-engine\nVersion: 0.3.13\n")
    status, checks = run_doctor(PYTHONPATH=str(tmp_path))
    assert status == 1 and "uninstall all of them" in faults(checks)["mooncake"]


def test_torch_cuda_is_torchs_own_word():
    import torch

    assert doctor.torch_cuda() == torch.version.cuda


@pytest.fixture
def rewired_mooncake(tmp_path):
    """A copy of the installed Mooncake whose engine asks the loader for another library (same length of name)."""
    if not doctor.mooncake_distributions():
        pytest.skip("no Mooncake wheel is installed, so there is none to break")
    source = Path(util.find_spec("mooncake").origin).parent

    def rewire(old, new):
        assert len(old) == len(new)
        target = tmp_path / "mooncake"
        shutil.copytree(source, target, dirs_exist_ok=True)
        for libs in source.parent.glob("mooncake_transfer_engine*.libs"):
            (tmp_path / libs.name).symlink_to(libs)
        engine = (target / "engine.so").read_bytes()
        assert engine.count(old.encode() + b"\0") == 1
        (target / "engine.so").write_bytes(engine.replace(old.encode() + b"\0", new.encode() + b"\0"))
        return os.environ | {"PYTHONPATH": str(tmp_path)}

    return rewire


def test_missing_system_library_for_real(rewired_mooncake, monkeypatch):
    environ = rewired_mooncake("libibverbs.so.1", "libibverbz.so.1")
    monkeypatch.setitem(doctor.SYSTEM_LIBRARIES, "libibverbz.so.1", "libibverbz1")
    check = doctor.check_mooncake_import(environ=environ)
    assert check == Check("mooncake import", "fail", "Mooncake needs libibverbz.so.1: apt-get install libibverbz1.")


def test_cuda_12_wheel_for_real(rewired_mooncake):
    # What mooncake-transfer-engine does on a CUDA 13 machine: the loader looks for CUDA 12's runtime.
    check = doctor.check_mooncake_import(environ=rewired_mooncake("libibverbs.so.1", "libcudart.so.12"))
    assert check.status == "fail" and "needs libcudart.so.12 of CUDA 12" in check.message


def test_an_import_that_hangs_has_failed(monkeypatch, tmp_path):
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(doctor, "IMPORT_TIMEOUT_S", 0.1)
    for check in (doctor.check_mooncake_import(str(hanging)), doctor.check_nixl_import(str(hanging))):
        assert check.status == "fail" and "(no answer in 0.1 seconds)" in check.message


def test_libraries():
    check = doctor.check_libraries({"libm.so.6": "libc6", "libnothing.so.9": "libnothing9", "libmore.so.1": "libmore1"})
    assert check.status == "fail" and "apt-get install libnothing9 libmore1" in check.message
    assert doctor.check_libraries({"libm.so.6": "libc6"}).status == "ok"


def test_other_import_errors():
    assert "reinstall the Mooncake wheel" in doctor.explain_import_error("Traceback\nImportError: bad magic")


# -- NIXL


@pytest.mark.parametrize(
    ("installed", "status", "words"),
    [(None, "ok", "no NIXL"), (doctor.NIXL_VERSION, "ok", "fits"), ("1.6.0", "warn", "1.5.1 is tested")],
)
def test_nixl_version(installed, status, words):
    check = doctor.check_nixl(installed)
    assert check.status == status and words in check.message


def test_nixl_version_is_that_of_the_extra():
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'nixl = ["nixl=={doctor.NIXL_VERSION}"]' in project


def test_nixl_for_real(tmp_path):
    """As installed, without a plugin, with another one alone, and in pieces."""
    assert doctor.check_nixl_import() == Check("nixl import", "ok", "NIXL can be started and has the UCX plugin.")
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    environ = os.environ | {"NIXL_PLUGIN_DIR": str(plugins)}
    assert "No plugins available" in doctor.check_nixl_import(environ=environ).message
    other = next(SITE.glob(".nixl*/plugins/libplugin_POSIX.so"))
    (plugins / other.name).symlink_to(other)
    check = doctor.check_nixl_import(environ=environ)
    assert check.status == "fail" and "no UCX plugin: unset NIXL_PLUGIN_DIR" in check.message
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").touch()
    check = doctor.check_nixl_import(environ=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert check.status == "fail" and "(ModuleNotFoundError: No module named 'nixl._api')" in check.message


# -- GPUs: the matrix as nvidia-smi prints it (underlined head, then one row a device)

MATRIX = """\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\t{link}\tPIX\t0-63
GPU1\tNV18\t X \tNV18\tSYS\t0-63
GPU2\t{link}\tNV18\t X \tSYS\t64-127
NIC0\tPIX\tSYS\tSYS\t X

Legend:
"""


def test_gpu_links():
    links = doctor.gpu_links(MATRIX.format(link="SYS"))
    assert links == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NV18"}
    # With one GPU the heading looks like a row: its second word is no GPU.
    assert doctor.gpu_links("\t\x1b[4mGPU0\tNIC0\tCPU Affinity\x1b[0m\nGPU0\t X \tSYS\t0-63\n") == {}


@pytest.mark.parametrize(
    ("names", "link", "tp", "status", "words"),
    [
        ([], "", 8, "warn", "no NVIDIA GPU"),
        (["NVIDIA H200"] * 3, "NV18", 3, "ok", "3 GPUs (NVIDIA H200), all pairs on NVLink"),
        (["NVIDIA H200"], "NV18", 1, "ok", "1 GPU (NVIDIA H200)"),
        (["NVIDIA H200"] * 3, "SYS", None, "warn", "without NVLink (SYS)"),
        (["NVIDIA H200"] * 3, "NV18", 8, "fail", "fewer than --tp 8"),
    ],
)
def test_gpus(names, link, tp, status, words):
    check = doctor.check_gpus(names, MATRIX.format(link=link) if names else "", tp)
    assert check.status == status and words in check.message


# -- settings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(8, 3, 64, 64, None), ["--dcp-size 3 must divide --tp-size 8"]),
        (Settings(8, 1, 64, 64, None), ["64 needs more than one DCP rank"]),
        (Settings(8, 8, 64, 64, "fa3"), ["not tested with attention backend fa3"]),
        (Settings(8, 3, 48, 64, "fa3"), ["divide --tp-size", "fa3"]),
        (Settings(8, 8, 48, 64, "triton"), []),
        (Settings(8, 8, 64, 64, "flashinfer"), []),
        (Settings(8, 8, None, 64, "fa3"), []),
        (Settings(tp_size=8), []),
    ],
)
def test_settings(settings, words):
    messages = [c.message for c in doctor.check_settings(settings) if c.status == "fail"]
    assert len(messages) == len(words)
    assert all(word in message for word, message in zip(words, messages, strict=True))


def test_settings_name_the_page_that_blocks_make():
    (check,) = doctor.check_settings(Settings(8, 8, 48, 64))
    assert check.status == "ok" and "the page becomes 192" in check.message
    (check,) = doctor.check_settings(Settings(8, 8, 32, 64))
    assert check.status == "ok" and "becomes" not in check.message


# -- peers


@pytest.fixture
def serve():
    """Start a server that answers /server_info with a given object; returns its address."""
    servers = []

    def start(info):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200 if self.path == "/server_info" else 404)
                self.end_headers()
                self.wfile.write(info if isinstance(info, bytes) else json.dumps(info).encode())

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def layout(dcp_size=8, block_size=64, page_size=64):
    return plugin.layout_record(plugin.DcpLayout(dcp_size, block_size), page_size)


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (Settings(8, 8, 64, 64), layout(), None),
        (Settings(8, 8, 32, 64), layout(), "has block size 64, this side 32: give both the same --dcp-block-size"),
        (Settings(8, 4, 64, 64), layout(), "has dcp size 8, this side 4"),
        (Settings(8, 8, 64, 128), layout(), "has page size 64, this side 128"),
        (Settings(8, 8, 64, 32), layout(), None),
        (Settings(8, 1, None, 64), layout(), None),
        (Settings(8, 8, 64, 64), layout(dcp_size=1, block_size=1), None),
        (Settings(), layout(), None),
        (Settings(8, 8, 64, 64), None, "reports no dcp_layout: install sglang-dcp-block"),
    ],
)
def test_peer(serve, ours, theirs, words):
    url = serve({"version": "0.5.23"} | ({"dcp_layout": theirs} if theirs else {}))
    (check,) = doctor.check_peers([url], ours)
    assert check.status == ("fail" if words else "ok")
    assert url in check.message and (words or "block size") in check.message


def test_a_pd_peer_may_have_any_layout(serve):
    url = serve({"dcp_layout": layout(), "disaggregation_mode": "prefill"})
    (check,) = doctor.check_peers([url], Settings(4, 4, 16, 16))
    assert check.status == "ok"


def test_peer_with_another_plugin_version(serve):
    (check,) = doctor.check_peers([serve({"dcp_layout": layout() | {"plugin_version": "9.9"}})], Settings())
    assert check.status == "warn" and f"but plugin version 9.9, here {__version__}" in check.message


@pytest.mark.parametrize(
    ("prefill", "decode", "words"),
    [
        ((1, 1, 64, "auto"), (8, 64, 64, "auto"), None),
        ((8, 64, 64, "bf16"), (8, 64, 64, "bf16"), None),
        ((8, 16, 64, "auto"), (8, 64, 64, "auto"), None),
        ((8, 64, 64, "auto"), (1, 1, 64, "auto"), None),
        ((1, 1, 16, "auto"), (8, 64, 64, "auto"), None),
        ((2, 64, 64, "auto", 6), (2, 64, 64, "auto", 2), "prefill has 3 DCP groups (--tp-size 6, --dcp-size 2)"),
        ((1, 1, 64, "bf16"), (8, 64, 64, "fp8_e4m3"), "--kv-cache-dtype differs"),
        ((1, 1, 64, "auto"), (8, 64, 64, "bf16"), None),
    ],
)
def test_prefill_and_decode_are_judged_as_the_prefill_server_will(serve, prefill, decode, words):
    def info(mode, dcp_size, block_size, page_size, dtype, tp_size=8):
        record = layout(dcp_size, block_size, page_size)
        return {"dcp_layout": record, "disaggregation_mode": mode, "kv_cache_dtype": dtype, "tp_size": tp_size}

    urls = [serve(info("prefill", *prefill)), serve(info("decode", *decode))]
    for order in (urls, urls[::-1]):
        checks = doctor.check_peers(order, Settings())
        assert [c.status for c in checks] == ["ok", "fail" if words else "ok"]
        assert checks[1].message.startswith(order[1]) and (words or "") in checks[1].message


def test_two_peers_are_compared_with_each_other(serve):
    first, second = serve({"dcp_layout": layout()}), serve({"dcp_layout": layout(block_size=16)})
    status, checks = run_doctor("--peer", first, "--peer", second)
    assert status == 1
    assert faults(checks)["peer"].startswith(f"{second} has block size 16, this side 64")
    prefill = serve({"dcp_layout": layout(dcp_size=1, block_size=1)})
    assert run_doctor("--peer", prefill, "--peer", first)[0] == 0


@pytest.mark.parametrize("answer", [b"not json", [1]])
def test_peer_that_is_not_sglang(serve, answer):
    (check,) = doctor.check_peers([serve(answer)], Settings())
    assert check.status == "fail" and "gave no" in check.message


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:9", "http://"])
def test_peer_that_does_not_answer(url):
    (check,) = doctor.check_peers([url], Settings())
    assert check.status == "fail" and check.message.startswith(url)


def test_version_is_in_the_layout_record():
    assert layout()["plugin_version"] == __version__
