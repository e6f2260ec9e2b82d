"""One attention layer's decode step on one rank: block against token round-robin, shard against whole, Triton against
FlashInfer.

    python benchmark/decode.py --json benchmark/results/decode_h200.json --png benchmark/results/decode_h200.png
    python benchmark/decode.py --quick

The model is DeepSeek-V3's attention on tp 8: 16 query heads per rank, kv_lora 512, rope 64. Under DCP-P a rank decodes
the 16 * P heads of its group over 1/P of the KV, so P = 1 is the whole context on 16 heads. Rank 0, which holds the
most, is measured. Times are CUDA-graph replays between events, the variants of a cell in turns; a graph holds as many
layers as fit, each with KV of its own, and the time is per layer. Index building, which happens once per step and not
per layer, is timed apart.

"Bandwidth" is the shard's KV bytes over the time, against a large device-to-device copy measured in the same run
(bytes read plus written): what a kernel that only reads its KV once could reach.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import torch
import triton
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "gpu"))
import kit
from kit import DIM, LORA, Timing

from sglang_dcp_block.attention import flashinfer_mla
from sglang_dcp_block.attention.empty_shard import guard_empty_shards
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.mem_cache.kv_write import write_mla_kv

HEADS_PER_RANK = 16
PAGE = 64
BLOCK = 64
#: A server's context limit: it sets the table's width, the kernels' grids and the number of splits, not the work.
CONTEXT_LIMIT = 131072 + 1024
ROW_BYTES = DIM * 2
#: KV that one graph walks over: several times the L2 cache, where the cell has it.
_GRAPH_BYTES = 400 << 20
_MAX_LAYERS = 24

app = typer.Typer(add_completion=False)


@dataclass(frozen=True)
class Cell:
    dcp_size: int
    batch: int
    context: int

    @property
    def heads(self) -> int:
        return HEADS_PER_RANK * self.dcp_size

    def layouts(self) -> list[DcpLayout]:
        if self.dcp_size == 1:
            return [DcpLayout(1, 1)]
        return [DcpLayout(self.dcp_size, BLOCK), DcpLayout(self.dcp_size, 1)]

    def kv_bytes(self) -> int:
        return self.batch * DcpLayout(self.dcp_size, BLOCK).local_len(self.context, 0) * ROW_BYTES


class Inputs:
    """One cell's queries and pools, and per layout a table of slots in randomly ordered pages."""

    def __init__(self, cell: Cell, layers: int) -> None:
        self.cell = cell
        lens = [cell.context] * cell.batch
        self.seq_lens = torch.tensor(lens, dtype=torch.int64, device=kit.DEVICE)
        self.req_rows = torch.arange(cell.batch, dtype=torch.int64, device=kit.DEVICE)
        tables = {}
        for layout in cell.layouts():
            tables[layout], rows = kit.random_table(layout, lens, PAGE, seed=1, width=CONTEXT_LIMIT)
        self.tables: dict[DcpLayout, torch.Tensor] = tables
        self.pools = [torch.empty(rows, 1, DIM, dtype=kit.WORK, device=kit.DEVICE).normal_() for _ in range(layers)]
        self.q = kit.random_q(cell.batch, cell.heads, seed=2)


# -- attention ---------------------------------------------------------------------------------------------------------


def triton_step(inputs: Inputs, layout: DcpLayout) -> Any:
    """Attention, LSE and guard of all layers through the hooked Triton path; at P = 1 SGLang's own DCP1 call."""
    cell = inputs.cell
    backend = kit.TritonRank(layout, 0, inputs.pools[0], inputs.tables[layout], cell.heads, CONTEXT_LIMIT)
    backend.kv_indices = backend.kv_indices[: cell.batch * (layout.local_len(cell.context, 0) + 1)].clone()
    backend.forward_metadata.kv_indices = backend.kv_indices
    backend.split(backend.index(inputs.req_rows, inputs.seq_lens))
    if cell.dcp_size == 1:
        return lambda: [_stock_triton(backend, inputs.q, pool) for pool in inputs.pools]
    q = inputs.q[..., :LORA].contiguous(), inputs.q[..., LORA:].contiguous()

    def body() -> None:
        for pool in inputs.pools:
            backend.token_to_kv_pool.rows = pool
            backend.attend(q, inputs.seq_lens)

    return body


