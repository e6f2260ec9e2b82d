"""Stages of a GPU run and the command line that drives them, shared by one_gpu.py, two_gpus.py and eight_gpus.py.

A script is a :class:`Plan`: named stages, each a few minutes, made of jobs or server pairs from gpu_run.py. The command
runs the stages asked for until the time is up, keeps what it has after each, and prints one table last.
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import gpu_judge
import gpu_run
import typer
from gpu_run import Engine, Job, Outcome, Pair, Worker
from rich.console import Console
from rich.table import Table

from sglang_dcp_block.testing.tiny_model import TinyModel

#: What every engine of a stage of answers is asked.
STEPS = ("fresh", "again", "alone")
REHEARSAL_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 150)


@dataclass
class Context:
    """Where and how long a stage may run. save: keeps what a stage has found so far. quiet: a file; engines that are up
    wait until it exists."""

    model: Path
    vocab: int
    work: Path
    deadline: float
    rehearse: bool
    say: Callable[[str], None]
    save: Callable[[dict[str, Any]], None]
    quiet: Path | None = None

    def left(self) -> float:
        return self.deadline - time.monotonic()

    def wait_quiet(self) -> None:
        """Until ``quiet`` exists, or little time is left."""
        while self.quiet and not self.quiet.exists() and self.left() > 40:
            time.sleep(0.5)


@dataclass
class Stage:
    """One part of a plan. needs_s: about how long it takes. at_once: engines side by side.

    sizes: of the model, the plan's if None. weights: are they written, or dummies?
    """

    name: str
    what: str
    needs_s: float
    at_once: int = 1
    sizes: TinyModel | None = None
    weights: bool = True

    def engines(self) -> list[Engine]:
        raise NotImplementedError

    def run(self, context: Context) -> dict[str, Any]:
        raise NotImplementedError

    def complaints(self, found: dict[str, Any]) -> list[str]:
        """What went wrong in what :meth:`run` returned, a line each."""
        return [f"{name} failed: {_first_line(text)}" for name, text in found["failed"].items()]

    def _ready(self, engine: Engine, context: Context) -> Engine:
        return gpu_run.rehearsed(engine) if context.rehearse else engine


@dataclass
class Answers(Stage):
    """Greedy answers of every layout against DCP1 of the same backend, and the pool audit.

    others: engine -> name of its reference. beside: further pairs of engines whose answers are compared, not judged.
    The reference's own noise: one batch against batches of four and of one.
    A reference has pages as large as the others' virtual pages, so that all take equal prefixes from the cache: beyond
    128K tokens in a batch SGLang joins prefix and extension on FlashInfer with the wrong base of the LSE (its issue
    40903), and the answer then depends on where the prefix ends.
    """

    references: list[Engine] = field(default_factory=list)
    others: list[tuple[Engine, str]] = field(default_factory=list)
    lengths: Sequence[int] = ()
    new_tokens: int = 48
    audit: bool = False
    beside: Sequence[tuple[str, str]] = ()
    audits: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)  # one takes seconds, so each only once

    def engines(self) -> list[Engine]:
        return self.references + [engine for engine, _ in self.others]

    def run(self, context: Context) -> dict[str, Any]:
        lengths = REHEARSAL_LENGTHS if context.rehearse else self.lengths
        tokens = 8 if context.rehearse else self.new_tokens
        known, asked = (gpu_run.answer_steps(lengths, tokens, context.vocab, reference) for reference in (True, False))
        first = [gpu_run.wait_step(context.quiet)] if context.quiet else []
        jobs = [
            Job(self._ready(e, context), first + (known if e in self.references else asked), audit=self.audit)
            for e in self.engines()
        ]
        outcomes = gpu_run.run_jobs(
            jobs, context.model, context.work, 1 if context.rehearse else self.at_once, context.deadline, context.say,
            lambda outcomes: context.save(self._found(outcomes)),
        )  # fmt: skip
        return self._found(outcomes)

    def complaints(self, found: dict[str, Any]) -> list[str]:
        lines = []
        for name, entry in found["engines"].items():
            if entry["failure"]:
                lines.append(f"{name} failed: {_first_line(entry['failure'])}")
            for step, verdict in entry.get("verdicts", {}).items():
                if verdict["wrong"]:
                    lines.append(f"{name} {step}: {len(verdict['wrong'])} answers outside the limit")
            if audit := entry.get("audit"):
                if not audit["ok"]:
                    lines.append(f"{name}: KV rows are not where the layout says, or were not compared")
                elif not audit["control_noticed"]:
                    lines.append(f"{name}: the audit did not notice another layout")
        return lines

    def _found(self, outcomes: list[Outcome]) -> dict[str, Any]:
        by_name = {outcome.job.engine.name: outcome for outcome in outcomes}
        found: dict[str, Any] = {"engines": {}, "noise": {}, "control": {}}
        for name, outcome in by_name.items():
            found["engines"][name] = {
                "failure": outcome.failure, "up_s": outcome.result.get("up_s"), "server": outcome.result.get("server"),
            }  # fmt: skip
        for reference in self.references:
            outcome = by_name[reference.name]
            fresh, alone, fours, changed = (outcome.step(s) for s in ("fresh", "alone", "fours", "changed"))
            if fresh and alone and fours:
                itself = gpu_judge.compare(fresh, fours) + gpu_judge.compare(fresh[: len(alone)], alone)
                noise = gpu_judge.noise_of(itself)
                found["noise"][reference.name] = noise._asdict() | {"limit": noise.limit()}
                if changed:
                    found["control"][reference.name] = [
                        {"prompt": a["prompt"], "noticed": bool(gpu_judge.judge([gpu_judge.part(a, b)], noise).wrong)}
                        for a, b in zip(fresh, changed, strict=True)
                    ]
        for engine, reference_name in self.others:
            self._judge(by_name[engine.name], by_name[reference_name], found)
        if len(self.references) > 1:
            found["between"] = self._compared(*(by_name[r.name] for r in self.references[:2]))
        found["beside"] = {
            f"{other} against {one}": self._compared(by_name[one], by_name[other])
            for one, other in self.beside
            if one in by_name and other in by_name
        }
        return found

    def _compared(self, one: Outcome, other: Outcome) -> dict[str, Any]:
        """Step -> largest logprob distance before a parting and largest gap at one."""
        return {
            step: gpu_judge.noise_of(gpu_judge.compare(a, b))._asdict()
            for step in STEPS
            if (a := one.step(step)) and (b := other.step(step))
        }

    def _judge(self, mine: Outcome, theirs: Outcome, found: dict[str, Any]) -> None:
        entry, reference = found["engines"][mine.job.engine.name], theirs.job.engine.name
        entry["reference"] = reference
        if reference not in found["noise"]:
            return
        noise = gpu_judge.Noise(*(found["noise"][reference][k] for k in ("before", "gap")))
        entry |= {"verdicts": {}, "partings": {}}
        for step in STEPS:
            got, known = mine.step(step), theirs.step(step)
            if got and known:
                partings = gpu_judge.compare(known, got)
                entry["partings"][step] = [p._asdict() for p in partings]
                entry["verdicts"][step] = gpu_judge.judge(partings, noise)._asdict()
        spec = mine.job.engine
        # Without DCP every layout is the same, and no control could notice another one.
        if spec.dcp > 1 and mine.audit and theirs.audit and not mine.failure and not theirs.failure:
            if spec.name not in self.audits:
                try:
                    self.audits[spec.name] = gpu_judge.audit(
                        theirs.audit, mine.audit, spec.dcp, spec.block or 1,
                        spec.page if spec.extra.get("dcp_rotate") else 0,
                        str(spec.extra.get("kv_cache_dtype")).startswith("fp8"),
                    )  # fmt: skip
                except (ValueError, FileNotFoundError) as error:
                    self.audits[spec.name] = {"ok": False, "complaints": [str(error)]}
            entry["audit"] = self.audits[spec.name]


class TimedCell(NamedTuple):
    """Requests and their context in tokens. engines: which are timed, a regular expression."""

    batch: int
    context: int
    engines: str = ""


def parse_cell(text: str) -> TimedCell:
    """``64x8192``, or ``64x8192=tri|fi-b64`` for some engines only."""
    match = re.fullmatch(r"(\d+)x(\d+)(?:=(.*))?", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not BATCHxCONTEXT or BATCHxCONTEXT=REGEX: write 64x8192, say")
    return TimedCell(int(match[1]), int(match[2]), match[3] or "")


@dataclass
class Speed(Stage):
    """Time per output token. All engines are up at once; one at a time is asked, in turns within every cell: ``rounds``
    rounds after one that warms up, each of ``tokens`` tokens, half as many from 64 requests on.

    cells: in order, each for all engines or for those whose names match. rows: distinct tokens of a batch, so that
    pools of all engines fit; a larger batch shares prefixes, every ``rows // context`` requests the same ones again.
    pairs: (over, under) for the ratios.
    """

    timed: list[Engine] = field(default_factory=list)
    cells: Sequence[TimedCell] = ()
    rows: int = 0
    pairs: Sequence[tuple[str, str]] = ()
    rounds: int = 4
    tokens: int = 129
    chunk: int = 16

    def engines(self) -> list[Engine]:
        return self.timed

    def run(self, context: Context) -> dict[str, Any]:
        cells, tokens, chunk, rows = self.cells, self.tokens, self.chunk, self.rows
        if context.rehearse:
            cells, tokens, chunk, rows = [TimedCell(1, 128), TimedCell(2, 128, "b64"), TimedCell(4, 512)], 13, 4, 1024
        found: dict[str, Any] = {"failed": {}, "cells": list(cells), "rounds": {e.name: [] for e in self.timed}}
        workers: dict[str, Worker] = {}

        def ask(name: str, step: dict[str, Any]) -> Any:
            try:
                return workers[name].ask(step, context.deadline)
            except gpu_run.WorkerFailed as error:
                found["failed"][name] = str(error)
                workers.pop(name).stop()
                return None

        loaded = None
        try:
            self._start(workers, found, context)
            for batch, length, names in cells:
                alike = [c for c in cells if c.context == length]
                distinct = [length] * min(max(c.batch for c in alike), rows // length)
                step = {"lengths": distinct, "seed": length, "vocab": context.vocab}
                if length != loaded:
                    for name in list(workers):
                        if any(re.search(c.engines, name) for c in alike):
                            ask(name, step | {"kind": "preload"})
                loaded = length
                began = time.monotonic()
                for number in range(self.rounds + 1):  # round 0 warms up
                    if context.left() < 1.3 * (time.monotonic() - began) / max(number, 1) + 10:
                        found["failed"]["time"] = f"stopped at {batch} x {length}, round {number}"
                        return self._summary(found)
                    size = 2 * chunk + 1 if number == 0 else tokens if batch < 64 else tokens // 2 + 1
                    asked = [name for name in workers if re.search(names, name)]
                    turn = number % max(len(asked), 1)
                    for name in asked[turn:] + asked[:turn]:
                        outcome = ask(name, step | {
                            "kind": "speed", "batch": batch, "context": length, "round": number, "chunk": chunk,
                            "tokens": size,
                        })  # fmt: skip
                        if outcome and number:
                            found["rounds"][name].append(outcome)
                    context.save(self._summary(found))
                took = time.monotonic() - began
                context.say(f"  {batch} x {length}: {took:.0f} s, {context.left():.0f} s left")
        finally:
            for worker in workers.values():
                worker.stop()
        return self._summary(found)

    def _start(self, workers: dict[str, Worker], found: dict[str, Any], context: Context) -> None:
        """All engines up, the machine quiet."""
        for engine in self.timed:
            job = Job(self._ready(engine, context), [])
            workers[engine.name] = Worker(job, context.model, context.work / engine.name)
            if context.rehearse:
                workers[engine.name].wait_steps(0, context.deadline)
            time.sleep(1.0)
        found["server"] = {}
        for name, worker in list(workers.items()):
            try:
                result = worker.wait_steps(0, context.deadline)
                found["server"][name] = result["server"] | {"up_s": result["up_s"]}
            except gpu_run.WorkerFailed as error:
                found["failed"][name] = str(error)
                workers.pop(name).stop()
        context.say(f"  up: {list(workers)}, {context.left():.0f} s left")
        context.wait_quiet()

    def _summary(self, found: dict[str, Any]) -> dict[str, Any]:
        return found | {
            "rows": gpu_judge.speed_rows(found["rounds"]),
            "ratios": gpu_judge.speed_ratios(found["rounds"], self.pairs),
        }


@dataclass
class Soak(Stage):
    """Mixed lengths, prefix reuse and aborts for a while, answers judged by a DCP1 engine's."""

    engine: Engine = field(default_factory=lambda: Engine("soak"))
    reference: Engine = field(default_factory=lambda: Engine("soak-dcp1"))
    seconds: float = 600.0

    def engines(self) -> list[Engine]:
        return [self.reference, self.engine]

    def run(self, context: Context) -> dict[str, Any]:
        longest, tokens, clients = (300, 16, 2) if context.rehearse else (20_000, 80, 16)
        bank = gpu_run.soak_bank(longest, context.vocab)
        if context.rehearse:
            bank = bank[::6]
        known = [
            gpu_run.batch_step("sevens", bank, tokens, 7),
            gpu_run.batch_step("whole", bank, tokens, len(bank)),
        ]
        rolling = context.work / "soak-rolling.json"
        rolling.unlink(missing_ok=True)
        step = {
            "kind": "soak", "seconds": 20.0 if context.rehearse else self.seconds, "clients": clients, "bank": bank,
            "stuck_after_s": 120.0, "longest": longest, "vocab": context.vocab, "new_tokens": tokens,
            "rolling": str(rolling), "until": context.deadline - 30,
        }  # fmt: skip
        jobs = [Job(self._ready(self.engine, context), [step]), Job(self._ready(self.reference, context), known)]
        at_once = 1 if context.rehearse else 2
        soaked, reference = gpu_run.run_jobs(jobs, context.model, context.work, at_once, context.deadline, context.say)
        found: dict[str, Any] = {"failed": {o.job.engine.name: o.failure for o in (reference, soaked) if o.failure}}
        rows = soaked.result.get("steps") or []
        outcome = rows[0]["outcome"] if rows else json.loads(rolling.read_text()) if rolling.exists() else None
        sevens, whole = reference.step("sevens"), reference.step("whole")
        if outcome and sevens and whole:
            found["soak"] = gpu_judge.judge_soak(sevens, whole, outcome["checked"], outcome["counts"])
        return found

    def complaints(self, found: dict[str, Any]) -> list[str]:
        lines = super().complaints(found)
        if "soak" not in found:
            return [*lines, "no answer was compared"]
        soak = found["soak"]
        if soak["wrong"]:
            lines.append(f"{len(soak['wrong'])} answers outside the limit")
        lines += [f"{soak[name]} requests: {name}" for name in ("stuck", "wrong_length") if soak[name]]
        if not soak["control_noticed"]:
            lines.append("answers to other prompts were not noticed")
        return lines


