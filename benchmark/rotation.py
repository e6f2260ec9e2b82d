"""How evenly 1,000 short requests lie on the ranks, with and without a rotated start: SGLang's own paged allocator.

    python benchmark/rotation.py --json benchmark/results/rotation.json --png benchmark/results/rotation.png

Requests come and go on a CPU copy of SGLang's ``PagedTokenToKVPoolAllocator``, whose pages are virtual pages of the
layout, and grow by a token each step. Every few steps the rows of the running requests are counted on each rank under
four rules:

- ``none``: position 0 of a request lies on rank 0;
- ``first page``: a request starts at a rank that its first page gives, so all that share a prefix start alike;
- ``each page``: every virtual page starts at rank id % P;
- ``each page, mixed``: what --dcp-rotate does (:class:`RotatedLayout`), rank (id + id // P) % P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from output import progress_bar, write_results
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.dcp.layout import DcpLayout, RotatedLayout

app = typer.Typer(add_completion=False)

# -- the rules -------------------------------------------------------------------------------------------------------


class ByIdAlone(RotatedLayout):
    """A simpler rule, for comparison."""

    def shift(self, page: Any) -> Any:
        """id % P."""
        return DcpLayout(self.dcp_size).owner(page)


def rows_per_rank(layout: DcpLayout, lengths: np.ndarray, slots: np.ndarray | None = None) -> np.ndarray:
    """(P,) rows of all requests, each dealt out as the page of its slot (n,) is: earlier pages are even anyway."""
    ranks = np.arange(layout.dcp_size)
    turns = layout.turn(ranks, slots[:, None]) if isinstance(layout, RotatedLayout) else ranks
    return layout.plain.local_len(lengths[:, None], turns).sum(axis=0)


#: Rows of lengths, first and last slots under a rotated layout.
RULES: dict[str, Callable[[RotatedLayout, np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "none": lambda layout, lengths, first, last: rows_per_rank(layout.plain, lengths),
    "first page": lambda layout, lengths, first, last: rows_per_rank(layout, lengths, first),
    "each page": lambda layout, lengths, first, last: rows_per_rank(ByIdAlone(**vars(layout)), lengths, last),
    "each page, mixed": lambda layout, lengths, first, last: rows_per_rank(layout, lengths, last),
}

# -- requests on the allocator -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """``requests`` at a time. Prompts are log-normal, or all ``fixed`` virtual pages long; answers are geometric.

    shared_pages: virtual pages at the start of every prompt that all requests share, on top of that length.
    """

    name: str
    requests: int = 1000
    median: float = 300
    sigma: float = 0.7
    answer: float = 150
    fixed: float = 0.0
    shared_pages: int = 0
    steps: int = 400
    every: int = 20


def loads(dcp_size: int) -> tuple[Load, ...]:
    """The last two are hard on ``each page``: all requests take the same number of pages, one after another."""
    return (
        Load("short prompts"),
        Load("short prompts after a shared one", shared_pages=2),
        Load("all of 1.25 pages, unused pool", fixed=1.25, steps=0),
        Load("all of P - 0.75 pages, unused pool", fixed=dcp_size - 0.75, steps=0),
    )


LONGEST = 8192


class Running:
    """Requests that hold slots of a real allocator. table (n, tokens) int64 slots, length (n,) int64."""

    def __init__(self, layout: DcpLayout, page_size: int, load: Load, seed: int) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator

        self.torch, self.load, self.rng = torch, load, np.random.default_rng(seed)
        self.page = layout.virtual_page_size(page_size)
        self.fixed = int(load.fixed * self.page)
        longest = max(LONGEST, self.fixed) + load.shared_pages * self.page
        # Twice what they need on average, so that the free list is never short and never nearly full.
        pages = 2 * load.requests * max(2, -(-max(self.fixed, 600) // self.page)) + load.shared_pages
        self.allocator = PagedTokenToKVPoolAllocator(
            pages * self.page, self.page, torch.bfloat16, "cpu", None, need_sort=True
        )
        self.allocator.use_triton_kernels = False  # the tensors are on the CPU, whatever the machine has
        self.table = torch.zeros((load.requests, longest), dtype=torch.int64)
        self.length = np.zeros(load.requests, np.int64)
        self.left = np.zeros(load.requests, np.int64)
        self.shared = self.allocator.alloc(load.shared_pages * self.page) if load.shared_pages else None
        self.prefix = load.shared_pages * self.page
        self.admit(np.arange(load.requests))

    def admit(self, slots: np.ndarray) -> None:
        """Give new requests their prompts, in one extend."""
        n, load, torch = len(slots), self.load, self.torch
        drawn = np.exp(self.rng.normal(np.log(load.median), load.sigma, n)).astype(np.int64).clip(1, LONGEST // 2)
        length = self.prefix + (np.full(n, self.fixed) if self.fixed else drawn)
        self.length[slots], self.left[slots] = length, self.rng.geometric(1 / load.answer, n).clip(1, LONGEST // 2)
        lens = torch.from_numpy(length)
        before = torch.full_like(lens, self.prefix)
        last = torch.full_like(lens, -1 if self.shared is None else int(self.shared[-1]))
        out = self.allocator.alloc_extend(before, before, lens, lens, last, int((length - self.prefix).sum()))
        for slot, own in zip(slots.tolist(), out.split((length - self.prefix).tolist()), strict=True):
            if self.shared is not None:
                self.table[slot, : self.prefix] = self.shared
            self.table[slot, self.prefix : self.prefix + own.numel()] = own

    def step(self) -> None:
        """The finished leave, others take their place, and all grow by a token."""
        torch = self.torch
        done = np.flatnonzero(self.left == 0)
        for i in done.tolist():
            self.allocator.free(self.table[i, self.prefix : self.length[i]].clone())
        if done.size:
            self.admit(done)
        rows, lens = torch.arange(len(self.length)), torch.from_numpy(self.length)
        new = self.allocator.alloc_decode(lens + 1, lens + 1, self.table[rows, lens - 1])
        self.table[rows, lens] = new
        self.length, self.left = self.length + 1, self.left - 1

    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(n,) first and last slot of each request."""
        last = self.table[self.torch.arange(len(self.length)), self.torch.from_numpy(self.length - 1)]
        return self.table[:, 0].numpy().copy(), last.numpy()


