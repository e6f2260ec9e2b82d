"""Explain a layout: numbers as one JSON-ready dict, and two pictures drawn from that dict alone.

``explain`` asks :class:`DcpLayout`; ``render_text`` and ``render_png`` ask only the dict, so a picture can't show
anything but what the rule says.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dcp_block.advise import (
    ModelShape,
    UserError,
    allocated_tokens,
    capacity_tokens,
    prefix_hit_tokens,
    row_bytes,
    segment_bytes,
    shard_lengths,
    token_bytes,
)
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation.plan import Segments, Side, plan_pair

# One symbol and one colour a rank; symbols alone must be enough where there is no colour.
SYMBOLS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Eight tones that stay apart for colour-blind readers and on dark and light backgrounds (after Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a7a00", "#56b4e9", "#7f3fbf", "#5f6b6d")
MAX_RANKS = len(SYMBOLS)
ZOOM = 64
SHOWN_PIECES = 8


def explain(
    tokens: int,
    dcp_size: int,
    block_size: int,
    page_size: int,
    *,
    prefix: int | None = None,
    chunk: int | None = None,
    shape: ModelShape | None = None,
    dtype: str = "bf16",
    memory: int | None = None,
) -> dict[str, Any]:
    """Everything the pictures show about one request of ``tokens`` tokens.

    Args:
        prefix: tokens of the request that are in KV already; also taken as a prefix shared with another request.
        chunk: tokens that the next extend adds after ``prefix``.
        shape, dtype: a model and its KV dtype; adds bytes.
        memory: bytes of KV memory of one GPU; with ``shape`` adds the context that fits.

    Raises:
        UserError: a value that no server would take; one sentence.
    """
    _check(tokens, dcp_size, block_size, page_size, prefix, chunk, shape, memory)
    block, token = DcpLayout(dcp_size, block_size), DcpLayout(dcp_size, 1)
    out: dict[str, Any] = {
        "schema": 1,
        "tokens": tokens,
        "dcp_size": dcp_size,
        "block_size": block_size,
        "page_size": page_size,
        "cycle": block.cycle,
        "virtual_page": {
            "rows_per_rank": block.rows_per_virtual_page(page_size),
            "slots": block.virtual_page_size(page_size),
            "count": allocated_tokens(block, page_size, tokens) // block.virtual_page_size(page_size),
            "unused_slots": allocated_tokens(block, page_size, tokens) - tokens,
        },
        "block_round_robin": _shards(block, page_size, tokens),
        "token_round_robin": _shards(token, page_size, tokens),
    }
    if prefix is not None or chunk is not None:
        out["prefix"] = _prefix(block, page_size, prefix or 0, chunk or 0)
    if shape is not None:
        out["model"] = _bytes(
            shape, dtype, block, token, tokens, page_size, out["block_round_robin"]["segments_scattered"], memory
        )
    return out


def _check(
    tokens: int,
    dcp_size: int,
    block_size: int,
    page_size: int,
    prefix: int | None,
    chunk: int | None,
    shape: ModelShape | None,
    memory: int | None,
) -> None:
    for name, value in (
        ("--tokens", tokens),
        ("--dcp-size", dcp_size),
        ("--block-size", block_size),
        ("--page-size", page_size),
    ):
        if value < 1:
            raise UserError(f"{name} must be at least 1, got {value}.")
    if dcp_size == 1:
        raise UserError("--dcp-size 1 keeps every token on rank 0, so there is no layout to explain: give 2 or more.")
    if dcp_size > MAX_RANKS:
        raise UserError(f"--dcp-size {dcp_size} is more than the {MAX_RANKS} ranks the picture can name.")
    for name, value in (("--prefix", prefix or 0), ("--chunk", chunk or 0)):
        if value < 0:
            raise UserError(f"{name} must not be negative, got {value}.")
    if (prefix or 0) + (chunk or 0) > tokens:
        raise UserError(
            f"--prefix {prefix or 0} and --chunk {chunk or 0} reach beyond --tokens {tokens}: raise --tokens to "
            f"{(prefix or 0) + (chunk or 0)} or more."
        )
    if memory is not None and shape is None:
        raise UserError("--memory needs --model: without a model no bytes are known.")


def _shards(layout: DcpLayout, page_size: int, tokens: int) -> dict[str, Any]:
    """Rows of each rank, and the pieces that a prefill sends to it, one layer.

    Pieces are listed for pages in plain order on both sides, so a source row is a position; ``segments_scattered``
    counts them for pages of which no two lie side by side. They differ only when a block is larger than a page.
    """
    rows = shard_lengths(layout, tokens)
    ordered = np.arange(math.ceil(tokens / page_size))
    ranks, scattered = [], 0
    for rank in range(layout.dcp_size):
        pieces = _plan(layout, page_size, tokens, rank, ordered)
        scattered += len(_plan(layout, page_size, tokens, rank, 2 * ordered).n_rows)
        ranks.append(
            {
                "rank": rank,
                "rows": rows[rank],
                "segments": len(pieces.n_rows),
                "first": _listed(pieces, slice(SHOWN_PIECES)),
                "last": _listed(pieces, slice(-1, None)),
            }
        )
    return {
        "block_size": layout.block_size,
        "ranks": ranks,
        "rows_min": min(rows),
        "rows_max": max(rows),
        "skew_rows": max(rows) - min(rows),
        "skew_of_mean": round(max(rows) * layout.dcp_size / tokens - 1, 4),
        "empty_ranks": [rank for rank, n in enumerate(rows) if n == 0],
        "segments": sum(r["segments"] for r in ranks),
        "segments_scattered": scattered,
    }


def _listed(pieces: Segments, part: slice) -> list[dict[str, int]]:
    columns = (column[part].tolist() for column in pieces)
    return [{"source_row": s, "destination_row": d, "rows": n} for s, d, n in zip(*columns, strict=True)]


def _plan(layout: DcpLayout, page_size: int, tokens: int, rank: int, pages: np.ndarray) -> Segments:
    """Segments of a whole request whose pages have these ids on both sides."""
    src = Side(DcpLayout(1), 0, page_size, pages)
    return plan_pair(src, Side(layout, rank, page_size, pages), 0, tokens)


def _prefix(layout: DcpLayout, page_size: int, prefix: int, chunk: int) -> dict[str, Any]:
    virtual = layout.virtual_page_size(page_size)
    return {
        "tokens": prefix,
        "chunk": chunk,
        "hit_granularity": virtual,
        "hit_tokens": prefix_hit_tokens(virtual, prefix),
        "hit_granularity_without_dcp": page_size,
        "hit_tokens_without_dcp": prefix_hit_tokens(page_size, prefix),
        "rows_before": shard_lengths(layout, prefix),
        "rows_added": [layout.interval_len(prefix, chunk, rank) for rank in range(layout.dcp_size)],
    }


def _bytes(
    shape: ModelShape,
    dtype: str,
    block: DcpLayout,
    token: DcpLayout,
    tokens: int,
    page_size: int,
    segments: int,
    memory: int | None,
) -> dict[str, Any]:
    """Bytes of a request. ``segments``: pieces of one layer, all ranks."""
    per_row, per_token = row_bytes(shape, dtype), token_bytes(shape, dtype)
    out: dict[str, Any] = {
        "name": shape.name,
        "layers": shape.layers,
        "kv_dtype": dtype,
        "row_bytes": per_row,
        "token_bytes": per_token,
        "token_bytes_per_rank_mean": per_token / block.dcp_size,
        "request_bytes": tokens * per_token,
        "request_bytes_largest_rank": block.local_len(tokens, 0) * per_token,
        "segment_bytes": segment_bytes(block, per_row),
        "segment_bytes_token_round_robin": segment_bytes(token, per_row),
        "segments_per_request": shape.layers * segments,
        "segments_per_request_token_round_robin": shape.layers * tokens,
    }
    if memory is not None:
        fits = capacity_tokens(block, page_size, memory, per_token)
        out["memory"] = {
            "kv_bytes_per_gpu": memory,
            "tokens": fits,
            "tokens_without_dcp": capacity_tokens(DcpLayout(1, 1), page_size, memory, per_token),
            "requests": fits // allocated_tokens(block, page_size, tokens),
        }
    return out


# -- terminal ----------------------------------------------------------------------------------------------------------


def _colour(rank: int) -> str:
    return COLOURS[rank % len(COLOURS)]


def _cell(rank: int, width: int = 1) -> Text:
    return Text(SYMBOLS[rank] * width, style=f"bold {_colour(rank)}")


def _zoom(tokens: int, block_size: int) -> tuple[int, int]:
    """A window of up to 64 positions that shows a block's edge where there is one: [first, end)."""
    first = max(min(block_size - ZOOM // 2, tokens - ZOOM), 0)
    return first, min(first + ZOOM, tokens)


def _owners(layout: DcpLayout, first: int, end: int) -> Text:
    line = Text()
    for rank in layout.owner(np.arange(first, end)).tolist():
        line.append_text(_cell(rank))
    return line


def _cycle_lines(report: dict[str, Any], width: int) -> list[Text]:
    """One line a cycle, a run of characters a block; positions that the request doesn't reach are dots."""
    layout = DcpLayout(report["dcp_size"], report["block_size"])
    tokens, cycle = report["tokens"], layout.cycle
    label = max(len(f"{tokens:,}"), 5)
    # A block is drawn no wider than its tokens.
    room = width - label - 3
    per_block = min(max(int(room / layout.dcp_size) - 1, 1), 8, layout.block_size)
    gap = " " if layout.dcp_size * (per_block + 1) <= room else ""
    starts = list(range(0, tokens, cycle))
    if len(starts) > 6:
        starts = [*starts[:4], -1, starts[-1]]
    lines = []
    for start in starts:
        if start < 0:
            hidden = math.ceil(tokens / cycle) - 5
            lines.append(Text(f"{'…':>{label + 2}}  {hidden:,} more like these", style="dim"))
            continue
        line = Text(f"{start:>{label + 2},}  ", style="dim")
        for rank in range(layout.dcp_size):
            owned = layout.interval_len(start, min(cycle, tokens - start), rank)
            filled = math.ceil(owned * per_block / layout.block_size)
            line.append_text(_cell(rank, filled))
            line.append("·" * (per_block - filled), style="dim")
            line.append(gap)
        line.rstrip()
        lines.append(line)
    return lines


def _pieces(shard: dict[str, Any], limit: int) -> str:
    """'0-63 512-575' of a rank, or '0 8 16 … 992'."""

    def span(piece: dict[str, int]) -> str:
        first, last = piece["source_row"], piece["source_row"] + piece["rows"] - 1
        return f"{first}" if first == last else f"{first}-{last}"

    shown, last = shard["first"][:limit], shard["last"]
    text = [span(p) for p in shown]
    if shard["segments"] > len(shown) and last:
        text = text[: limit - 1]
        text += [span(last[0])] if shard["segments"] == len(text) + 1 else ["…", span(last[0])]
    return " ".join(text) or "nothing"


def _bar(rank: int, rows: int, largest: int, width: int) -> Text:
    filled = -(-rows * width // largest) if largest else 0
    return Text("█" * filled, style=_colour(rank))


def _table(*columns: tuple[str, str]) -> Table:
    """(heading, 'left' | 'right') columns without lines, so that it reads anywhere."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for heading, justify in columns:
        table.add_column(heading, justify=justify, no_wrap=True, overflow="ellipsis")  # type: ignore[arg-type]
    return table


def render_text(report: dict[str, Any], console: Console) -> None:
    """Print the picture; readable at 80 columns and without colour."""
    width = min(console.width, 100)
    block, token = report["block_round_robin"], report["token_round_robin"]
    p, b = report["dcp_size"], report["block_size"]
    head = Text(f"{report['tokens']:,} tokens on {p} ranks, block {b}, page {report['page_size']}", style="bold")
    console.print(head, Text("A character is the rank that owns the position.", style="dim"), "", sep="\n")

    first, end = _zoom(report["tokens"], b)
    console.print(Text(f"Positions {first:,} to {end - 1:,}, one character each"))
    for name, layout in (("token RR", DcpLayout(p, 1)), ("block RR", DcpLayout(p, b))):
        console.print(Text(f"  {name}  ").append_text(_owners(layout, first, end)), no_wrap=True)
    console.print()

    console.print(Text(f"Block RR, one line a cycle of {p} * {b} = {report['cycle']:,} positions"))
    for line in _cycle_lines(report, width):
        console.print(line, no_wrap=True, crop=True)
    console.print()

    table = _table(
        ("rank", "right"),
        ("rows", "right"),
        ("token RR", "left"),
        ("rows", "right"),
        ("block RR", "left"),
        ("", "left"),
    )
    for t, r in zip(token["ranks"], block["ranks"], strict=True):
        table.add_row(
            _cell(r["rank"]),
            f"{t['rows']:,}",
            _pieces(t, 3),
            f"{r['rows']:,}",
            _pieces(r, 2),
            _bar(r["rank"], r["rows"], block["rows_max"], 12),
        )
    console.print(table)
    console.print()
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column()
    for name, text in _facts(report):
        facts.add_row(name, text)
    console.print(facts)


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def _facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    block, token, page = report["block_round_robin"], report["token_round_robin"], report["virtual_page"]
    skew = (
        f"block RR {block['rows_min']:,} to {block['rows_max']:,} rows a rank (longest leads the mean by "
        f"{block['skew_of_mean']:.1%}), token RR {token['rows_min']:,} to {token['rows_max']:,}"
    )
    if block["empty_ranks"]:
        skew += f"; {len(block['empty_ranks'])} of {report['dcp_size']} ranks hold nothing"
    scattered, rows = block["segments_scattered"], page["rows_per_rank"]
    taken = page["count"] * page["slots"]
    facts = [
        ("Tail skew", skew),
        (
            "Virtual pages",
            f"{page['count']:,} of {page['slots']:,} slots ({page['rows_per_rank']:,} rows on every rank); "
            f"{page['unused_slots']:,} slots stay unused, {page['unused_slots'] / taken:.1%} of what it takes"
            + (
                f"; --page-size {report['page_size']} becomes {rows}, whole blocks"
                if rows != report["page_size"]
                else ""
            ),
        ),
        (
            "Prefill to decode",
            f"{block['segments']:,} segments a layer"
            + (f" ({scattered:,} when pages are scattered)" if scattered != block["segments"] else "")
            + f", token RR {token['segments']:,}; rank 0 gets "
            + _moves(block["ranks"][0]),
        ),
        ("Prefix hits", f"in steps of {page['slots']:,} tokens"),
    ]
    if prefix := report.get("prefix"):
        facts[-1] = (
            "Prefix hits",
            f"in steps of {prefix['hit_granularity']:,}: {prefix['hit_tokens']:,} of a shared {prefix['tokens']:,}; "
            f"without DCP in steps of {prefix['hit_granularity_without_dcp']:,}: {prefix['hit_tokens_without_dcp']:,}",
        )
        if prefix["chunk"]:
            pairs = zip(prefix["rows_before"], prefix["rows_added"], strict=True)
            rows = " ".join(f"{rank}:{before}+{added}" for rank, (before, added) in enumerate(pairs))
            end = prefix["tokens"] + prefix["chunk"]
            facts.append(("Extend", f"positions {prefix['tokens']:,} to {end - 1:,}, rank:rows before+added {rows}"))
    if model := report.get("model"):
        facts += _model_facts(model)
    return facts


def _model_facts(model: dict[str, Any]) -> list[tuple[str, str]]:
    facts = [
        (
            "KV bytes",
            f"{model['row_bytes']:,} a row, {_size(model['token_bytes'])} a token ({model['layers']} layers, "
            f"{model['kv_dtype']}); this request {_size(model['request_bytes'])}, the fullest rank "
            f"{_size(model['request_bytes_largest_rank'])}",
        ),
        (
            "Transfer",
            f"{model['segments_per_request']:,} segments of up to {_size(model['segment_bytes'])} a request; "
            f"token RR {model['segments_per_request_token_round_robin']:,} of "
            f"{_size(model['segment_bytes_token_round_robin'])}",
        ),
    ]
    if memory := model.get("memory"):
        facts.append(
            (
                "Fits",
                f"{memory['tokens']:,} tokens in {_size(memory['kv_bytes_per_gpu'])} of KV memory a GPU, "
                f"{memory['requests']:,} such requests; without DCP {memory['tokens_without_dcp']:,} tokens",
            )
        )
    return facts


def _moves(shard: dict[str, Any]) -> str:
    moves = [f"rows {p['source_row']}->{p['destination_row']} ({p['rows']})" for p in shard["first"][:3]]
    return ", ".join(moves) + (", ..." if shard["segments"] > 3 else "")


# -- image -------------------------------------------------------------------------------------------------------------


def render_png(report: dict[str, Any], path: str | Path) -> None:
    """Draw the layout to a PNG (matplotlib).

    Raises:
        UserError: matplotlib is missing, or the file can't be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("--png needs matplotlib: pip install 'sglang-dcp-block[plot]'.") from None

    p = report["dcp_size"]
    heights = (1.5, 0.8, 0.34 * p + 0.6, 0.26 * p + 0.6)
    figure = Figure(figsize=(11, sum(heights) + 2.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    strips, source, lanes, rows = figure.subplots(4, 1, height_ratios=heights)
    _draw_strips(strips, report)
    _draw_source(source, report)
    _draw_lanes(lanes, report)
    _draw_rows(rows, report)
    figure.suptitle(
        f"{report['tokens']:,} tokens on {p} ranks: block {report['block_size']}, page {report['page_size']}, "
        f"virtual page {report['virtual_page']['slots']:,} slots",
        fontweight="bold",
    )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise UserError(f"can't write {path}: {error.strerror or error}.") from None


def _draw_run(axes: Any, y: float, left: int, length: int, colour: str, label: str, span: int) -> None:
    """One bar with its label, where the label fits; ``span`` is the width of the axes in the same unit."""
    axes.barh(y, length, left=left, color=colour, edgecolor="white", height=0.8)
    if length / span > 0.007 * (len(label) + 1):
        axes.text(left + length / 2, y, label, ha="center", va="center", color="white", fontsize=8)


def _draw_strips(axes: Any, report: dict[str, Any]) -> None:
    """Who owns the first positions, token round-robin above block round-robin, at one scale."""
    p, b = report["dcp_size"], report["block_size"]
    first, end = _zoom(report["tokens"], b)
    for y, layout in ((1, DcpLayout(p, 1)), (0, DcpLayout(p, b))):
        owners = layout.owner(np.arange(first, end)).tolist()
        edges = [0, *(i for i in range(1, end - first) if owners[i] != owners[i - 1]), end - first]
        for left, right in pairwise(edges):
            rank = owners[left]
            _draw_run(axes, y, first + left, right - left, _colour(rank), SYMBOLS[rank], end - first)
    axes.set_yticks([1, 0], ["token RR", "block RR"])
    axes.set_xlim(first, end)
    axes.set_title(f"Owner of positions {first:,} to {end - 1:,}", loc="left", fontsize=10)


def _draw_source(axes: Any, report: dict[str, Any]) -> None:
    """The prefill's rows in order, coloured by the rank that each run is sent to."""
    layout = DcpLayout(report["dcp_size"], report["block_size"])
    shown = min(report["tokens"], 4 * layout.cycle)
    for rank in range(layout.dcp_size):
        for position, _, length in zip(*layout.owned_intervals(0, shown, rank), strict=True):
            _draw_run(axes, 0, position, length, _colour(rank), SYMBOLS[rank], shown)
    axes.set_yticks([0], ["prefill"])
    axes.set_xlim(0, shown)
    block, token = report["block_round_robin"], report["token_round_robin"]
    axes.set_title(
        f"Where a prefill's rows go{'' if shown == report['tokens'] else f', first {shown:,}'}: {block['segments']:,} "
        f"segments a layer in all, token RR {token['segments']:,}",
        loc="left",
        fontsize=10,
    )


def _draw_lanes(axes: Any, report: dict[str, Any]) -> None:
    """The KV rows of each rank: every block with the positions it holds, page edges marked."""
    p, b, page = report["dcp_size"], report["block_size"], report["page_size"]
    layout = DcpLayout(p, b)
    width = report["virtual_page"]["rows_per_rank"]
    depth = min(layout.local_len(report["tokens"], 0), 8 * width)
    shown = min(report["tokens"], 8 * report["virtual_page"]["slots"])
    for rank in range(p):
        for position, row, length in zip(*layout.owned_intervals(0, shown, rank), strict=True):
            label = f"{position}-{position + length - 1}" if length > 1 else str(position)
            _draw_run(axes, rank, row, length, _colour(rank), label, depth)
    for edge in range(0, depth + 1, page):
        # An edge of a virtual page is an edge of a page as well: one line, drawn stronger.
        virtual = edge in range(0, depth + 1, width)
        axes.axvline(edge, color="black", linewidth=1.4 if virtual else 0.6, linestyle="--" if virtual else ":")
    axes.set_yticks(range(p), [f"rank {r}" for r in range(p)])
    axes.invert_yaxis()
    axes.set_xlim(0, max(depth, 1))
    more = "" if shown == report["tokens"] else f", first {shown:,} positions"
    edges = "dashed: page" if width == page else "dotted: page, dashed: virtual page"
    axes.set_title(f"Positions in each rank's rows, block RR{more} ({edges})", loc="left", fontsize=10)


def _draw_rows(axes: Any, report: dict[str, Any]) -> None:
    """Rows per rank under both layouts."""
    for offset, name in ((-0.2, "token_round_robin"), (0.2, "block_round_robin")):
        shards = report[name]["ranks"]
        colours = ["#bbbbbb" if offset < 0 else _colour(s["rank"]) for s in shards]
        ys = [s["rank"] + offset for s in shards]
        axes.barh(ys, [s["rows"] for s in shards], height=0.38, color=colours)
        for y, shard in zip(ys, shards, strict=True):
            axes.text(shard["rows"], y, f" {shard['rows']:,}", va="center", fontsize=7)
    block, token = report["block_round_robin"], report["token_round_robin"]
    axes.set_yticks(range(report["dcp_size"]), [f"rank {r}" for r in range(report["dcp_size"])])
    axes.invert_yaxis()
    axes.set_xlim(0, max(block["rows_max"], 1) * 1.08)
    axes.set_title(
        f"Rows per rank: {block['rows_min']:,} to {block['rows_max']:,}; grey is token RR, {token['rows_min']:,} to "
        f"{token['rows_max']:,}",
        loc="left",
        fontsize=10,
    )