@dataclass
class PrefillDecode(Stage):
    """P->D over Mooncake, the pairs in turns with the same prompts. against: whose times a pair's are divided by if it
    names no other."""

    pairs: list[Pair] = field(default_factory=list)
    against: str = ""
    lengths: Sequence[int] = ()
    repeats: int = 7

    def engines(self) -> list[Engine]:
        return [engine for pair in self.pairs for engine in (pair.prefill, pair.decode)]

    def run(self, context: Context) -> dict[str, Any]:
        pairs = [
            replace(p, prefill=self._ready(p.prefill, context), decode=self._ready(p.decode, context))
            for p in self.pairs
        ]
        lengths, repeats = ((65, 150), 1) if context.rehearse else (self.lengths, self.repeats)
        found = gpu_run.run_pd(
            pairs, lengths, repeats, context.vocab, context.model, context.work / "pd", context.deadline, context.say,
            context.wait_quiet, lambda found: context.save(self._judged(found)),
        )  # fmt: skip
        return self._judged(found)

    def _judged(self, found: dict[str, Any]) -> dict[str, Any]:
        found["rows"] = gpu_run.pd_rows(found, {p.name: p.against or self.against for p in self.pairs})
        base = {answer["prompt"]: answer for answer in found["pairs"].get(self.against, {}).get("answers", [])}
        for data in found["pairs"].values():
            data["partings"] = [
                gpu_judge.part(base[answer["prompt"]], answer)._asdict()
                for answer in data["answers"]
                if answer["prompt"] in base
            ]
        return found


