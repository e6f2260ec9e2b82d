"""The demo: real engines, the same prompts, one layout after another, and a table (``bash scripts/demo.sh``).

Starts an engine without DCP, one with ``--dcp-size 2 --dcp-block-size 64``, and a prefill and a decode server of that
layout with Mooncake between them; checks that all give the same tokens. Everything runs on the CPU test bed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.engine import REFERENCE, Case, CaseResult, EngineSpec, Round, run
from sglang_dcp_block.testing.pd import DemoRow, run_pd_demo
from sglang_dcp_block.testing.tiny_model import TinyMla
from sglang_dcp_block.testing.warm import WarmServer

BLOCK = PAGE = 64
PROMPT_LENGTHS = (1, 63, 64, 65, 127, 128, 129, 500)


@dataclass(frozen=True)
class LayoutRow:
    """One engine of the demo. rows_per_rank: KV rows of all requests at their end, by DCP rank."""

    name: str
    rows_per_rank: list[int]
    capacity: int
    tokens_per_second: float
    equal: bool


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(2, 250) for _ in range(n)] for n in lengths]


def layout_row(name: str, spec: EngineSpec, result: CaseResult, expected: CaseResult, new_tokens: int) -> LayoutRow:
    layout = DcpLayout(spec.dcp, spec.block or 1)
    final = [n + new_tokens for n in PROMPT_LENGTHS]
    answers = [a.tokens for round_answers in result.answers for a in round_answers]
    return LayoutRow(
        name,
        [sum(layout.local_len(n, rank) for n in final) for rank in range(spec.dcp)],
        result.server["max_total_num_tokens"],
        sum(map(len, answers)) / sum(result.seconds[1:]),
        answers == [a.tokens for round_answers in expected.answers for a in round_answers],
    )


def layout_table(rows: list[LayoutRow]) -> Table:
    table = Table(title="One engine each, the same prompts")
    for column in ("layout", "KV rows per rank", "pool capacity (tokens)", "tokens/s", "tokens equal"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in rows:
        per_rank = " + ".join(map(str, row.rows_per_rank))
        equal = "yes" if row.equal else "NO"
        table.add_row(row.name, per_rank, f"{row.capacity:,}", f"{row.tokens_per_second:.1f}", equal)
    return table


def pd_table(rows: list[DemoRow]) -> Table:
    table = Table(title="Prefill -> decode over Mooncake (TCP), block 64, all layers and ranks")
    for column in ("prompt", "segments", "at token round-robin", "bytes", "bytes/segment", "tokens equal"):
        table.add_column(column, justify="right")
    for row in rows:
        mean = row.bytes // row.segments if row.segments else 0
        cells = (row.prompt, row.segments, row.token_segments, row.bytes, mean)
        table.add_row(*(f"{cell:,}" for cell in cells), "yes" if row.equal else "NO")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--new-tokens", type=int, default=5, help="tokens to generate for each prompt")
    parser.add_argument("--json", type=Path, help="write the tables' figures to this file")
    arguments = parser.parse_args()
    console = Console()
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - began:5.0f} s[/] {text}", highlight=False)

    rounds = [Round(_prompts(PROMPT_LENGTHS), arguments.new_tokens, "prompts")]
    specs: dict[str, EngineSpec] = {
        "no DCP": replace(REFERENCE, page=PAGE),
        "DCP 2, tokens": EngineSpec(tp=2, dcp=2, backend="triton", block=1, page=PAGE),
        "DCP 2, block 64": EngineSpec(tp=2, dcp=2, backend="triton", block=BLOCK, page=PAGE),
    }
    results: dict[str, CaseResult] = {}
    say("Importing SGLang")
    with (
        tempfile.TemporaryDirectory(prefix="sglang-dcp-block-demo-") as folder,
        WarmServer(EngineSpec().environment()) as warm,
    ):
        for number, (name, spec) in enumerate(specs.items()):
            say(f"Starting engine {number + 1} of 5: {name}")
            results[name] = run(Case(spec, rounds), Path(folder) / str(number), audit=False, warm=warm)
        say("Starting engines 4 and 5: a prefill server (tp 1) and a decode server (tp 2, dcp 2, block 64)")
        pairs = run_pd_demo(Path(folder) / "pd", new_tokens=arguments.new_tokens, block=BLOCK, say=say, warm=warm)
    reference = next(iter(results.values()))
    rows = [layout_row(name, specs[name], r, reference, arguments.new_tokens) for name, r in results.items()]
    console.print(layout_table(rows), pd_table(pairs))
    if arguments.json:
        figures: dict[str, Any] = {"layouts": [vars(r) for r in rows], "pd": [vars(r) for r in pairs]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    layers = TinyMla().layers
    console.print(
        f"A tiny random MLA model with {layers} layers on CPUs: tokens/s say nothing about GPUs.", style="dim"
    )
    if not all(r.equal for r in rows) or not all(p.equal for p in pairs):
        raise SystemExit("the layouts do not answer alike")
    say("All layouts gave the same tokens.")


if __name__ == "__main__":
    main()
