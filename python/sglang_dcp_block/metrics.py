"""Prometheus metrics of the block layout, in SGLang's registry and with its ``sglang:`` names.

SGLang serves ``/metrics`` from files that its processes write (prometheus_client's multi-process mode).
prometheus_client picks that mode on its first import, so it must not be imported before the launcher has set
PROMETHEUS_MULTIPROC_DIR: this module imports it in :func:`start` only, which runs in scheduler processes.

Until :func:`start` runs, the ``record_*`` functions do nothing, so callers need no check of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sglang_dcp_block.dcp.layout import DcpLayout


class Metric(NamedTuple):
    """One metric. ``kind``: counter, gauge or histogram; ``labels`` come beside those of SGLang's scheduler metrics."""

    name: str
    kind: str
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS = (
    Metric("sglang:dcp_transfer_segments_total", "counter", "Contiguous KV pieces sent to decode ranks, all layers."),
    Metric("sglang:dcp_transfer_bytes_total", "counter", "KV bytes sent to decode ranks."),
    Metric(
        "sglang:dcp_transfer_seconds",
        "histogram",
        "Seconds from handing one chunk's segments to the transport until the last has arrived.",
        buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    ),
    Metric(
        "sglang:dcp_transfer_retries_total", "counter", "Batches of segments that the transport refused and got again."
    ),
    Metric(
        "sglang:dcp_refused_peers_total", "counter", "PD peers refused because their layout does not fit.", ("reason",)
    ),
    Metric(
        "sglang:dcp_rows_per_rank_min",
        "gauge",
        "KV rows of the running batch on the emptiest DCP rank; not told with --dcp-rotate.",
    ),
    Metric(
        "sglang:dcp_rows_per_rank_max",
        "gauge",
        "KV rows of the running batch on the fullest DCP rank; not told with --dcp-rotate.",
    ),
    Metric(
        "sglang:dcp_empty_shard_ratio",
        "gauge",
        "Part of the (request, rank) pairs of the running batch in which the rank holds no row of the request.",
    ),
)


class Shards(NamedTuple):
    """How a batch lies on the ranks: rows on the emptiest and fullest rank, part of empty (request, rank) pairs."""

    rows_min: int
    rows_max: int
    empty_ratio: float


def shards_of(layout: DcpLayout, lengths: np.ndarray) -> Shards:
    """Shards of a batch with these request lengths, (n,) integers."""
    if not len(lengths):
        return Shards(0, 0, 0.0)
    rows = np.stack([layout.local_len(np.asarray(lengths, np.int64), rank) for rank in range(layout.dcp_size)])
    per_rank = rows.sum(axis=1)
    return Shards(int(per_rank.min()), int(per_rank.max()), float((rows == 0).mean()))


class _Recorder:
    """The metrics of this process, bound to their labels."""

    def __init__(self, labels: Mapping[str, Any]) -> None:
        import prometheus_client

        self._labels = {name: str(value) for name, value in labels.items()}
        self._metrics = {}
        for metric in METRICS:
            extra: dict[str, Any] = {"buckets": metric.buckets} if metric.buckets else {}
            if metric.kind == "gauge":
                extra["multiprocess_mode"] = "mostrecent"
            kind = getattr(prometheus_client, metric.kind.capitalize())
            names = [*self._labels, *metric.labels]
            self._metrics[metric.name] = kind(metric.name, metric.documentation, labelnames=names, **extra)

    def __getitem__(self, name: str) -> Any:
        return self._metrics[name].labels(**self._labels)

    def with_labels(self, name: str, **labels: str) -> Any:
        return self._metrics[name].labels(**self._labels, **labels)


_recorder: _Recorder | None = None


def start(labels: Mapping[str, Any]) -> None:
    """Create the metrics, once a process, with the labels of SGLang's scheduler metrics (model_name, tp_rank, ...)."""
    global _recorder
    if _recorder is None:
        _recorder = _Recorder(labels)


def start_for_scheduler(scheduler: Any) -> None:
    """:func:`start` with the labels of a built ``Scheduler``; nothing when the server runs without --enable-metrics."""
    collector = scheduler.metrics_collector
    if collector is not None:
        start(collector.labels)


def record_transfer(segments: int, n_bytes: int, seconds: float) -> None:
    """One chunk of one request has arrived on one decode rank. A rank that owns nothing of it is not a transfer."""
    if _recorder is not None and segments:
        _recorder["sglang:dcp_transfer_segments_total"].inc(segments)
        _recorder["sglang:dcp_transfer_bytes_total"].inc(n_bytes)
        _recorder["sglang:dcp_transfer_seconds"].observe(seconds)


def record_retry(batches: int = 1) -> None:
    """The transport refused batches of segments, and they are sent again."""
    if _recorder is not None:
        _recorder["sglang:dcp_transfer_retries_total"].inc(batches)


def record_refused_peer(reason: str) -> None:
    """A peer was refused. ``reason``: a short fixed word such as "block_size" (it becomes a label: no free text)."""
    if _recorder is not None:
        _recorder.with_labels("sglang:dcp_refused_peers_total", reason=reason).inc()


def record_batch(layout: DcpLayout, lengths: np.ndarray) -> None:
    """The running batch has requests of these lengths.

    Under rotation the rows of a rank need each request's last page, which only the device knows: the two gauges of rows
    stay unset. How many ranks a request leaves empty is the same wherever it begins.
    """
    if _recorder is not None:
        shards = shards_of(layout.plain, lengths)
        if not layout.is_rotated:
            _recorder["sglang:dcp_rows_per_rank_min"].set(shards.rows_min)
            _recorder["sglang:dcp_rows_per_rank_max"].set(shards.rows_max)
        _recorder["sglang:dcp_empty_shard_ratio"].set(shards.empty_ratio)


def report_decode_stats(original: Callable[..., Any], reporter: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around ``SchedulerMetricsReporter.report_decode_stats``: shards of the batch, as often as its own gauges."""
    result = original(reporter, *args, **kwargs)
    due = reporter.forward_ct_decode % reporter.decode_log_interval == 0
    if _recorder is not None and due and reporter.current_scheduler_metrics_enabled:
        from sglang_dcp_block import runtime

        batch = kwargs.get("running_batch") or (args[1] if len(args) > 1 else None) or reporter.scheduler.running_batch
        record_batch(runtime.active_layout(), np.array([req.seqlen for req in batch.reqs], np.int64))
    return result