# -- engines that several plans have -----------------------------------------------------------------------------------

#: Beginning of an engine's name -> its attention backend.
BACKENDS = {"tri": "triton", "fi": "flashinfer"}


def without_dcp(base: Engine, virtual: int) -> list[Engine]:
    """DCP1 on each backend, with the virtual pages of ``virtual`` ranks: the references of :func:`with_blocks`."""
    return [
        replace(base, name=f"{short}-dcp1", backend=backend, page=virtual * base.page)
        for short, backend in BACKENDS.items()
    ]


def with_blocks(base: Engine, blocks: Sequence[int], mark: str = "") -> list[tuple[Engine, str]]:
    """``base`` with each block size on each backend, and its reference's name; ``mark`` ends the engine's name."""
    return [
        (replace(base, name=f"{short}-b{block}{mark}", backend=backend, block=block), f"{short}-dcp1")
        for block in blocks
        for short, backend in BACKENDS.items()
    ]


def every_layout(two: Engine) -> list[tuple[Engine, str]]:
    """Every layout of DCP 2, with its reference's name, those that matter most first: B = 64, 1, 16 with both merges,
    and stock, which exists on FlashInfer only."""
    stock = (replace(two, name="fi-stock", backend="flashinfer"), "fi-dcp1")
    return [
        *with_blocks(two, (64, 1, 16)),
        stock,
        *with_blocks(replace(two, comm="ag_rs"), (16, 64, 1), "-agrs"),
    ]