def _stock_triton(backend: kit.TritonRank, q: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """SGLang's decode kernels alone."""
    meta = backend.forward_metadata
    out = torch.empty(*q.shape[:2], LORA, dtype=q.dtype, device=q.device)
    backend.decode_attention_fwd(
        q, pool, pool[..., :LORA], out, backend.kv_indptr, backend.kv_indices, meta.attn_logits, meta.attn_lse,
        meta.num_kv_splits, backend.max_kv_splits, kit.SCALE, 1.0, 1.0, has_mla=True, use_pdl=backend.use_pdl,
    )  # fmt: skip
    return out


def sglang_kernel(inputs: Inputs, layout: DcpLayout) -> Any:
    """SGLang's own decode kernels over the same shard: no LSE over the splits, no guard."""
    cell = inputs.cell
    backend = kit.TritonRank(layout, 0, inputs.pools[0], inputs.tables[layout], cell.heads, CONTEXT_LIMIT)
    backend.split(backend.index(inputs.req_rows, inputs.seq_lens))
    return lambda: [_stock_triton(backend, inputs.q, pool) for pool in inputs.pools]


def flashinfer_step(inputs: Inputs, layout: DcpLayout) -> Any:
    cell = inputs.cell
    local = layout.local_len(inputs.seq_lens, 0)
    indptr = torch.zeros(cell.batch + 1, dtype=torch.int32, device=kit.DEVICE)
    torch.cumsum(local, dim=0, out=indptr[1:])
    rows = torch.zeros(cell.batch * layout.local_len(cell.context, 0), dtype=torch.int32, device=kit.DEVICE)
    kit.kernels.shard_rows_from_table(inputs.tables[layout], inputs.req_rows, local, indptr, rows, layout, 0)
    buffers = {
        "qo_indptr": torch.zeros_like(indptr),
        "kv_indptr": torch.zeros_like(indptr),
        "kv_indices": torch.zeros_like(rows),
        "kv_len_arr": torch.zeros(cell.batch, dtype=torch.int32, device=kit.DEVICE),
    }
    backend = kit.FlashInferRank(inputs.pools[0], cell.heads, hooked=layout.block_size > 1, graph=buffers)
    # A workspace of its own: the graphs of a cell are replayed in turns, and a plan lives in its workspace.
    kit.FlashInferRank._workspace = None
    backend.plan(indptr, rows, local)

    def body() -> None:
        for pool in inputs.pools:
            out, lse = backend.attend(inputs.q, pool)
            if layout.dcp_size > 1:
                guard_empty_shards(out, lse, inputs.seq_lens, layout, 0)

    return body


# -- index building ----------------------------------------------------------------------------------------------------


def triton_index(inputs: Inputs, layout: DcpLayout) -> Any:
    cell = inputs.cell
    backend = kit.TritonRank(layout, 0, inputs.pools[0], inputs.tables[layout], 1, CONTEXT_LIMIT)
    return lambda: backend.index(inputs.req_rows[: cell.batch], inputs.seq_lens)


def stock_triton_index(inputs: Inputs, layout: DcpLayout) -> Any:
    """TritonAttnBackend._dcp_kv_indices as SGLang ships it."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
    from sglang.srt.layers.dcp.layout import get_dcp_lens

    backend = kit.TritonRank(layout, 0, inputs.pools[0], inputs.tables[layout], 1, CONTEXT_LIMIT)
    backend._dcp_lens = lambda lens, start=None: get_dcp_lens(lens, layout.dcp_size, 0, start)
    return lambda: TritonAttnBackend._dcp_kv_indices(
        backend, inputs.req_rows, inputs.seq_lens, backend.kv_indptr, backend.kv_indices
    )


def flashinfer_index(inputs: Inputs, layout: DcpLayout, stock: bool) -> Any:
    """Shard the packed stream of slots and turn it into rows, as a graph replay does. Packing the stream is common."""
    from types import SimpleNamespace

    from sglang.srt.layers.dcp import layout as stock_layout
    from sglang.srt.layers.dcp import planner
    from sglang.srt.mem_cache import kv_index_translator as translator

    cell, p = inputs.cell, layout.dcp_size
    stream = torch.cat([inputs.tables[layout][i, : cell.context] for i in range(cell.batch)])
    indptr = torch.arange(cell.batch + 1, dtype=torch.int32, device=kit.DEVICE) * cell.context
    work, work_indptr = stream.clone(), indptr.clone()
    lens_cpu = torch.full((cell.batch,), layout.local_len(cell.context, 0), dtype=torch.int32)
    parallel = SimpleNamespace(dcp_enabled=True, dcp_size=p, dcp_rank=0, attn_dcp_size=p, attn_dcp_rank=0)
    plan = planner.plan_dcp_decode_metadata if stock else flashinfer_mla.plan_decode_metadata

    def body() -> None:
        # Both work in place, so every replay starts from the stream; the copies are the same for both.
        work.copy_(stream)
        work_indptr.copy_(indptr)
        lens = inputs.seq_lens.to(torch.int32)
        with (
            mock.patch.object(planner, "get_parallel", lambda: parallel),
            mock.patch.object(stock_layout, "get_parallel", lambda: parallel),
            mock.patch.object(translator, "get_parallel", lambda: parallel),
            mock.patch.object(flashinfer_mla, "active_layout", lambda: layout),
            mock.patch.object(flashinfer_mla, "active_rank", lambda: 0),
        ):
            total = plan(lens, work_indptr, work, True, {"kv_len_arr_cpu": lens_cpu}, cell.batch)
            rows = work[:total]
            rows.copy_(layout.local_index(rows))

    return body


# -- write -------------------------------------------------------------------------------------------------------------


def write_runs(tokens: int, dcp_size: int, repeats: int) -> dict[str, Any]:
    """The KV write of one layer, ``repeats`` layers a graph."""
    from sglang.kernels.ops.kvcache.mla_buffer import _set_mla_kv_buffer_impl

    rows = 1 << 18
    pool = torch.zeros(rows, 1, DIM, dtype=kit.WORK, device=kit.DEVICE)
    gen = torch.Generator().manual_seed(tokens)
    if tokens <= 64:  # decode: one token per request, anywhere
        loc = torch.randperm(rows * dcp_size - 1, generator=gen)[:tokens] + 1
    else:  # prefill: whole pages
        loc = (torch.randperm(rows * dcp_size // 512 - 1, generator=gen)[: tokens // 512] + 1)[:, None] * 512
        loc = (loc + torch.arange(512)).reshape(-1)
    loc = loc.to(kit.DEVICE)
    kv = kit.random_kv(tokens, 3).to(kit.WORK)[:, None]
    nope, rope = kv[..., :LORA], kv[..., LORA:]

    def ours(layout: DcpLayout) -> Any:
        return lambda: [write_mla_kv(pool, loc, nope, rope, layout, 0) for _ in range(repeats)]

    def stock() -> None:
        for _ in range(repeats):
            _set_mla_kv_buffer_impl(pool, loc, nope, rope, reserved_skip_index=0, dcp_world_size=dcp_size, dcp_rank=0)

    return {"B64": ours(DcpLayout(dcp_size, BLOCK)), "B1": ours(DcpLayout(dcp_size, 1)), "stock B1": stock}


# -- run ---------------------------------------------------------------------------------------------------------------


def timed(bodies: dict[str, Any], seconds: float) -> dict[str, Timing]:
    graphs = {name: kit.capture(body) for name, body in bodies.items()}
    return kit.time_alternating({name: graph.replay for name, graph in graphs.items()}, seconds=seconds)


def run_cell(cell: Cell, backends: list[str], seconds: float) -> dict[str, Any]:
    layers = max(1, min(_MAX_LAYERS, _GRAPH_BYTES // max(cell.kv_bytes(), 1)))
    inputs = Inputs(cell, layers)
    steps = {"triton": triton_step, "flashinfer": flashinfer_step}
    bodies = {
        f"{backend} B{layout.block_size}": steps[backend](inputs, layout)
        for backend in backends
        for layout in cell.layouts()
    }
    if cell.dcp_size > 1 and "triton" in backends:
        bodies["SGLang kernel B64"] = sglang_kernel(inputs, cell.layouts()[0])
    attention = {
        name: Timing(t.median / layers, t.p10 / layers, t.p90 / layers, t.count)
        for name, t in timed(bodies, seconds).items()
    }
    del bodies
    index = {}
    if cell.dcp_size > 1:
        block, token = cell.layouts()
        runs = {}
        if "triton" in backends:
            runs |= {
                "triton B64": triton_index(inputs, block),
                "triton B1": triton_index(inputs, token),
                "triton stock B1": stock_triton_index(inputs, token),
            }
        if "flashinfer" in backends:
            runs |= {
                "flashinfer B64": flashinfer_index(inputs, block, stock=False),
                "flashinfer B1": flashinfer_index(inputs, token, stock=False),
                "flashinfer stock B1": flashinfer_index(inputs, token, stock=True),
            }
        index = timed(runs, seconds / 3)
    return {
        "dcp_size": cell.dcp_size,
        "batch": cell.batch,
        "context": cell.context,
        "heads": cell.heads,
        "layers_per_graph": layers,
        "kv_bytes": cell.kv_bytes(),
        "attention_us": {name: t._asdict() for name, t in attention.items()},
        "index_us": {name: t._asdict() for name, t in index.items()},
    }


def run_writes(dcp_size: int, token_counts: list[int], seconds: float) -> list[dict[str, Any]]:
    results = []
    for tokens in token_counts:
        repeats = 32 if tokens <= 64 else 4
        found = timed(write_runs(tokens, dcp_size, repeats), seconds)
        results.append(
            {
                "dcp_size": dcp_size,
                "tokens": tokens,
                "write_us": {
                    n: {k: v / repeats if k != "count" else v for k, v in t._asdict().items()} for n, t in found.items()
                },
            }
        )
    return results


# -- show --------------------------------------------------------------------------------------------------------------


def _median(entry: dict[str, Any], kind: str, name: str) -> float | None:
    found = entry[kind].get(name)
    return None if found is None else found["median"]


def _ratio(a: float | None, b: float | None) -> str:
    return "" if a is None or b is None else f"{a / b:.3f}"


def show(result: dict[str, Any], console: Console) -> None:
    whole = {(c["batch"], c["context"]): c for c in result["cells"] if c["dcp_size"] == 1}
    table = Table(title=f"decode attention of one layer, us per layer, {result['environment']['gpu']}")
    for column in ("P", "batch", "context", "tri B64", "tri B64/B1", "tri/SGLang", "tri/DCP1", "fi B64", "fi B64/B1",
                   "fi/DCP1", "tri/fi", "tri bw", "fi bw", "idx tri", "/stock", "idx fi", "/stock"):  # fmt: skip
        table.add_column(column, justify="right")
    copy = result["copy_bytes_per_second"]
    for c in result["cells"]:
        block = "B1" if c["dcp_size"] == 1 else "B64"
        get = lambda name: _median(c, "attention_us", name)  # noqa: B023, E731
        index = lambda name: _median(c, "index_us", name)  # noqa: B023, E731
        tri, fi = get(f"triton {block}"), get(f"flashinfer {block}")
        one = whole.get((c["batch"], c["context"]))
        bandwidth = lambda us: "" if us is None else f"{c['kv_bytes'] / (us * 1e-6) / copy:.2f}"  # noqa: B023, E731
        table.add_row(
            str(c["dcp_size"]), str(c["batch"]), str(c["context"]),
            "" if tri is None else f"{tri:.1f}", "" if block == "B1" else _ratio(tri, get("triton B1")),
            _ratio(tri, get("SGLang kernel B64")),
            _ratio(tri, one and _median(one, "attention_us", "triton B1")) if block == "B64" else "",
            "" if fi is None else f"{fi:.1f}", "" if block == "B1" else _ratio(fi, get("flashinfer B1")),
            _ratio(fi, one and _median(one, "attention_us", "flashinfer B1")) if block == "B64" else "",
            _ratio(tri, fi), bandwidth(tri), bandwidth(fi),
            "" if index("triton B64") is None else f"{index('triton B64'):.1f}",
            _ratio(index("triton B64"), index("triton stock B1")),
            "" if index("flashinfer B64") is None else f"{index('flashinfer B64'):.1f}",
            _ratio(index("flashinfer B64"), index("flashinfer stock B1")),
        )  # fmt: skip
    console.print(table)
    writes = Table(title="KV write of one layer, us")
    for column in ("P", "tokens", "B64", "B1", "stock B1", "B64/stock"):
        writes.add_column(column, justify="right")
    for w in result["writes"]:
        us = {name: t["median"] for name, t in w["write_us"].items()}
        writes.add_row(
            str(w["dcp_size"]), str(w["tokens"]), *(f"{us[n]:.2f}" for n in ("B64", "B1", "stock B1")),
            _ratio(us["B64"], us["stock B1"]),
        )  # fmt: skip
    console.print(writes)
    console.print(f"copy bandwidth {copy / 1e12:.2f} TB/s; {result['seconds']:.0f} s; {result['environment']}")


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    batches = sorted({c["batch"] for c in result["cells"]})
    figure, axes = pyplot.subplots(2, len(batches), figsize=(5 * len(batches), 8), squeeze=False)
    for column, batch in enumerate(batches):
        for p in sorted({c["dcp_size"] for c in result["cells"]}):
            cells = sorted(
                (c for c in result["cells"] if (c["dcp_size"], c["batch"]) == (p, batch)), key=lambda c: c["context"]
            )
            contexts = [c["context"] for c in cells]
            block = "B1" if p == 1 else "B64"
            for backend, style in (("triton", "-o"), ("flashinfer", "--s")):
                us = [_median(c, "attention_us", f"{backend} {block}") for c in cells]
                if not us or None in us:
                    continue
                (line,) = axes[0][column].plot(
                    contexts, us, style, color=f"C{p.bit_length()}", label=f"{backend} P={p}"
                )
                if p > 1:
                    token = [_median(c, "attention_us", f"{backend} B1") for c in cells]
                    axes[1][column].plot(
                        contexts, [a / b for a, b in zip(us, token, strict=True)], style, color=line.get_color(),
                        label=f"{backend} P={p}",
                    )  # fmt: skip
        axes[0][column].set(title=f"batch {batch}", xscale="log", yscale="log", ylabel="us per layer")
        axes[1][column].set(xscale="log", xlabel="context, tokens", ylabel="B=64 over B=1")
        axes[1][column].axhline(1.0, color="grey", linewidth=0.8)
        axes[0][column].legend(fontsize=7)
    figure.suptitle(f"MLA decode, one layer, rank 0 of P, {result['environment']['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@app.command()
def main(
    dcp: Annotated[str, typer.Option(help="DCP sizes; 1 is the whole context on one rank.")] = "1,8,2,4",
    batches: Annotated[str, typer.Option(help="Requests per batch.")] = "1,8,64",
    contexts: Annotated[str, typer.Option(help="Tokens per request.")] = "1024,8192,32768,131072",
    backends: Annotated[str, typer.Option(help="Attention backends.")] = "triton,flashinfer",
    seconds: Annotated[float, typer.Option(help="Measuring time per cell.")] = 0.6,
    budget: Annotated[float, typer.Option(help="Seconds after which no further cell is started.")] = 3600.0,
    quick: Annotated[bool, typer.Option("--quick", help="A few cells, to see that everything runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot here.")] = None,
) -> None:
    """Measure and print one table; see the top of this file for what the numbers mean."""
    console = Console(width=200)
    if kit.DEVICE.type != "cuda":
        console.print("benchmark/decode.py measures compiled kernels: run it on a machine with a CUDA device")
        raise typer.Exit(1)
    if quick:
        dcp, batches, contexts, seconds = "1,8", "1,64", "1024,8192", 0.2
    numbers = [[int(x) for x in text.split(",")] for text in (dcp, batches, contexts)]
    cells = [Cell(p, b, n) for p in numbers[0] for b in numbers[1] for n in numbers[2]]
    started = time.monotonic()
    result: dict[str, Any] = {
        "environment": kit.environment(),
        "copy_bytes_per_second": kit.copy_bandwidth(),
        "replaced": "KV pool and backend objects by test/gpu/kit.py; kernels, splits and indices are SGLang's and ours",
        "rank": 0,
        "page_size": PAGE,
        "block_size": BLOCK,
        "cells": [],
        "writes": [],
        "failed": [],
    }
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=len(cells) + 1)
        for cell in cells:
            if time.monotonic() - started > budget:
                result["failed"].append({"cell": str(cell), "error": "not run: the time is up"})
                continue
            try:
                result["cells"].append(run_cell(cell, backends.split(","), seconds))
            except (RuntimeError, triton.CompilationError) as error:  # one cell too large must not lose the others
                result["failed"].append({"cell": str(cell), "error": str(error)[:500]})
            torch.cuda.empty_cache()
            progress.advance(task)
        result["writes"] = run_writes(max(numbers[0]), [1, 8, 64, 8192], seconds / 4)
        progress.advance(task)
    result["seconds"] = time.monotonic() - started
    result["cells"].sort(key=lambda c: (c["dcp_size"], c["batch"], c["context"]))
    if json_file:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(result, indent=1))
    if png:
        plot(result, png)
    show(result, console)
    for failure in result["failed"]:
        console.print(f"FAILED {failure['cell']}: {failure['error'][:300]}")
    raise typer.Exit(1 if result["failed"] else 0)


if __name__ == "__main__":
    app()
