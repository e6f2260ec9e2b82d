"""A cluster on paper: what the layout of KV does to transfers and balance with thousands of GPUs and 1M-token prompts.

    python benchmark/simulate.py --json benchmark/results/scale.json --png benchmark/results/scale.png
    python benchmark/simulate.py --quick

A discrete-event model. Prompts arrive at random; the least busy prefill node computes them chunk by chunk; rank r of it
sends rank r of a decode node what that rank owns of each chunk, one send after another per sender, and a receiver takes
bytes no faster than its link. The prompt's KV then stays on the decode node while tokens are generated. Segments and
rows come from plan.py and layout.py. What a segment costs is in link_costs.py: fitted to this repository's measurements
for TCP, assumed for RDMA. docs/scale.md says what is modelled, what is assumed, and where each constant comes from.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from link_costs import LAYERS, ROW_BYTES, WAYS, Link, Share, Way, links, shares, validate
from output import progress_bar, write_results
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.dcp.layout import DcpLayout

app = typer.Typer(add_completion=False)


# -- the cluster -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cluster:
    """nodes: prefill nodes, and as many decode nodes, of ``ranks`` GPUs with a NIC each.

    flops: a prefill node's, as reached. weights: active parameters. pair_flops: of one query-key pair in all layers.
    chunk: tokens of a prefill chunk, a multiple of every page size. hold_s: mean seconds of generation, exponential.
    fresh: the pages of a request adjoin on both sides; otherwise no two do.
    """

    nodes: int = 256
    ranks: int = 8
    flops: float = 8 * 989e12 * 0.4
    weights: float = 37e9
    pair_flops: float = LAYERS * 2 * 128 * (192 + 128)
    chunk: int = 16_384
    hold_s: float = 10.0
    fresh: bool = False

    @property
    def gpus(self) -> int:
        return 2 * self.nodes * self.ranks

    def prefill_s(self, start: float, length: float) -> float:
        """Seconds of one chunk: the weights for each token, attention to everything before it."""
        pairs = length * (start + length / 2)
        return (2 * self.weights * length + self.pair_flops * pairs) / self.flops


@dataclass(frozen=True)
class Load:
    """Prompts: log-normal lengths up to ``cap``, a share of them 1M tokens. busy: prefill's load in the long run."""

    median: float = 8192
    sigma: float = 1.2
    cap: int = 262_144
    million: float = 0.001
    busy: float = 0.7
    per_node: int = 100
    at_least: int = 6000


class Requests(NamedTuple):
    """arrival (n,) seconds, length (n,) tokens, hold (n,) seconds of generation."""

    arrival: np.ndarray
    length: np.ndarray
    hold: np.ndarray


def draw(cluster: Cluster, load: Load, seed: int) -> Requests:
    rng = np.random.default_rng(seed)
    n = max(load.at_least, load.per_node * cluster.nodes)
    length = np.exp(rng.normal(np.log(load.median), load.sigma, n)).astype(np.int64).clip(1, load.cap)
    length[rng.random(n) < load.million] = 1 << 20
    service = np.mean([cluster.prefill_s(0, int(x)) for x in length])
    gaps = rng.exponential(service / load.busy / cluster.nodes, n)
    return Requests(np.cumsum(gaps), length, rng.exponential(cluster.hold_s, n))


@dataclass
class Outcome:
    """Per request: seconds to the first token with its KV in place, and of that after prefill. Then totals and samples.

    in_flight_s: integral of the number of unfinished requests over time. waiting: descriptors ahead of a send when it
    is queued. balance: largest over mean rows of a decode node's ranks, at each arrival. resident: (nodes, ranks) rows
    left at the end. sends: (sends, 4) time of the end, seconds of the sender, descriptors, sender.
    """

    ttft: np.ndarray
    tail: np.ndarray
    rows: np.ndarray
    segments: int
    in_flight_s: float
    waiting: np.ndarray
    balance: np.ndarray
    resident: np.ndarray
    sends: np.ndarray