def variant(pair: Pair, name: str, env: dict[str, str], against: str = "") -> Pair:
    """``pair`` under another name, with ``env`` on both servers."""
    prefill, decode = (
        replace(server, name=f"{name}-{mode}", env=env)
        for server, mode in ((pair.prefill, "prefill"), (pair.decode, "decode"))
    )
    return Pair(name, prefill, decode, against)


def pack_against_blocks(prefill: Engine, decode: Engine, blocks: Sequence[int]) -> PrefillDecode:
    """Stock with its pack buffer, and for each block size a pair with pages of one block, all on the same GPUs."""
    pairs = [Pair("stock", replace(prefill, name="stock-prefill"), replace(decode, name="stock-decode"))]
    for block in blocks:
        name, paged = f"block{block}", {"page": max(block, decode.page)}
        pairs.append(Pair(
            name,
            replace(prefill, name=f"{name}-prefill", block=1, **paged),
            replace(decode, name=f"{name}-decode", block=block, **paged),
        ))  # fmt: skip
    what = f"blocks of {' and '.join(map(str, blocks))} against stock token round-robin with its pack buffer"
    return PrefillDecode("pd", what, 300, pairs=pairs, against="stock", lengths=(1000, 8192, 32_768, 131_072))


def triton_soak(base: Engine, dcp: int) -> Soak:
    """``base`` with blocks of 64 on Triton, against DCP1."""
    return Soak(
        "soak", "mixed lengths, prefix reuse and aborts", 760,
        engine=replace(base, name="tri-b64", dcp=dcp, block=64, max_tokens=65_536),
        reference=replace(base, name="tri-dcp1", max_tokens=262_144),
    )  # fmt: skip


