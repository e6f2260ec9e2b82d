"""Stages of a GPU run and the command line that drives them, shared by one_gpu.py, two_gpus.py and eight_gpus.py.

A script is a :class:`Plan`: named stages, each a few minutes, made of jobs or server pairs from gpu_run.py. The command
runs the stages asked for until the time is up, keeps what it has after each, and prints one table last.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import gpu_run
import typer
from gpu_run import Engine, Job, Outcome, Pair
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.testing.tiny_model import TinyMla

#: Sizes of a rehearsal on the CPU test bed.
REHEARSAL = TinyMla()
REHEARSAL_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)


@dataclass
class Context:
    """Where and how long a stage may run."""

    model: Path
    vocab: int
    work: Path
    deadline: float
    rehearse: bool
    say: Callable[[str], None]


@dataclass
class Stage:
    """One part of a plan. needs_s: about how long it takes. at_once: engines side by side (never when timed)."""

    name: str
    what: str
    needs_s: float
    at_once: int = 1

    def engines(self) -> list[Engine]:
        raise NotImplementedError

    def run(self, context: Context) -> dict[str, Any]:
        raise NotImplementedError

    def _ready(self, engine: Engine, context: Context) -> Engine:
        return gpu_run.rehearsed(engine) if context.rehearse else engine

    def _run(self, jobs: list[Job], context: Context) -> dict[str, Outcome]:
        jobs = [replace(job, engine=self._ready(job.engine, context)) for job in jobs]
        at_once = 1 if context.rehearse else self.at_once
        outcomes = gpu_run.run_jobs(jobs, context.model, context.work, at_once, context.deadline, context.say)
        return {outcome.job.engine.name: outcome for outcome in outcomes}


@dataclass
class Answers(Stage):
    """Greedy answers of every layout against DCP1 of the same backend, and the pool audit.

    others: engine -> name of its reference. The reference's own noise is fresh batch against one at a time.
    """

    references: list[Engine] = field(default_factory=list)
    others: list[tuple[Engine, str]] = field(default_factory=list)
    lengths: Sequence[int] = ()
    new_tokens: int = 48
    audit: bool = False

    def engines(self) -> list[Engine]:
        return self.references + [engine for engine, _ in self.others]

    def run(self, context: Context) -> dict[str, Any]:
        lengths = REHEARSAL_LENGTHS if context.rehearse else self.lengths
        steps = gpu_run.answer_steps(lengths, 8 if context.rehearse else self.new_tokens, context.vocab)
        jobs = [Job(engine, steps, audit=self.audit) for engine in self.engines()]
        outcomes = self._run(jobs, context)
        found: dict[str, Any] = {"engines": {}, "noise": {}}
        for name, outcome in outcomes.items():
            found["engines"][name] = {
                "failure": outcome.failure, "up_s": outcome.result.get("up_s"), "server": outcome.result.get("server"),
                "answers": {s["name"]: s["outcome"] for s in outcome.result.get("steps", [])},
            }  # fmt: skip
        for reference in self.references:
            fresh, alone = (outcomes[reference.name].step(s) for s in ("fresh", "alone"))
            if fresh and alone:
                noise = gpu_run.noise_of(gpu_run.compare(fresh[: len(alone)], alone))
                found["noise"][reference.name] = noise._asdict() | {"limit": noise.limit()}
        for engine, reference_name in self.others:
            mine, theirs = outcomes[engine.name], outcomes[reference_name]
            entry = found["engines"][engine.name]
            entry["reference"] = reference_name
            if reference_name not in found["noise"]:
                continue
            noise = gpu_run.Noise(*(found["noise"][reference_name][k] for k in ("before", "gap")))
            entry["verdicts"], entry["partings"] = {}, {}
            for step in ("fresh", "again", "alone"):
                got, want = mine.step(step), theirs.step(step)
                if got and want:
                    partings = gpu_run.compare(want, got)
                    entry["partings"][step] = [p._asdict() for p in partings]
                    entry["verdicts"][step] = gpu_run.judge(partings, noise)._asdict()
            if mine.audit and theirs.audit and not mine.failure and not theirs.failure:
                spec = mine.job.engine
                try:
                    entry["audit"] = gpu_run.audit(theirs.audit, mine.audit, spec.dcp, spec.block or 1)
                except (ValueError, FileNotFoundError) as error:
                    entry["audit"] = {"ok": False, "complaints": [str(error)]}
        return found


@dataclass
class Speed(Stage):
    """Time per output token. All engines are up at once, and one at a time is asked, cell by cell in turns."""

    timed: list[Engine] = field(default_factory=list)
    cells: Sequence[tuple[int, int]] = ()

    def engines(self) -> list[Engine]:
        return self.timed

    def run(self, context: Context) -> dict[str, Any]:
        cells = [(1, 64), (2, 128)] if context.rehearse else self.cells
        together: dict[str, Any] = {}
        if not context.rehearse:
            self.at_once = len(self.timed)
            together = {"folder": tempfile.mkdtemp(dir=context.work), "engines": len(self.timed)}
        steps = gpu_run.speed_steps(cells, context.vocab, 4 if context.rehearse else 64, together)
        outcomes = self._run([Job(engine, steps) for engine in self.timed], context)
        return {
            name: {"failure": o.failure, "cells": [s["outcome"] for s in o.result.get("steps", [])]}
            for name, o in outcomes.items()
        }


@dataclass
class Soak(Stage):
    """Mixed lengths, prefix reuse and aborts for a while."""

    engine: Engine = field(default_factory=lambda: Engine("soak"))
    seconds: float = 600.0

    def engines(self) -> list[Engine]:
        return [self.engine]

    def run(self, context: Context) -> dict[str, Any]:
        seconds = 20.0 if context.rehearse else min(self.seconds, context.deadline - time.monotonic() - 120)
        step = {
            "kind": "soak", "seconds": seconds, "clients": 2 if context.rehearse else 24, "stuck_after_s": 120.0,
            "longest": 300 if context.rehearse else 20_000, "vocab": context.vocab,
        }  # fmt: skip
        outcomes = self._run([Job(self.engine, [step], needs_s=seconds + 60)], context)
        return {
            n: {"failure": o.failure, "soak": [s["outcome"] for s in o.result.get("steps", [])]}
            for n, o in outcomes.items()
        }


@dataclass
class PrefillDecode(Stage):
    """P->D over Mooncake, the pairs in turns with the same prompts."""

    pairs: list[Pair] = field(default_factory=list)
    against: str = ""
    lengths: Sequence[int] = ()
    repeats: int = 5

    def engines(self) -> list[Engine]:
        return [engine for pair in self.pairs for engine in (pair.prefill, pair.decode)]

    def run(self, context: Context) -> dict[str, Any]:
        pairs = [
            replace(p, prefill=self._ready(p.prefill, context), decode=self._ready(p.decode, context))
            for p in self.pairs
        ]
        lengths, repeats = ((65, 150), 1) if context.rehearse else (self.lengths, self.repeats)
        found = gpu_run.run_pd(
            pairs, lengths, repeats, context.vocab, context.model, context.work / "pd", context.deadline, context.say
        )
        found["rows"] = gpu_run.pd_rows(found, self.against)
        base = found["pairs"].get(self.against, {}).get("answers", [])
        for data in found["pairs"].values():
            data["partings"] = [p._asdict() for p in map(gpu_run.part, base, data["answers"])]
        return found


@dataclass
class Plan:
    title: str
    gpus: int
    sizes: TinyMla
    stages: list[Stage]
    replaced: str = "nothing"


# -- what is printed ---------------------------------------------------------------------------------------------------


def _audit_cell(audit: dict[str, Any] | None) -> str:
    if not audit:
        return ""
    return f"{'ok' if audit['ok'] else 'WRONG'} {audit.get('compared')} rows, max {audit.get('max_abs_diff', 0):.2g}"


def _show_answers(found: dict[str, Any], console: Console) -> None:
    table = Table(title="answers against DCP1 of the same backend, and the pool audit")
    for column in (
        "engine",
        "up s",
        "fresh",
        "again",
        "alone",
        "worst dlogprob",
        "worst gap",
        "noise limit",
        "audit",
        "control",
    ):
        table.add_column(column)
    for name, entry in found["engines"].items():
        verdicts = entry.get("verdicts", {})
        cell = lambda step: (  # noqa: E731
            f"{v['equal']}/{v['asked']} equal" + (f", {len(v['wrong'])} WRONG" if v["wrong"] else "")
            if (v := verdicts.get(step))  # noqa: B023
            else ""
        )
        audit = entry.get("audit")
        limit = found["noise"].get(entry.get("reference") or name, {}).get("limit")
        table.add_row(
            name + (" FAILED" if entry["failure"] else ""), f"{entry['up_s']:.0f}" if entry["up_s"] else "",
            cell("fresh"), cell("again"), cell("alone"),
            f"{max(v['worst_before'] for v in verdicts.values()):.3f}" if verdicts else "",
            f"{max(v['worst_gap'] for v in verdicts.values()):.3f}" if verdicts else "",
            f"{limit:.3f}" if limit else "",
            _audit_cell(audit),
            "" if not audit else str(audit.get("control_noticed")),
        )  # fmt: skip
    console.print(table)
    for name, entry in found["engines"].items():
        for step, verdict in entry.get("verdicts", {}).items():
            for line in verdict["wrong"][:3]:
                console.print(f"  {name} {step}: {line}")
        for line in (entry.get("audit") or {}).get("complaints", [])[:2]:
            console.print(f"  {name} audit: {line}")
        if entry["failure"]:
            console.print(f"  {name}: {entry['failure'][-1500:]}", markup=False)


def _show_speed(found: dict[str, Any], console: Console) -> None:
    table = Table(title="time per output token, ms")
    cells = sorted({(c["batch"], c["context"]) for e in found.values() for c in e["cells"]}, key=lambda x: (x[1], x[0]))
    table.add_column("engine")
    for batch, context in cells:
        table.add_column(f"{batch} x {context}", justify="right")
    for name, entry in found.items():
        by = {(c["batch"], c["context"]): c["tpot_ms"] for c in entry["cells"]}
        table.add_row(
            name + (" FAILED" if entry["failure"] else ""), *(f"{by[c]:.3f}" if c in by else "" for c in cells)
        )
    console.print(table)
    for name, entry in found.items():
        if entry["failure"]:
            console.print(f"  {name}: {entry['failure'][-800:]}", markup=False)


def _show_pd(found: dict[str, Any], console: Console) -> None:
    table = Table(title="P->D, medians")
    columns = (
        "pair",
        "prompt",
        "total ms",
        "over",
        "segments",
        "batches",
        "KV MB",
        "transfer ms",
        "pack ms",
        "pack buffer MB",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "pair" else "right")
    for row in found["rows"]:
        table.add_row(
            row["pair"], str(row["prompt"]), f"{row['total_s'] * 1e3:.0f}",
            f"{row['total_over']:.3f}" if row["total_over"] else "", f"{row['segments']:.0f}", f"{row['batches']:.0f}",
            f"{row['kv_bytes'] / 1e6:.1f}", f"{row['transfer_s'] * 1e3:.1f}", f"{row['pack_s'] * 1e3:.1f}",
            f"{(row['pack_buffer_bytes'] or 0) / 1e6:.1f}",
        )  # fmt: skip
    console.print(table)
    for name, text in found["failed"].items():
        console.print(f"  {name} FAILED: {text[-1500:]}", markup=False)


def show(stage: Stage, found: dict[str, Any], console: Console) -> None:
    if isinstance(stage, Answers):
        _show_answers(found, console)
    elif isinstance(stage, Speed):
        _show_speed(found, console)
    elif isinstance(stage, PrefillDecode):
        _show_pd(found, console)
    else:
        console.print_json(json.dumps(found))


# -- the command -------------------------------------------------------------------------------------------------------


def command(plan: Plan) -> typer.Typer:
    """``python scripts/NAME.py [--stage S]... [--dry-run] [--rehearse] [--budget SECONDS] [--out FOLDER]``."""
    app = typer.Typer(add_completion=False)
    names = ", ".join(f"{s.name} (about {s.needs_s:.0f} s)" for s in plan.stages)

    @app.command(help=f"{plan.title}. Stages: {names}.")
    def main(
        stage: Annotated[list[str] | None, typer.Option(help="Stages to run, in order; all by default.")] = None,
        budget: Annotated[float, typer.Option(help="Seconds after which nothing is started any more.")] = 3600.0,
        out: Annotated[Path, typer.Option(help="Folder for one JSON file per stage.")] = Path("benchmark/results"),
        prefix: Annotated[str, typer.Option(help="Begins the JSON files' names.")] = "gpu",
        only: Annotated[str, typer.Option(help="Regular expression: engines to start besides the references.")] = "",
        dry_run: Annotated[bool, typer.Option("--dry-run", help="List the plan and check what it needs.")] = False,
        rehearse: Annotated[
            bool, typer.Option("--rehearse", help="Tiny sizes and 2 ranks on the CPU test bed.")
        ] = False,
    ) -> None:
        console = Console(width=190)
        chosen = [s for s in plan.stages if not stage or s.name in stage]
        if unknown := set(stage or ()) - {s.name for s in plan.stages}:
            raise typer.BadParameter(f"no stage {sorted(unknown)}: choose from {[s.name for s in plan.stages]}")
        for s in chosen:
            _keep_only(s, only)
        if dry_run:
            raise typer.Exit(_dry_run(plan, chosen, console))
        deadline = time.monotonic() + budget
        work = Path(tempfile.gettempdir()) / f"sglang-dcp-block-{prefix}"
        work.mkdir(parents=True, exist_ok=True)
        sizes = REHEARSAL if rehearse else plan.sizes
        model = gpu_run.model_folder(sizes, work)
        context = Context(model, sizes.vocab, work, deadline, rehearse, lambda text: console.print(text, markup=False))
        out.mkdir(parents=True, exist_ok=True)
        failed = False
        results = []
        for s in chosen:
            console.print(f"stage {s.name}: {s.what}; {deadline - time.monotonic():.0f} s left")
            began = time.monotonic()
            found = s.run(context)
            record = {
                "environment": gpu_run.environment(), "title": plan.title, "stage": s.name, "replaced": plan.replaced,
                "rehearsal": rehearse, "seconds": time.monotonic() - began, "found": found,
            }  # fmt: skip
            (out / f"{prefix}_{s.name}.json").write_text(json.dumps(record, indent=1))
            results.append((s, found))
            failed |= '"failure": "exit' in json.dumps(found)
        for s, found in results:
            show(s, found, console)
        console.print(str(gpu_run.environment()), markup=False)
        raise typer.Exit(1 if failed else 0)

    return app


def _keep_only(stage: Stage, pattern: str) -> None:
    import re

    if not pattern:
        return
    if isinstance(stage, Answers):
        stage.others = [(e, r) for e, r in stage.others if re.search(pattern, e.name)]
        wanted = {r for _, r in stage.others}
        stage.references = [e for e in stage.references if e.name in wanted or re.search(pattern, e.name)]
    elif isinstance(stage, Speed):
        stage.timed = [e for e in stage.timed if re.search(pattern, e.name)]
    elif isinstance(stage, PrefillDecode):
        stage.pairs = [p for p in stage.pairs if p.name == stage.against or re.search(pattern, p.name)]


def _dry_run(plan: Plan, stages: list[Stage], console: Console) -> int:
    console.print(f"{plan.title}; replaced: {plan.replaced}")
    flashinfer = mooncake = False
    for s in stages:
        table = Table(title=f"stage {s.name}: {s.what}, about {s.needs_s:.0f} s")
        for column in ("engine", "tp", "dcp", "block", "backend", "merge", "CUDA graphs", "first GPU", "bed"):
            table.add_column(column)
        for e in s.engines():
            flashinfer |= e.backend == "flashinfer"
            block = "stock" if e.block is None else str(e.block)
            cells = (e.name, e.tp, e.dcp, block, e.backend, e.comm if e.dcp > 1 else "", e.graphs, e.base_gpu, e.bed)
            table.add_row(*map(str, cells))
        mooncake |= isinstance(s, PrefillDecode)
        console.print(table)
    checks = gpu_run.prerequisites(plan.gpus, flashinfer, mooncake)
    table = Table(title="prerequisites")
    for column in ("needed", "found", "ok"):
        table.add_column(column)
    for check in checks:
        table.add_row(check.what, check.found, "yes" if check.ok else "NO")
    console.print(table)
    return 0 if all(check.ok for check in checks) else 1