class Job(NamedTuple):
    request: int
    share: Share


def simulate(cluster: Cluster, way: Way, link: Link, requests: Requests) -> Outcome:
    """Run until every request has left. Deterministic."""
    n, nodes, ranks = len(requests.arrival), cluster.nodes, cluster.ranks
    layout = DcpLayout(ranks, way.block_size)
    prefill_free, receiver_free = np.zeros(nodes), np.zeros((nodes, ranks))
    queues: list[deque[Job]] = [deque() for _ in range(nodes * ranks)]
    queued = np.zeros(nodes * ranks, np.int64)  # descriptors in the queue, the running send's among them
    resident = np.zeros((nodes, ranks), np.int64)
    owned = layout.local_len(requests.length[:, None], np.arange(ranks))
    at, to, pending, done_prefill = (np.zeros(n, np.int64) for _ in range(4))
    ttft, prefilled, rows = np.zeros(n), np.zeros(n), np.zeros((n, ranks), np.int64)
    waiting: list[int] = []
    balance: list[float] = []
    sends: list[tuple[float, float, int, int]] = []
    begun = np.zeros(nodes * ranks)
    in_flight, in_flight_s, last = 0, 0.0, 0.0
    sent_segments = 0
    order = iter(range(sys.maxsize))
    events: list[tuple] = [(t, next(order), "arrive", i, 0, 0) for i, t in enumerate(requests.arrival.tolist())]
    heapq.heapify(events)

    def push(time: float, kind: str, *what: int) -> None:
        heapq.heappush(events, (time, next(order), kind, *what))

    def begin(now: float, sender: int) -> None:
        job, begun[sender] = queues[sender][0], now
        push(now + link.local(way, job.share), "send", job.request, sender, 0)

    while events:
        now, _, kind, i, a, b = heapq.heappop(events)
        in_flight_s += in_flight * (now - last)
        last = now
        if kind == "arrive":
            in_flight += 1
            at[i], to[i] = prefill_free.argmin(), resident.sum(axis=1).argmin()
            resident[to[i]] += owned[i]
            balance.append(float(resident[to[i]].max() / resident[to[i]].mean()))
            ready = max(now, float(prefill_free[at[i]]))
            for start in range(0, int(requests.length[i]), cluster.chunk):
                length = min(cluster.chunk, int(requests.length[i]) - start)
                ready += cluster.prefill_s(start, length)
                push(ready, "chunk", i, start, length)
            prefill_free[at[i]] = prefilled[i] = ready
        elif kind == "chunk":
            done_prefill[i] += b
            for rank, share in enumerate(shares(way, ranks, a, b, cluster.fresh)):
                if share.rows:
                    sender = int(at[i]) * ranks + rank
                    waiting.append(int(queued[sender]))
                    queued[sender] += link.descriptors(share)
                    queues[sender].append(Job(i, share))
                    pending[i] += 1
                    if len(queues[sender]) == 1:
                        begin(now, sender)
        elif kind == "send":
            share, rank = queues[a][0].share, a - int(at[i]) * ranks
            # A receiver is a queue of bytes: a slow sender doesn't keep others from it.
            free = max(now, float(receiver_free[to[i], rank])) + link.wire(share)
            receiver_free[to[i], rank] = free
            push(max(now + link.send(share), free), "sent", i, a, rank)
        elif kind == "sent":
            share = queues[a].popleft().share
            queued[a] -= link.descriptors(share)
            sends.append((now, now - float(begun[a]), link.descriptors(share), a))
            rows[i, b] += share.rows
            sent_segments += share.segments * LAYERS
            pending[i] -= 1
            if pending[i] == 0 and done_prefill[i] == requests.length[i]:
                in_flight -= 1
                ttft[i] = now - requests.arrival[i]
                push(now + float(requests.hold[i]), "leave", i, 0, 0)
            if queues[a]:
                begin(now, a)
        else:
            resident[to[i]] -= owned[i]
    tail = requests.arrival + ttft - prefilled
    samples = np.array(waiting), np.array(balance), resident, np.array(sends)
    return Outcome(ttft, tail, rows, sent_segments, in_flight_s, *samples)