@dataclass
class Plan:
    title: str
    gpus: int
    sizes: TinyModel
    stages: list[Stage]
    replaced: str = "nothing"


# -- what is printed ---------------------------------------------------------------------------------------------------


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


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
    compared = {"DCP1 on one backend against the other": found.get("between", {}), **found.get("beside", {})}
    for pair, steps in compared.items():
        for step, noise in steps.items():
            console.print(f"  {pair}, {step}: {noise['before']:.3f}, gap {noise['gap']:.3f}")
    for name, prompts in found["control"].items():
        noticed = [str(p["prompt"]) for p in prompts if p["noticed"]]
        console.print(f"  control, {name} with 64 other tokens: noticed in {len(noticed)} of {len(prompts)} prompts")
        console.print(f"    of {', '.join(noticed) or 'no length'}")
    for name, entry in found["engines"].items():
        for step, verdict in entry.get("verdicts", {}).items():
            for line in verdict["wrong"][:3]:
                console.print(f"  {name} {step}: {line}")
        for line in (entry.get("audit") or {}).get("complaints", [])[:2]:
            console.print(f"  {name} audit: {line}")
        if entry["failure"]:
            console.print(f"  {name}: {entry['failure'][:1500]}", markup=False)


def _by_cell(title: str, rows: list[dict[str, Any]], name: Callable[[dict], str], cell: Callable[[dict], str]) -> Table:
    """One line per name, one column per batch and context."""
    table = Table(title=title)
    cells = sorted({(r["context"], r["batch"]) for r in rows})
    table.add_column("")
    for context, batch in cells:
        table.add_column(f"{batch} x {context}", justify="right")
    for line in dict.fromkeys(map(name, rows)):
        by = {(r["context"], r["batch"]): cell(r) for r in rows if name(r) == line}
        table.add_row(line, *(by.get(c, "") for c in cells))
    return table


