"""Prefill to decode over Mooncake: token round-robin row by row, token round-robin through a pack buffer, whole blocks.

    python benchmark/transfer.py --json benchmark/results/transfer_NAME.json --png benchmark/results/transfer_NAME.png
    python benchmark/transfer.py --fresh --json benchmark/results/transfer_fresh_NAME.json
    python benchmark/transfer.py --quick

Two processes of one machine, each with Mooncake's real TransferEngine over TCP. One holds a DeepSeek-sized MLA cache
(bf16 rows of 1,152 bytes in 4 or 61 layers) and sends what decode rank 0 of P owns of a prompt; the other is that rank.
Pages are in random order on both sides, or with --fresh as pools that nobody has used give them out, one after another.
All variants of a cell send the same tokens in one run, in turns:

- ``token``: one segment per row and layer, SGLang's send without a pack buffer (its only way off CUDA);
- ``packed``: rows gathered into a pack buffer, then sent in runs that are contiguous at the destination, SGLang's way
  on CUDA. On CUDA the gather is SGLang's kernel, on CPU numpy's;
- ``block B``: this project's plan; segments go out from where they lie. Page size B, with --fresh in the order that
  disaggregation/placement.py gives them out in;
- ``block 64, by position``, with --fresh: pages in the order of positions, as without placement.py.

Batches are cut alike for all (SGLang itself hands over everything at once, which a TCP lane refuses above 2,048
segments). A large cell is a sample: as many layers are allocated as fit --memory-mib, and a send stops after
--sample-mib or 8,192 segments; a small one is sent several times over. Segments, bytes and memory in the table are
those of the whole prompt, GB/s those of the sample. "Planning" is everything from page ids to the lists that the engine
takes, for one rank and all layers, not sampled.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from output import progress_bar
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.mooncake import MAX_BATCH_SEGMENTS, send_batches
from sglang_dcp_block.disaggregation.placement import page_order, whole_pages
from sglang_dcp_block.disaggregation.plan import Segments, Side, addresses, plan_pair

ROW_BYTES = 1152
TOKEN_PAGE = 64
SAMPLE_SEGMENTS = 8192
#: A timing covers at least this much, in up to 16 sends.
SHORTEST_SEND = 8 << 20
BLOCKS = (16, 64, 128, 256)

app = typer.Typer(add_completion=False)


class Cell(NamedTuple):
    tokens: int
    dcp_size: int
    layers: int
    fresh: bool


@dataclass
class Row:
    """One variant in one cell. Counts are of one decode rank and the whole prompt; times in seconds.

    over_packed: seconds per byte over those of ``packed`` in the same turn, packing included, median over the turns.
    """

    tokens: int
    dcp_size: int
    layers: int
    fresh: bool
    variant: str
    segments: int
    segment_bytes: float
    bytes: int
    extra_bytes: int
    plan_s: float
    sample: float
    gbps: float
    gbps_low: float
    gbps_high: float
    pack_s: float
    over_packed: float


# -- the decode rank -----------------------------------------------------------------------------------------------


def transfer_engine() -> Any:
    os.environ["MC_FORCE_TCP"] = "1"
    os.environ.setdefault("GLOG_minloglevel", "2")
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("Mooncake's TransferEngine does not start over TCP on 127.0.0.1.")
    return engine


class Memory:
    """One registered allocation, on the CPU or on a GPU."""

    def __init__(self, engine: Any, size: int, device: str) -> None:
        self.size = size
        if device == "cpu":
            self.array: Any = np.zeros(size, np.uint8)
            self.address = self.array.ctypes.data
        else:
            import torch

            self.array = torch.zeros(size, dtype=torch.uint8, device=device)
            self.address = self.array.data_ptr()
        if engine is not None and engine.register_memory(self.address, size) != 0:
            raise SystemExit(f"Mooncake does not register {size} bytes on {device}.")

    def fill(self, values: np.ndarray) -> None:
        if isinstance(self.array, np.ndarray):
            self.array[:] = values
        else:
            import torch

            self.array.copy_(torch.from_numpy(values))

    def rows(self) -> np.ndarray:
        """(n, ROW_BYTES) on the host."""
        host = self.array if isinstance(self.array, np.ndarray) else self.array.cpu().numpy()
        return host[: self.size // ROW_BYTES * ROW_BYTES].reshape(-1, ROW_BYTES)


def decode_rank(pipe: Connection, size: int, device: str) -> None:
    engine = transfer_engine()
    memory = Memory(engine, size, device)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", memory.address))
    while (rows := pipe.recv()) is not None:
        pipe.send(memory.rows()[rows])


# -- the prefill server ----------------------------------------------------------------------------------------------


class Sender:
    """Shaped like SGLang's engine wrapper, for send_batches."""

    def __init__(self) -> None:
        self.engine = transfer_engine()

    def batch_transfer_sync(self, session: str, src: list[int], dst: list[int], sizes: list[int]) -> int:
        return self.engine.batch_transfer_sync_write(session, src, dst, sizes)

    def send_probe(self, session: str) -> int:
        return self.engine.send_probe(session)