# -- reporting ---------------------------------------------------------------------------------------------------------


def summary(cluster: Cluster, load: Load, way: Way, link: Link, requests: Requests) -> dict[str, Any]:
    """One line of the results: of what happens after the first tenth of the arrivals and before the last."""
    found = simulate(cluster, way, link, requests)
    steady = slice(len(requests.arrival) // 10, None)
    began, ended = float(requests.arrival[steady][0]), float(requests.arrival[-1])
    inside = (found.sends[:, 0] >= began) & (found.sends[:, 0] <= ended)
    seconds, descriptors, sender = found.sends[inside, 1:].T
    busy = np.bincount(sender.astype(int), seconds, minlength=found.resident.size) / (ended - began)
    pages = "fresh pools" if cluster.fresh else "used pools"
    label = f"{cluster.gpus:,} GPUs, {link.name}, {pages}, median prompt {load.median:,.0f} tokens"
    line: dict[str, Any] = {"scenario": label, "way": way.name}
    line["descriptors_per_nic_s"] = descriptors.sum() / busy.size / (ended - began)
    line |= {"sender_busy_mean": busy.mean(), "sender_busy_max": busy.max()}
    line["waiting_p99"] = np.percentile(found.waiting, 99)
    for name, values in (("ttft", found.ttft), ("tail", found.tail), ("balance", found.balance)):
        line |= {f"{name}_p{q}": np.percentile(values[steady], q) for q in (50, 99)}
    return {k: v if isinstance(v, str) else float(v) for k, v in line.items()}


def million(ranks: int, found: dict[str, Link]) -> list[dict[str, Any]]:
    """One prompt of 1M tokens, rank 0's part, sent alone."""
    lines = []
    for way in WAYS:
        share, fresh = (shares(way, ranks, 0, 1 << 20, fresh)[0] for fresh in (False, True))
        line: dict[str, Any] = {"way": way.name, "segments": share.segments * LAYERS}
        line["descriptors"] = share.descriptors * LAYERS
        line["segments_in_fresh_pools"] = fresh.segments * LAYERS
        line["rank_0_rows"] = share.rows
        line["pack_buffer_bytes"] = Cluster().chunk * LAYERS * ROW_BYTES if way.packed else 0
        line["planning_s"] = found["tcp"].planning(way, share)
        line["seconds"] = {k: link.local(way, share) + link.send(share) for k, link in found.items()}
        lines.append(line)
    return lines


def scenarios(quick: bool) -> list[tuple[Cluster, Load, str]]:
    if quick:
        return [(Cluster(nodes=4), Load(at_least=200, per_node=0), "rdma 1 us")]
    sizes = [(Cluster(nodes=n), Load(), "rdma 1 us") for n in (8, 64, 256)]
    costs = [
        (Cluster(nodes=64), Load(), name) for name in ("rdma 1 us, planning free", "rdma 0.1 us", "rdma 3 us", "tcp")
    ]
    short = [(Cluster(nodes=64), Load(median=300, sigma=1.0, million=0.0), "rdma 1 us")]
    fresh = [(Cluster(nodes=64, fresh=True), Load(), name) for name in ("rdma 1 us", "tcp")]
    return [*sizes, *costs, *fresh, *short]


def table(lines: list[dict[str, Any]], title: str) -> Table:
    out = Table(title=title)
    columns = "way|TTFT p50 s|p99 s|KV tail p50 ms|p99 ms|descr/s/NIC|ahead p99|busy|rows max/mean p50|p99"
    for name in columns.split("|"):
        out.add_column(name, justify="left" if name == "way" else "right")
    for x in lines:
        out.add_row(
            x["way"], f"{x['ttft_p50']:.2f}", f"{x['ttft_p99']:.2f}", f"{x['tail_p50'] * 1e3:.2f}",
            f"{x['tail_p99'] * 1e3:.1f}", f"{x['descriptors_per_nic_s']:,.0f}", f"{x['waiting_p99']:,.0f}",
            f"{x['sender_busy_mean']:.2f}", f"{x['balance_p50']:.3f}", f"{x['balance_p99']:.3f}",
        )  # fmt: skip
    return out


def plot(lines: list[dict[str, Any]], where: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), constrained_layout=True)
    names = [way.name for way in WAYS]
    for label in dict.fromkeys(x["scenario"] for x in lines):
        mine = [x for x in lines if x["scenario"] == label]
        for axis, key in zip(axes, ("tail_p99", "descriptors_per_nic_s", "balance_p99"), strict=True):
            axis.plot([x["way"] for x in mine], [x[key] for x in mine], marker="o", label=label)
    titles = (
        "KV after the end of prefill, p99, s",
        "descriptors per second and NIC",
        "KV rows, largest rank over mean, p99",
    )
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_yscale("log")
        axis.set_xticks(range(len(names)), names, rotation=30)
        axis.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=7)
    figure.savefig(where, dpi=110)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="One small cluster.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write everything there.")] = None,
    txt: Annotated[Path | None, typer.Option(help="Write the tables there.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths and generation times.")] = 0,
    requests: Annotated[int | None, typer.Option(help="Requests per run, instead of the default.")] = None,
) -> None:
    """Simulate every way in every scenario, print tables, and write JSON and a plot."""
    console = Console(width=max(120, Console().width), record=True)
    found, lines = links(), []
    planned = scenarios(quick)
    if requests is not None:
        planned = [(cluster, replace(load, at_least=requests, per_node=0), name) for cluster, load, name in planned]
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("runs", total=len(planned) * len(WAYS))
        for cluster, load, name in planned:
            drawn = draw(cluster, load, seed)
            for way in WAYS:
                progress.update(task, description=f"{cluster.gpus:,} GPUs, {name}, {way.name}")
                lines.append(summary(cluster, load, way, found[name], drawn))
                progress.advance(task)
    for at in range(0, len(lines), len(WAYS)):
        console.print(table(lines[at : at + len(WAYS)], lines[at]["scenario"]))
    one = million(Cluster().ranks, found)
    alone = Table(title="One prompt of 1,048,576 tokens, 61 layers, decode rank 0 of 8, sent alone")
    for name in ("way", "segments", "in fresh pools", "work requests", *(f"{k}, s" for k in found)):
        alone.add_column(name, justify="left" if name == "way" else "right")
    for x in one:
        counts = (x["segments"], x["segments_in_fresh_pools"], x["descriptors"])
        alone.add_row(x["way"], *(f"{n:,}" for n in counts), *(f"{t:.2f}" for t in x["seconds"].values()))
    console.print(alone)
    checked = validate()
    for where, report in checked.items():
        console.print(f"Predicted over measured seconds, {where}, fitted on {' and '.join(report['fitted_on'])}:")
        for group, ratio in report["predicted"].items():
            shown = ratio if isinstance(ratio, float) else ratio["median"]
            spread = "" if isinstance(ratio, float) else f" (median; {ratio['low']:.2f} to {ratio['high']:.2f})"
            console.print(f"  {group}: {shown:.2f}{spread}")
    about = {
        "seed": seed, "cluster": asdict(Cluster()), "links": {k: asdict(x) for k, x in found.items()},
        "loads": [asdict(load) for _, load, _ in planned], "validation": checked, "million": one, "runs": lines,
    }  # fmt: skip
    write_results(about, console, json_path, txt)
    if png:
        plot(lines, png)


if __name__ == "__main__":
    app()