def _show_speed(found: dict[str, Any], console: Console) -> None:
    title = "ms per output token, median and quartiles (batch x context)"
    engine = lambda r: r["engine"]  # noqa: E731
    times = lambda r: f"{r['tpot_ms']:.2f} ({r['low_ms']:.2f}, {r['high_ms']:.2f})"  # noqa: E731
    console.print(_by_cell(title, found["rows"], engine, times))
    console.print(_by_cell("tokens per second", found["rows"], engine, lambda r: f"{r['tokens_per_second']:.0f}"))
    console.print(
        _by_cell(
            "ratio of times, median (smallest, largest) over rounds",
            found["ratios"],
            lambda r: f"{r['over']} / {r['under']}",
            lambda r: f"{r['ratio']:.3f} ({r['low']:.3f}, {r['high']:.3f})",
        )
    )
    _show_failures(found, console)


def _show_failures(found: dict[str, Any], console: Console) -> None:
    for name, text in found["failed"].items():
        console.print(f"  {name} FAILED: {text[:1500]}", markup=False)


def _show_soak(found: dict[str, Any], console: Console) -> None:
    table = Table(title="soak")
    table.add_column("what")
    table.add_column("found", justify="right")
    for name, value in found.get("soak", {}).items():
        shown = len(value) if isinstance(value, list) else json.dumps(value) if isinstance(value, dict) else value
        table.add_row(name, f"{shown:.4g}" if isinstance(shown, float) else str(shown))
    console.print(table)
    for line in found.get("soak", {}).get("wrong", [])[:5]:
        console.print(f"  {line}", markup=False)
    _show_failures(found, console)


def partings_line(partings: list[dict[str, Any]]) -> str:
    """How far a pair's answers are from those of the pair they are compared with."""
    known = [gpu_judge.Parting(**p) for p in partings]
    noise, equal = gpu_judge.noise_of(known), sum(p.at is None for p in known)
    return f"{noise.before:.3f} before a parting, gap {noise.gap:.3f}, {equal}/{len(known)} without one"


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
            row["pair"], str(row["prompt"]), f"{row['total_s'] * 1e3:.1f}",
            f"{row['total_over']:.3f} of {row.get('against', 'stock')}" if row["total_over"] else "",
            f"{row['segments']:.0f}", f"{row['batches']:.0f}",
            f"{row['kv_bytes'] / 1e6:.1f}", f"{row['transfer_s'] * 1e3:.1f}", f"{row['pack_s'] * 1e3:.1f}",
            f"{(row['pack_buffer_bytes'] or 0) / 1e6:.1f}",
        )  # fmt: skip
    console.print(table)
    for name, data in found["pairs"].items():
        console.print(f"  answers of {name}: {partings_line(data['partings'])}")
    _show_failures(found, console)


SHOWN: dict[type[Stage], Callable[[dict[str, Any], Console], None]] = {
    Answers: _show_answers,
    Speed: _show_speed,
    PrefillDecode: _show_pd,
    Soak: _show_soak,
}