@dataclass
class Bench:
    sender: Sender
    session: str
    pipe: Connection
    source: Memory
    pack: Memory
    target: int
    device: str
    sample_bytes: int

    def layers_at_hand(self, cell: Cell) -> int:
        return max(1, min(cell.layers, self.source.size // (ROW_BYTES * (cell.tokens + 256))))

    def send(self, src: np.ndarray, dst: np.ndarray, sizes: np.ndarray) -> float:
        began = time.perf_counter()
        problem, _ = send_batches(self.sender, self.session, src, dst, sizes)
        if problem:
            raise SystemExit(f"The transfer failed: {problem}")
        return time.perf_counter() - began


class Pages(NamedTuple):
    src: np.ndarray
    dst: np.ndarray


def pages_of(cell: Cell, layout: DcpLayout, page_size: int, placed: bool = True) -> Pages:
    """placed: by placement.py, where it has a say."""
    rng, virtual = np.random.default_rng(0), layout.virtual_page_size(page_size)
    src, dst = -(-cell.tokens // page_size), -(-cell.tokens // virtual)
    if not cell.fresh:
        return Pages(rng.permutation(src), rng.permutation(dst))
    if placed and whole_pages(layout, page_size):
        order = page_order(layout, page_size, np.array([0]), np.array([cell.tokens]))
        return Pages(order, np.arange(dst))
    return Pages(np.arange(src), np.arange(dst))


def plan_rank(layout: DcpLayout, rank: int, page_size: int, pages: Pages, tokens: int) -> Segments:
    src, dst = Side(DcpLayout(1), 0, page_size, pages.src), Side(layout, rank, page_size, pages.dst)
    return plan_pair(src, dst, 0, tokens)


def plan(cell: Cell, layout: DcpLayout, page_size: int, pages: Pages) -> Segments:
    return plan_rank(layout, 0, page_size, pages, cell.tokens)


def stock_lists(cell: Cell, pages: Pages, packed: bool) -> tuple[list, list, list]:
    """What SGLang's send_kvcache_dcp computes before it calls the engine, with its own functions."""
    from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan, group_concurrent_contiguous

    p = build_dcp_token_transfer_plan(
        *pages, physical_page_size=TOKEN_PAGE, dcp_size=cell.dcp_size, dcp_rank=0, num_kv_tokens=cell.tokens
    )
    rows = p.target_src_token_indices
    groups = group_concurrent_contiguous(np.arange(rows.size) if packed else rows, p.target_dst_token_indices)
    blocks = []
    for _ in range(cell.layers):
        blocks.extend(
            (int(s[0]) * ROW_BYTES, int(d[0]) * ROW_BYTES, len(s) * ROW_BYTES) for s, d in zip(*groups, strict=True)
        )
    src, dst, sizes = zip(*blocks, strict=True)
    return list(src), list(dst), list(sizes)


def our_lists(cell: Cell, layout: DcpLayout, page_size: int, pages: Pages) -> tuple[list, list, list]:
    zeros = [0] * cell.layers
    found = addresses(plan(cell, layout, page_size, pages), zeros, zeros, [ROW_BYTES] * cell.layers)
    return tuple(x.tolist() for x in found)  # type: ignore[return-value]


def timed(function: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


class Variant(NamedTuple):
    """A way to send one cell. step: sends a sample, returns (seconds packing, seconds in all). check: did it arrive."""

    name: str
    segments: int
    extra_bytes: int
    plan_lists: Callable[[], Any]
    step: Callable[[], tuple[float, float]]
    sample_bytes: int
    check: Callable[[], bool]


def cut(bench: Bench, src: np.ndarray, dst: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The sample: the first segments, up to the limits."""
    n = min(SAMPLE_SEGMENTS, max(1, int(np.searchsorted(np.cumsum(sizes), bench.sample_bytes, "right"))))
    return src[:n], dst[:n], sizes[:n]


def segments_variant(
    bench: Bench, cell: Cell, name: str, layout: DcpLayout, page_size: int, lists: Any, placed: bool = True
) -> Variant:
    """``token`` and ``block B``: send from where the rows lie."""
    pages = pages_of(cell, layout, page_size, placed)
    segments, layers = plan(cell, layout, page_size, pages), bench.layers_at_hand(cell)
    stride = (cell.tokens + 256) * ROW_BYTES
    rows = layout.local_len(cell.tokens + layout.virtual_page_size(page_size), 0)
    src_bases = [bench.source.address + i * stride for i in range(layers)]
    dst_bases = [bench.target + i * rows * ROW_BYTES for i in range(layers)]
    sample = cut(bench, *addresses(segments, src_bases, dst_bases, [ROW_BYTES] * layers))

    def step() -> tuple[float, float]:
        return 0.0, bench.send(*sample)

    return Variant(
        name,
        segments.n_rows.size * cell.layers,
        0,
        lambda: lists(pages),
        step,
        int(sample[2].sum()),
        lambda: arrived(bench, *sample),
    )


def packed_variant(bench: Bench, cell: Cell) -> Variant:
    layout = DcpLayout(cell.dcp_size)
    pages = pages_of(cell, layout, TOKEN_PAGE)
    found, layers = plan(cell, layout, TOKEN_PAGE, pages), bench.layers_at_hand(cell)
    stride, n = (cell.tokens + 256) * ROW_BYTES, found.n_rows.size
    rows = layout.local_len(cell.tokens + layout.virtual_page_size(TOKEN_PAGE), 0)
    # The pack buffer holds this rank's rows of as many layers as the sample needs, one layer after another.
    used = max(1, min(layers, bench.sample_bytes // (n * ROW_BYTES), bench.pack.size // (n * ROW_BYTES)))
    runs = merge(np.arange(n), found.dst_row)
    dst_bases = [bench.target + i * rows * ROW_BYTES for i in range(used)]
    bases = [bench.pack.address + i * n * ROW_BYTES for i in range(used)]
    sample = cut(bench, *addresses(runs, bases, dst_bases, [ROW_BYTES] * used))
    sources = [bench.source.address + i * stride for i in range(used)]

    def gather() -> None:
        if bench.device == "cpu":
            for i in range(used):
                layer = bench.source.array[i * stride : (i + 1) * stride].reshape(-1, ROW_BYTES)
                out = bench.pack.array[i * n * ROW_BYTES : (i + 1) * n * ROW_BYTES].reshape(n, ROW_BYTES)
                np.take(layer, found.src_row, axis=0, out=out)
            return
        import torch
        from sglang.kernels.ops.kvcache.pd_dcp_gather import copy_mla_rows_into_pack

        index = torch.as_tensor(found.src_row, device=bench.device)
        into = bench.pack.array[: used * n * ROW_BYTES]
        copy_mla_rows_into_pack(sources, index, into, [ROW_BYTES] * used, None)
        torch.cuda.synchronize()

    share = int(sample[2].sum()) / (used * n * ROW_BYTES)

    def step() -> tuple[float, float]:
        began = time.perf_counter()
        gather()
        packing = (time.perf_counter() - began) * share
        return packing, packing + bench.send(*sample)

    return Variant(
        "packed",
        runs.n_rows.size * cell.layers,
        n * ROW_BYTES * cell.layers,
        lambda: stock_lists(cell, pages, packed=True),
        step,
        int(sample[2].sum()),
        lambda: arrived(bench, *sample, source=bench.pack),
    )


def merge(src_row: np.ndarray, dst_row: np.ndarray) -> Segments:
    """Rows to runs that are contiguous on both sides."""
    heads = np.flatnonzero(np.r_[True, (np.diff(src_row) != 1) | (np.diff(dst_row) != 1)])
    return Segments(src_row[heads], dst_row[heads], np.diff(np.r_[heads, src_row.size]))


def arrived(bench: Bench, src: np.ndarray, dst: np.ndarray, sizes: np.ndarray, source: Memory | None = None) -> bool:
    """Ask the other process for the rows of the sample's first segments and compare all their bytes."""
    source = source or bench.source
    counts = (sizes[:64] // ROW_BYTES).astype(int)
    first = (src[:64] - np.uint64(source.address)).astype(np.int64) // ROW_BYTES
    there = (dst[:64] - np.uint64(bench.target)).astype(np.int64) // ROW_BYTES
    within = [np.arange(n) for n in counts]
    bench.pipe.send(np.concatenate([d + w for d, w in zip(there, within, strict=True)]))
    want = source.rows()[np.concatenate([s + w for s, w in zip(first, within, strict=True)])]
    return np.array_equal(bench.pipe.recv(), want)


def variants(bench: Bench, cell: Cell) -> Iterator[Variant]:
    token = DcpLayout(cell.dcp_size)
    yield segments_variant(
        bench, cell, "token", token, TOKEN_PAGE, lambda pages: stock_lists(cell, pages, packed=False)
    )
    yield packed_variant(bench, cell)
    for size, placed in [(size, True) for size in BLOCKS] + [(64, False)] * cell.fresh:
        layout = DcpLayout(cell.dcp_size, size)
        yield segments_variant(
            bench,
            cell,
            f"block {size}" if placed else f"block {size}, by position",
            layout,
            size,
            lambda pages, layout=layout, size=size: our_lists(cell, layout, size, pages),
            placed,
        )


def measure(bench: Bench, cell: Cell, repeats: int, check: bool) -> list[Row]:
    ways = list(variants(bench, cell))
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    for _ in range(repeats):
        for way in ways:  # in turns: a busy moment hits all variants alike
            times = max(1, min(16, SHORTEST_SEND // way.sample_bytes))
            steps = [way.step() for _ in range(times)]
            taken[way.name].append((sum(p for p, _ in steps) / times, sum(s for _, s in steps) / times))
    rows, packed = [], next(way.sample_bytes for way in ways if way.name == "packed")
    total = DcpLayout(cell.dcp_size)
    for way in ways:
        if check:
            way.step()
            if not way.check():
                raise SystemExit(f"{way.name}: rows arrived wrong in {cell}")
        over = [
            s / t / way.sample_bytes * packed for (_, s), (_, t) in zip(taken[way.name], taken["packed"], strict=True)
        ]
        speeds = sorted(way.sample_bytes / seconds / 1e9 for _, seconds in taken[way.name])
        size = 1 if way.name in ("token", "packed") else int(way.name.split()[1].rstrip(","))
        owned = (total if size == 1 else DcpLayout(cell.dcp_size, size)).local_len(cell.tokens, 0)
        whole = owned * ROW_BYTES * cell.layers
        packing = statistics.median(p for p, _ in taken[way.name]) * whole / way.sample_bytes
        rows.append(
            Row(
                *cell,
                way.name,
                way.segments,
                whole / way.segments,
                whole,
                way.extra_bytes,
                timed(way.plan_lists, 1 if cell.tokens * cell.layers > 1 << 20 else 3),
                way.sample_bytes / whole,
                statistics.median(speeds),
                speeds[0],
                speeds[-1],
                packing,
                statistics.median(over),
            )
        )
    return rows


def planning(tokens: int = 1 << 20, dcp_size: int = 8, block_size: int = 64) -> dict[str, float]:
    """Planning alone, all ranks: SGLang's plan of rows at B = 1 against our plan of segments, 1M tokens."""
    from sglang.srt.disaggregation.common.utils import build_dcp_token_transfer_plan

    cell, token, block = Cell(tokens, dcp_size, 1, fresh=False), DcpLayout(dcp_size), DcpLayout(dcp_size, block_size)
    for_token, for_block = pages_of(cell, token, TOKEN_PAGE), pages_of(cell, block, block_size)

    def stock() -> None:
        for rank in range(dcp_size):
            build_dcp_token_transfer_plan(
                *for_token, physical_page_size=TOKEN_PAGE, dcp_size=dcp_size, dcp_rank=rank, num_kv_tokens=tokens
            )

    def ours(layout: DcpLayout, page_size: int, pages: Pages) -> None:
        for rank in range(dcp_size):
            plan_rank(layout, rank, page_size, pages, tokens)

    def between(src: DcpLayout, dst: DcpLayout) -> None:
        pages = [
            np.random.default_rng(0).permutation(-(-tokens // x.virtual_page_size(TOKEN_PAGE))) for x in (src, dst)
        ]
        for ours, theirs in product(range(src.dcp_size), range(dst.dcp_size)):
            sides = Side(src, ours, TOKEN_PAGE, pages[0]), Side(dst, theirs, TOKEN_PAGE, pages[1])
            plan_pair(*sides, 0, tokens)

    seconds = {
        "stock": timed(stock, 5),
        "ours_block_1": timed(lambda: ours(token, TOKEN_PAGE, for_token), 5),
        f"ours_block_{block_size}": timed(lambda: ours(block, block_size, for_block), 5),
        "ours_block_16_to_64": timed(lambda: between(DcpLayout(dcp_size, 16), DcpLayout(dcp_size, 64)), 5),
    }
    return {
        "tokens": tokens,
        "dcp_size": dcp_size,
        **seconds,
        "ratio": seconds["stock"] / seconds[f"ours_block_{block_size}"],
    }


# -- reporting ---------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, Any]:
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    wheels = {
        d.metadata["Name"]: d.version for d in distributions() if "mooncake" in (d.metadata["Name"] or "").lower()
    }
    found = {
        "cpu": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "mooncake": wheels,
        "mooncake_settings": {k: v for k, v in os.environ.items() if k.startswith("MC_")},
        "device": device,
        "transport": "TCP on loopback",
    }
    if device != "cpu":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found


def table_of(rows: list[Row], cell: Cell) -> Table:
    mine = [r for r in rows if (r.tokens, r.dcp_size, r.layers, r.fresh) == cell]
    base = next(r for r in mine if r.variant == "token")
    table = Table(title=f"{cell.tokens} tokens, P = {cell.dcp_size}, {cell.layers} layers, one decode rank")
    for name in (
        "variant",
        "segments",
        "KiB each",
        "GB/s",
        "(low..high)",
        "x token",
        "time/packed",
        "planning ms",
        "extra MiB",
    ):
        table.add_column(name, justify="left" if name == "variant" else "right", no_wrap=True)
    for r in mine:
        table.add_row(
            r.variant,
            f"{r.segments:,}",
            f"{r.segment_bytes / 1024:.1f}",
            f"{r.gbps:.3f}",
            f"{r.gbps_low:.3f}..{r.gbps_high:.3f}",
            f"{r.gbps / base.gbps:.1f}",
            f"{r.over_packed:.2f}",
            f"{r.plan_s * 1e3:.2f}",
            f"{r.extra_bytes / 2**20:.0f}",
        )
    return table


def plot(rows: list[Row], where: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers, ranks = max(r.layers for r in rows), max(r.dcp_size for r in rows)
    figure, (speed, count) = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    for name in dict.fromkeys(r.variant for r in rows):
        mine = sorted(
            (r for r in rows if (r.variant, r.layers, r.dcp_size) == (name, layers, ranks)), key=lambda r: r.tokens
        )
        x, dashed = [r.tokens for r in mine], "--" if not name.startswith("block") else "-"
        (line,) = speed.plot(x, [r.gbps for r in mine], dashed, marker="o", label=name)
        speed.fill_between(
            x, [r.gbps_low for r in mine], [r.gbps_high for r in mine], alpha=0.15, color=line.get_color()
        )
        count.plot(x, [r.segments for r in mine], dashed, marker="o", label=name, color=line.get_color())
    for axes, label in ((speed, "GB/s to one decode rank (packing included)"), (count, "segments per decode rank")):
        axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize=8)
    figure.suptitle(f"{title}: P = {ranks}, {layers} layers", fontsize=10)
    figure.savefig(where, dpi=120)


@app.command()
def main(
    quick: Annotated[bool, typer.Option(help="Four small cells.")] = False,
    fresh: Annotated[
        bool, typer.Option(help="Pools that nobody has used: pages adjoin. Ten cells of 4 layers.")
    ] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all rows there.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    repeats: Annotated[int, typer.Option(help="Sends per variant and cell.")] = 5,
    device: Annotated[str, typer.Option(help="Where the KV lies: cpu, cuda:0, or auto.")] = "auto",
    memory_mib: Annotated[int, typer.Option(help="Size of the prefill side's KV buffer.")] = 640,
    sample_mib: Annotated[int, typer.Option(help="A send stops after this much.")] = 48,
) -> None:
    """Measure, print tables, and write JSON and a plot."""
    console = Console(width=max(120, Console().width))
    if device == "auto":
        import torch

        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    tokens = (1024, 8192) if quick else (1024, 4096, 16_384, 32_768, 131_072)
    ranks, layers = ((2, 8), (4,)) if quick or fresh else ((2, 4, 8), (4, 61))
    cells = [Cell(t, p, n, fresh) for t, p, n in product(tokens, ranks, layers)]
    memory, sample = memory_mib << 20, sample_mib << 20
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode_rank, args=(theirs, memory, device), daemon=True)
    process.start()
    try:
        if not pipe.poll(120):
            raise SystemExit("The decode process did not start.")
        session, target = pipe.recv()
        sender = Sender()
        source, pack = (Memory(sender.engine, memory // n, device) for n in (1, 2))
        fill = np.random.default_rng(0).integers(0, 256, source.size, np.uint8)
        source.fill(fill)
        bench = Bench(sender, session, pipe, source, pack, target, device, sample)
        bench.send(*(np.array([x], np.uint64) for x in (source.address, target, ROW_BYTES)))  # connect
        console.print("Planning 1M tokens for 8 ranks (imports SGLang)...")
        plans = planning()
        console.print(
            f"  SGLang, B = 1: {plans['stock'] * 1e3:.1f} ms; here, B = 1: {plans['ours_block_1'] * 1e3:.1f} ms; "
            f"here, B = 64: {plans['ours_block_64'] * 1e3:.2f} ms ({plans['ratio']:.0f} times less); "
            f"all 64 pairs of ranks from DCP 8, B = 16 to DCP 8, B = 64: {plans['ours_block_16_to_64'] * 1e3:.1f} ms"
        )
        rows: list[Row] = []
        with progress_bar(console) as progress:
            task = progress.add_task("cells", total=len(cells))
            for cell in cells:
                progress.update(task, description=f"{cell.tokens} tokens, P={cell.dcp_size}, {cell.layers} layers")
                rows += measure(bench, cell, repeats, check=cell.tokens <= 8192)
                progress.advance(task)
        pipe.send(None)
        process.join(5)
    finally:
        process.kill()
    shown = [c for c in cells if c.dcp_size == 8 and c.tokens in (1024, 32_768, 131_072)]
    for cell in cells if quick or fresh else shown:
        console.print(table_of(rows, cell))
    about = machine(device)
    console.print(f"{about['cpu']}, {about['cores']} cores, {about['transport']}, {about['mooncake']}")
    if json_path:
        settings = {
            "repeats": repeats,
            "memory_mib": memory_mib,
            "sample_mib": sample_mib,
            "sample_segments": SAMPLE_SEGMENTS,
            "batch_segments": MAX_BATCH_SEGMENTS,
            "row_bytes": ROW_BYTES,
            "command": " ".join(["python", *sys.argv]),
        }
        found = {"machine": about, "settings": settings, "planning": plans, "rows": [asdict(r) for r in rows]}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if png:
        plot(rows, png, f"{about['cpu']}, {about['cores']} cores, {about['transport']}")


if __name__ == "__main__":
    app()
