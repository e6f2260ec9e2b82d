"""Metrics: silent until started, served in SGLang's way, equal to counting; and the dashboard that shows them."""

import json
import os
import re
import subprocess
import sys
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dcp_block import metrics, runtime
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.metrics import METRICS, Shards

DASHBOARD = Path(__file__).parents[2] / "benchmark/grafana/dashboard.json"


def run_python(code, **environ):
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environ, timeout=60
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_prometheus_is_imported_by_start_only():
    out = run_python(
        "import sys, sglang_dcp_block.metrics as m\n"
        "m.record_transfer(1, 2, 3.0); m.record_retry(); m.record_refused_peer('x')\n"
        "print('prometheus_client' in sys.modules)\n"
        "m.start({'model_name': 'm'})\n"
        "print('prometheus_client' in sys.modules)\n"
    )
    assert out.split() == ["False", "True"]


def test_scraped_as_sglang_serves_them(tmp_path):
    """Two processes record; a third collects their files as SGLang's /metrics does."""
    record = """
import numpy as np, sglang_dcp_block.metrics as m
from sglang_dcp_block.dcp.layout import DcpLayout
m.start({"model_name": "tiny", "engine_type": "prefill", "tp_rank": %d})
m.record_transfer(16, 1_179_648, 0.003)
m.record_transfer(0, 0, 9.0)
m.record_transfer(4, 294_912, 0.2)
m.record_retry(3)
m.record_refused_peer("block_size")
m.record_batch(DcpLayout(4, 64), np.array([65, 1, 512]))
m.start({"ignored": "a second start"})
"""
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for rank in range(2):
        run_python(record % rank, **environ)
    text = run_python(
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess\n"
        "registry = CollectorRegistry(); multiprocess.MultiProcessCollector(registry)\n"
        "print(generate_latest(registry).decode())",
        **environ,
    )
    values = {}
    for line in text.splitlines():
        if found := re.match(r"(sglang:\w+)\{(.*)\} (\S+)", line):
            values.setdefault(found[1], []).append((found[2], float(found[3])))
    sums = {name: sum(v for _, v in rows) for name, rows in values.items()}
    assert sums["sglang:dcp_transfer_segments_total"] == 2 * 20
    assert sums["sglang:dcp_transfer_bytes_total"] == 2 * 1_474_560
    assert sums["sglang:dcp_transfer_seconds_count"] == 2 * 2, "an empty shard is no transfer"
    assert sums["sglang:dcp_transfer_retries_total"] == 2 * 3
    assert all('reason="block_size"' in labels for labels, _ in values["sglang:dcp_refused_peers_total"])
    # 65 + 1 + 512 tokens on 4 ranks of 64: 64 + 1 + 128, 1 + 0 + 128, 0 + 0 + 128, 0 + 0 + 128.
    assert {v for _, v in values["sglang:dcp_rows_per_rank_max"]} == {193}
    assert {v for _, v in values["sglang:dcp_rows_per_rank_min"]} == {128}
    assert {v for _, v in values["sglang:dcp_empty_shard_ratio"]} == {5 / 12}
    assert len({labels for labels, _ in values["sglang:dcp_transfer_bytes_total"]}) == 2, "one series a process"


@given(st.builds(DcpLayout, st.integers(2, 9), st.integers(1, 70)), st.lists(st.integers(1, 900), max_size=6))
def test_shards_by_counting(layout, lengths):
    rows = [[0] * layout.dcp_size for _ in lengths]
    for request, length in zip(rows, lengths, strict=True):
        for t in range(length):
            request[t // layout.block_size % layout.dcp_size] += 1
    per_rank = [sum(column) for column in zip(*rows, strict=True)] or [0]
    flat = [n for request in rows for n in request]
    expected = Shards(min(per_rank), max(per_rank), flat.count(0) / len(flat) if flat else 0.0)
    assert metrics.shards_of(layout, np.array(lengths)) == pytest.approx(expected)


@pytest.mark.parametrize(("step", "enabled", "recorded"), [(40, True, True), (41, True, False), (40, False, False)])
def test_batches_are_sampled_as_often_as_sglangs_gauges(monkeypatch, step, enabled, recorded):
    seen, calls = [], []
    monkeypatch.setattr(metrics, "_recorder", object())
    monkeypatch.setattr(metrics, "record_batch", lambda layout, lengths: seen.append((layout, lengths.tolist())))
    monkeypatch.setattr(runtime, "_layout", DcpLayout(2, 64))
    batch = SimpleNamespace(reqs=[SimpleNamespace(seqlen=n) for n in (5, 700)])
    reporter = SimpleNamespace(
        forward_ct_decode=step,
        decode_log_interval=40,
        current_scheduler_metrics_enabled=enabled,
        scheduler=SimpleNamespace(running_batch=batch),
    )
    for arguments, keywords in (((True, batch), {}), ((True,), {"running_batch": batch}), ((True,), {})):
        metrics.report_decode_stats(lambda *a, **k: calls.append(a), reporter, *arguments, **keywords)
    assert len(calls) == 3, "SGLang's own report always runs"
    assert seen == ([(DcpLayout(2, 64), [5, 700])] * 3 if recorded else [])


def test_under_rotation_rows_per_rank_are_not_told(monkeypatch):
    told: dict[str, float] = {}

    class Recorder:
        def __getitem__(self, name):
            return SimpleNamespace(set=lambda value: told.update({name: value}))

    monkeypatch.setattr(metrics, "_recorder", Recorder())
    lengths, layout = np.array([65, 1, 512]), DcpLayout(4, 64)
    metrics.record_batch(layout.rotated(64), lengths)
    assert told == {"sglang:dcp_empty_shard_ratio": 5 / 12}, "2 ranks, 3 ranks and none without a row"
    metrics.record_batch(layout, lengths)
    assert len(told) == 3, "control"


def test_names_are_new_and_in_sglangs_form():
    folder = Path(util.find_spec("sglang").origin).parent
    taken = set(re.findall(r'"(sglang:\w+)"', (folder / "srt/observability/metrics_collector.py").read_text()))
    assert len(taken) > 50
    for metric in METRICS:
        assert re.fullmatch(r"sglang:dcp_[a-z_]+", metric.name) and metric.name not in taken
        assert metric.name.endswith("_total") == (metric.kind == "counter")


# -- dashboard


def expressions():
    dashboard = json.loads(DASHBOARD.read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_dashboard_shows_every_metric_and_only_real_ones():
    folder = Path(util.find_spec("sglang").origin).parent
    stock = set(re.findall(r'"(sglang:\w+)"', (folder / "srt/observability/metrics_collector.py").read_text()))
    ours = {m.name for m in METRICS if m.kind != "histogram"}
    ours |= {m.name + part for m in METRICS if m.kind == "histogram" for part in ("_bucket", "_sum", "_count")}
    used = {name for expr in expressions() for name in re.findall(r"sglang:\w+", expr)}
    assert used <= ours | stock, used - ours - stock
    for metric in METRICS:
        assert any(name.startswith(metric.name) for name in used), f"no panel shows {metric.name}"


def test_dashboard_is_importable():
    dashboard = json.loads(DASHBOARD.read_text())
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids)) and dashboard["title"] and dashboard["schemaVersion"] >= 36
    assert {i["name"] for i in dashboard["__inputs"]} == {"DS_PROMETHEUS"}
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] >= 0 and grid["x"] + grid["w"] <= 24
        assert panel["description"], f"{panel['title']} says nothing about what good looks like"
    for expr in expressions():
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