def plot_speed(found: dict[str, Any], file: Path) -> None:
    """Time per output token over context, one panel per batch size."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    batches = sorted({r["batch"] for r in found["rows"]})
    figure, panels = plt.subplots(1, len(batches), figsize=(4.2 * len(batches), 3.6), squeeze=False)
    for panel, batch in zip(panels[0], batches, strict=True):
        for engine in dict.fromkeys(r["engine"] for r in found["rows"]):
            rows = [r for r in found["rows"] if (r["engine"], r["batch"]) == (engine, batch)]
            bars = [[r["tpot_ms"] - r["low_ms"] for r in rows], [r["high_ms"] - r["tpot_ms"] for r in rows]]
            panel.errorbar(
                [r["context"] for r in rows],
                [r["tpot_ms"] for r in rows],
                yerr=bars,
                label=engine,
                marker="o",
                capsize=3,
            )
        panel.set(title=f"batch {batch}", xlabel="context, tokens", ylabel="ms per output token", xscale="log", ylim=0)
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


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
        cell: Annotated[list[str] | None, typer.Option(help="BATCHxCONTEXT[=REGEX]: timed cells, in order.")] = None,
        quiet: Annotated[Path | None, typer.Option(help="Engines that are up wait until this file exists.")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run", help="List the plan and check what it needs.")] = False,
        rehearse: Annotated[
            bool, typer.Option("--rehearse", help="Tiny sizes and 2 ranks on the CPU test bed.")
        ] = False,
        show: Annotated[bool, typer.Option("--show", help="Print and plot what OUT holds; run nothing.")] = False,
    ) -> None:
        console = Console(width=190)
        chosen = [s for s in plan.stages if not stage or s.name in stage]
        if unknown := set(stage or ()) - {s.name for s in plan.stages}:
            raise typer.BadParameter(f"no stage {sorted(unknown)}: choose from {[s.name for s in plan.stages]}")
        if show:
            for s in chosen:
                _show(s, out / f"{prefix}_{s.name}.json", console)
            return
        for s in chosen:
            _keep_only(s, only)
            if cell and isinstance(s, Speed):
                s.cells = [parse_cell(text) for text in cell]
        if dry_run:
            raise typer.Exit(_dry_run(plan, chosen, console))
        deadline = time.monotonic() + budget
        work = Path(tempfile.gettempdir()) / f"sglang-dcp-block-{prefix}"
        out.mkdir(parents=True, exist_ok=True)
        complaints = []
        for s in chosen:
            console.print(f"stage {s.name}: {s.what}; {deadline - time.monotonic():.0f} s left")
            began, file = time.monotonic(), out / f"{prefix}_{s.name}.json"

            def save(found: dict[str, Any], s: Stage = s, began: float = began, file: Path = file) -> None:
                gpu_run.write_whole(file, {
                    "environment": gpu_run.environment(), "title": plan.title, "stage": s.name,
                    "replaced": plan.replaced, "rehearsal": rehearse, "seconds": time.monotonic() - began,
                    "found": found,
                })  # fmt: skip

            folder = work / s.name
            folder.mkdir(parents=True, exist_ok=True)
            sizes = s.sizes or plan.sizes
            sizes = type(sizes)() if rehearse else sizes
            model = gpu_run.model_folder(sizes, folder, s.weights)
            say = lambda text: console.print(text, markup=False)  # noqa: E731
            context = Context(model, sizes.vocab, folder, deadline, rehearse, say, save, quiet)
            found = s.run(context)
            save(found)
            complaints += [f"stage {s.name}: {line}" for line in s.complaints(found)]
        for s in chosen:
            _show(s, out / f"{prefix}_{s.name}.json", console)
        for line in complaints:
            console.print(line, markup=False)
        raise typer.Exit(1 if complaints else 0)

    return app


def _show(stage: Stage, file: Path, console: Console) -> None:
    if not file.exists():
        console.print(f"no {file}")
        return
    record = json.loads(file.read_text())
    SHOWN[type(stage)](record["found"], console)
    if isinstance(stage, Speed):
        plot_speed(record["found"], file.with_suffix(".png"))
    console.print(str(record["environment"]), markup=False)


def _keep_only(stage: Stage, pattern: str) -> None:
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