def samples(running: Running) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(lengths, first slots, last slots): at once without steps, else every few in the second half of them."""
    load = running.load
    if load.steps == 0:
        yield (running.length.copy(), *running.ends())
    for step in range(load.steps):
        running.step()
        if step >= load.steps // 2 and step % load.every == 0:
            yield (running.length.copy(), *running.ends())


def measure(dcp_size: int, blocks: tuple[int, ...], page_size: int, load: Load, seed: int) -> list[dict[str, Any]]:
    """Rows per rank under every rule, for block sizes that share a page size and so an allocator."""
    layouts = [DcpLayout(dcp_size, block) for block in blocks]
    found: dict[tuple[int, str], list[np.ndarray]] = {}
    for lengths, first, last in samples(Running(layouts[0], page_size, load, seed)):
        for layout in layouts:
            for rule, rows in RULES.items():
                counted = rows(layout.rotated(page_size), lengths, first, last)
                found.setdefault((layout.block_size, rule), []).append(counted)
    lines = []
    for (block, rule), rows in found.items():
        ratio = np.array([r.max() / r.mean() for r in rows])
        line: dict[str, Any] = {"load": load.name, "dcp_size": dcp_size, "block_size": block, "page_size": page_size}
        line |= {"rule": rule, "samples": len(rows), "max_over_mean": float(np.median(ratio))}
        line |= {"worst": float(ratio.max()), "rows": np.mean(rows, axis=0).round(1).tolist()}
        lines.append(line)
    return lines


def table(lines: list[dict[str, Any]], name: str) -> Table:
    out = Table(title=f"{name}: rows of the fullest rank over the mean, median over samples (worst)")
    for column in ("P", "B", *RULES):
        out.add_column(column, justify="right")
    mine = [x for x in lines if x["load"] == name]
    for p, b in dict.fromkeys((x["dcp_size"], x["block_size"]) for x in mine):
        shown = [x for x in mine if (x["dcp_size"], x["block_size"]) == (p, b)]
        out.add_row(str(p), str(b), *(f"{x['max_over_mean']:.3f} ({x['worst']:.3f})" for x in shown))
    return out


def plot(lines: list[dict[str, Any]], where: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    mine = [x for x in lines if x["load"] == lines[0]["load"] and x["dcp_size"] == 8]
    blocks = list(dict.fromkeys(x["block_size"] for x in mine))
    figure, axes = plt.subplots(1, len(blocks), figsize=(5 * len(blocks), 3.8), constrained_layout=True, squeeze=False)
    for axis, block in zip(axes[0], blocks, strict=True):
        shown = [x for x in mine if x["block_size"] == block and x["rule"] in ("none", "each page, mixed")]
        for i, x in enumerate(shown):
            axis.bar(np.arange(len(x["rows"])) + 0.4 * i, x["rows"], 0.4, label=x["rule"])
        axis.set(title=f"P = 8, B = {block}", xlabel="rank", ylabel="rows, mean over samples")
        axis.legend(fontsize=8)
    figure.suptitle("KV rows of 1,000 short requests by rank", fontsize=10)
    figure.savefig(where, dpi=110)


@app.command()
def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Write all lines there.")] = None,
    txt: Annotated[Path | None, typer.Option(help="Write the tables there.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot there.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of lengths and answers.")] = 0,
    quick: Annotated[bool, typer.Option(help="P = 8 and the first load only.")] = False,
) -> None:
    """Count rows per rank for every load, layout and rule."""
    console = Console(width=max(120, Console().width), record=True)
    kinds, sizes = (1, (8,)) if quick else (4, (2, 4, 8))
    pages = (((16, 64), 64), ((256,), 256))
    cells = [(p, *blocks, loads(p)[k]) for k in range(kinds) for p in sizes for blocks in pages]
    lines: list[dict[str, Any]] = []
    with progress_bar(Console(stderr=True)) as progress:
        task = progress.add_task("allocators", total=len(cells))
        for p, blocks, page, load in cells:
            progress.update(task, description=f"{load.name}, P = {p}, page {page}")
            lines += measure(p, blocks, page, load, seed)
            progress.advance(task)
    for name in dict.fromkeys(x["load"] for x in lines):
        console.print(table(lines, name))
    found = {"seed": seed, "loads": [asdict(load) for load in loads(max(sizes))[:kinds]], "lines": lines}
    write_results(found, console, json_path, txt)
    if png:
        plot(lines, png)


if __name__ == "__main__":
    app()
