"""`sglang serve` over HTTP with the flags, as a user starts it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from sglang_dcp_block.testing.engine import EngineSpec, free_port, kill_session, log_tail

SPEC = EngineSpec(tp=2, dcp=2, block=64, page=64, backend="flashinfer", comm="a2a")


def _get(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Base URL of a served engine, started by the command line alone."""
    log = Path(tmp_path_factory.mktemp("serve")) / "log.txt"
    port = free_port()
    arguments = SPEC.engine_arguments()
    options = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        options += [flag] if value is True else [flag, str(value)]
    options += ["--enable-metrics", "--decode-log-interval", "2"]
    sglang = Path(sys.executable).with_name("sglang")
    command = [str(sglang), "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=SPEC.environment(), start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 600
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log_tail(log)
            try:
                _get(f"{url}/server_info")
                break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(1)
        yield url, log
    finally:
        kill_session(process)


def test_a_request_is_answered(server):
    url, _ = server
    body = {"input_ids": list(range(2, 150)), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    assert len(_get(f"{url}/generate", body)["output_ids"]) == 4


def test_server_info_and_log_name_the_layout(server):
    url, log = server
    info = _get(f"{url}/server_info")
    assert info["dcp_block_size"] == 64
    assert {k: info["dcp_layout"][k] for k in ("rule", "dcp_size", "block_size", "page_size", "virtual_page_size")} == {
        "rule": "block_round_robin",
        "dcp_size": 2,
        "block_size": 64,
        "page_size": 64,
        "virtual_page_size": 128,
    }
    assert info["max_total_num_tokens"] == 2 * SPEC.max_total_tokens
    assert 'DCP layout in force: {"rule": "block_round_robin", "dcp_size": 2, "block_size": 64' in log.read_text()
    assert "--dcp-block-size 64" in info["launch_command"]


def test_metrics_show_how_the_requests_lie_on_the_ranks(server):
    url, _ = server
    body = {"input_ids": list(range(2, 102)), "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
    _get(f"{url}/generate", body)  # 100 to 108 tokens: 64 on rank 0, the rest on rank 1
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("sglang:dcp_")}
    assert values["sglang:dcp_rows_per_rank_max"] == 64
    assert 36 <= values["sglang:dcp_rows_per_rank_min"] <= 44
    assert values["sglang:dcp_empty_shard_ratio"] == 0
