"""A real prefill and a real decode engine on the CPU test bed, with Mooncake over TCP or NIXL between them.

    case = PdCase(PREFILL, replace(DECODE, block=64), rounds=[Round(prompts=[[5, 6, 7]], new_tokens=8)])
    result = run_pd(case, workdir)

Each engine lives in a process of its own (``python -m sglang_dcp_block.testing.pd ROLE FOLDER``). Both are handed the
same requests with the same ``bootstrap_room``, as SGLang's router does, and meet after each round. All requests of a
round are in flight at once.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from sglang_dcp_block.testing.cpu_testbed import AUDIT_VARIABLE
from sglang_dcp_block.testing.engine import (
    REFERENCE,
    Answer,
    Case,
    EngineFailed,
    EngineSpec,
    Round,
    free_port,
    kill_session,
    log_tail,
    run,
    start_process,
)
from sglang_dcp_block.testing.tiny_model import TinyMla

if TYPE_CHECKING:
    from sglang_dcp_block.testing.warm import WarmProcess, WarmServer

ROLES = ("prefill", "decode")
#: A prefill server needs our plugin but no flag: block size 1 is the default.
PREFILL = EngineSpec(block=1, page=64)
DECODE = EngineSpec(tp=2, dcp=2, block=64, page=64)
_ENVIRONMENT = {
    "MC_FORCE_TCP": "1",
    "MOONCAKE_PROTOCOL": "tcp",
    "UCX_MODULES": "^ib",  # UCX's InfiniBand module crashes a process at its end where there is no such card
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}
#: SGLang reads this (SGLANG_LOGGING_CONFIG_PATH): its own format, and our line per sent chunk.
_LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "[%(asctime)s %(process)d] %(levelname)s %(message)s"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "formatter": "plain", "stream": "ext://sys.stderr"}},
    "root": {"level": "INFO", "handlers": ["console"]},
    "loggers": {f"sglang_dcp_block.disaggregation.{backend}": {"level": "DEBUG"} for backend in ("mooncake", "nixl")},
}
_ROUND = re.compile(r"^ROUND \d+ .*$", re.M)
_CHUNK = re.compile(r"kv_chunk session=(\S+) rank=(\d+) tokens=(\d+) segments=(\d+) bytes=(\d+) batches=(\d+)")


@dataclass(frozen=True)
class PdCase:
    """env: of both engines. audit: record KV rows (see testing/probe.py) of both. transfer: SGLang's backend.

    A round whose name is in :data:`FAULTS` is sent with a broken plan; one that is called ABORT is aborted on the
    decode side when prefill has sent a part of it.
    """

    prefill: EngineSpec
    decode: EngineSpec
    rounds: list[Round]
    env: dict[str, str] = field(default_factory=dict)
    audit: bool = True
    transfer: str = "mooncake"


@dataclass(frozen=True)
class Chunk:
    """One chunk of one request, sent to one decode rank. tokens: those the rank owns; segments: over all layers."""

    session: str
    rank: int
    tokens: int
    segments: int
    bytes: int
    batches: int


@dataclass(frozen=True)
class PdResult:
    """answers[round][request] of the decode engine: an Answer, or the error's text. chunks[round]: in order of sending.

    seconds: start of the engines, then each round. audit: a folder for each role, or None.
    """

    answers: list[list[Answer | str]]
    prefill_errors: list[list[str]]
    chunks: list[list[Chunk]]
    seconds: list[float]
    audit: dict[str, Path] | None
    logs: dict[str, Path]

    def log(self, role: str) -> str:
        return self.logs[role].read_text(errors="replace")


def _chunks(text: str) -> list[Chunk]:
    return [Chunk(m[1], *map(int, m.groups()[1:])) for m in _CHUNK.finditer(text)]


def run_pd(case: PdCase, workdir: Path, *, timeout_s: float = 600, warm: WarmServer | None = None) -> PdResult:
    """Run ``case`` on two engines, forked from ``warm`` if given. Files (case, results, logs, audits) go to
    ``workdir``.

    Raises:
        EngineFailed: an engine died or did not answer within ``timeout_s`` seconds.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    logging_config = workdir / "logging.json"
    logging_config.write_text(json.dumps(_LOGGING))
    bootstrap_port = free_port()
    shared = {"case": asdict(case), "bootstrap_port": bootstrap_port, "first_room": int(time.time()) % 1_000_000 * 1000}
    (workdir / "case.json").write_text(json.dumps(shared))
    processes: dict[str, WarmProcess | subprocess.Popen] = {}
    logs = {role: workdir / f"{role}.log" for role in ROLES}
    try:
        for role, spec in zip(ROLES, (case.prefill, case.decode), strict=True):
            environment = spec.environment(workdir / f"audit-{role}" if case.audit else None)
            environment |= _ENVIRONMENT | {"SGLANG_LOGGING_CONFIG_PATH": str(logging_config)} | case.env | spec.env
            processes[role] = start_process(
                "sglang_dcp_block.testing.pd", [role, str(workdir)], environment, logs[role], warm
            )
        _wait(processes, logs, time.monotonic() + timeout_s)
    finally:
        for process in processes.values():
            kill_session(process)
    prefill, decode = (json.loads((workdir / f"{role}.json").read_text()) for role in ROLES)
    return PdResult(
        answers=[[a if isinstance(a, str) else Answer(**a) for a in answers] for answers in decode["answers"]],
        prefill_errors=[[a for a in answers if isinstance(a, str)] for answers in prefill["answers"]],
        chunks=[_chunks(text) for text in _ROUND.split(logs["prefill"].read_text(errors="replace"))[:-1]],
        seconds=decode["seconds"],
        audit={role: workdir / f"audit-{role}" for role in ROLES} if case.audit else None,
        logs=logs,
    )


def _wait(processes: dict[str, WarmProcess | subprocess.Popen], logs: dict[str, Path], deadline: float) -> None:
    """Until all have ended well."""
    while any(p.poll() is None for p in processes.values()):
        for role, process in processes.items():
            if (status := process.poll()) not in (None, 0):
                raise EngineFailed(f"the {role} engine ended with {status}:\n{log_tail(logs[role])}")
        if time.monotonic() > deadline:
            tails = "\n".join(f"--- {role}\n{log_tail(log)}" for role, log in logs.items())
            raise EngineFailed(f"the engines did not finish in time:\n{tails}")
        time.sleep(0.1)


# -- the demo ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoRow:
    """One request. tokens, single: what the PD pair and a single engine answered. segments, bytes: sent over Mooncake,
    all decode ranks. token_segments: what token round-robin needs, one per row and layer."""

    prompt: int
    tokens: list[int]
    single: list[int]
    segments: int
    bytes: int
    token_segments: int

    @property
    def equal(self) -> bool:
        return self.tokens == self.single


def run_pd_demo(
    workdir: Path,
    *,
    lengths: Sequence[int] = (1, 63, 64, 65, 129, 500),
    new_tokens: int = 8,
    block: int = 64,
    layers: int = TinyMla.layers,
    say: Callable[[str], None] = print,
    warm: WarmServer | None = None,
) -> list[DemoRow]:
    """Prefill (tp 1, no DCP) to decode (tp 2, dcp 2, ``block``) beside a single engine; about two minutes on two cores.

    Raises:
        EngineFailed: an engine did not start or answer.
    """
    random = Random(1)
    rounds = [Round([[random.randrange(2, 250) for _ in range(n)]], new_tokens, f"{n} tokens") for n in lengths]
    say("Starting a single engine (tp 1) and asking it...")
    single = run(Case(replace(REFERENCE, page=64), rounds), workdir / "single", audit=False, warm=warm)
    say(f"Starting prefill (tp 1) and decode (tp 2, dcp 2, block {block}), KV over Mooncake on TCP...")
    pair = run_pd(PdCase(PREFILL, replace(DECODE, block=block), rounds, audit=False), workdir / "pd", warm=warm)
    rows = []
    for n, [answer], [expected], chunks in zip(lengths, pair.answers, single.answers, pair.chunks, strict=True):
        if isinstance(answer, str):
            raise EngineFailed(f"the prompt of {n} tokens failed: {answer}")
        sent = sum(c.segments for c in chunks), sum(c.bytes for c in chunks), sum(c.tokens for c in chunks) * layers
        rows.append(DemoRow(n, answer.tokens, expected.tokens, *sent))
    return rows


# -- faults: a comparison that can't see these proves nothing ----------------------------------------------------------

ABORT = "abort"


def _owner_flip(plan: Any, src: Any, dst: Any, start: int, length: int) -> Any:
    return plan(src, dst._replace(rank=dst.layout.dcp_size - 1 - dst.rank), start, length)


def _destination_off_by_one(plan: Any, *sides_and_span: Any) -> Any:
    found = plan(*sides_and_span)
    return found._replace(dst_row=found.dst_row + 1)


def _block_order_swapped(plan: Any, *sides_and_span: Any) -> Any:
    found = plan(*sides_and_span)
    return found._replace(src_row=found.src_row[::-1])


def _last_chunk_dropped(plan: Any, src: Any, dst: Any, start: int, length: int) -> Any:
    return plan(src, dst, start, 0 if start else length)


def _slow(plan: Any, *sides_and_span: Any) -> Any:
    time.sleep(1.0)
    return plan(*sides_and_span)


def _sender_flip(plan: Any, src: Any, dst: Any, start: int, length: int) -> Any:
    return plan(src._replace(rank=src.layout.dcp_size - 1 - src.rank), dst, start, length)


FAULTS: dict[str, Callable[..., Any]] = {
    "owner flip": _owner_flip,
    "sender flip": _sender_flip,
    "destination off by one": _destination_off_by_one,
    "block order swapped": _block_order_swapped,
    "last chunk dropped": _last_chunk_dropped,
    ABORT: _slow,
}
#: A fault of one server's host cache, see :func:`_break_loads`.
PAGES_ASTRAY = {role: f"pages astray at {role}" for role in ROLES}


def _break_plans(folder: Path) -> None:
    """Plans of this process's children follow the fault that the file names. Call before they are forked."""
    from sglang_dcp_block.disaggregation import common

    plan = common.plan_pair

    def broken(*sides_and_span: Any) -> Any:
        name = (folder / "fault").read_text()
        if name == ABORT:
            with (folder / "planned").open("ab") as file:  # appended bytes of several processes all arrive
                file.write(b".")
        fault = FAULTS.get(name)
        return fault(plan, *sides_and_span) if fault else plan(*sides_and_span)

    common.plan_pair = broken  # type: ignore[assignment]


def _break_loads(folder: Path, role: str) -> None:
    """In rounds that say so, the pages of one load from host memory change places. Call before children are forked."""
    from sglang_dcp_block.testing import host_copies

    host_copies.send_astray(lambda: (folder / "fault").read_text() == PAGES_ASTRAY[role])


# -- in the engine's process -------------------------------------------------------------------------------------------


def _meet(folder: Path, role: str, name: str, timeout_s: float = 300) -> None:
    """Wait until both engines' processes have come here."""
    (folder / f"{name}.{role}").touch()
    end = time.monotonic() + timeout_s
    while not all((folder / f"{name}.{other}").exists() for other in ROLES):
        if time.monotonic() > end:
            raise TimeoutError(f"the other engine did not reach {name!r}")
        time.sleep(0.02)


async def _partly_sent(folder: Path, senders: int) -> None:
    """Until some sender plans its second part: then its first is on its way or there."""
    planned = folder / "planned"
    while not planned.exists() or planned.stat().st_size <= senders:
        await asyncio.sleep(0.02)


def main(role: str, folder_name: str) -> None:
    from sglang_dcp_block.testing.run_case import _answer, _audit
    from sglang_dcp_block.testing.warm import Template, import_sglang

    folder = Path(folder_name)
    shared = json.loads((folder / "case.json").read_text())
    spec = EngineSpec(**shared["case"][role])
    rounds = [Round(**r) for r in shared["case"]["rounds"]]
    began = [time.monotonic()]
    if role == "prefill" and any(one.name in FAULTS for one in rounds):
        _break_plans(folder)
    if any(one.name == PAGES_ASTRAY[role] for one in rounds):
        _break_loads(folder, role)
    if not spec.cold:
        import_sglang()
        Template().install()
    import sglang

    engine = sglang.Engine(
        **spec.engine_arguments(),
        port=free_port(),
        nccl_port=free_port(),
        sleep_on_idle=True,
        disaggregation_mode=role,
        disaggregation_transfer_backend=shared["case"]["transfer"],
        disaggregation_bootstrap_port=shared["bootstrap_port"],
    )
    answers = []
    try:
        _meet(folder, role, "up")
        began.append(time.monotonic())
        room = shared["first_room"]
        for number, one in enumerate(rounds):
            if one.flush in (True, role):
                engine.flush_cache()
            if role == "prefill":
                (folder / "fault").write_text(one.name)
            _meet(folder, role, f"round-{number}")

            async def ask(prompt: list[int], at: int, sampling: dict[str, Any] = one.sampling) -> Any:
                try:
                    reply = await engine.async_generate(
                        input_ids=prompt,
                        sampling_params=sampling,
                        return_logprob=True,
                        logprob_start_len=-1,
                        bootstrap_host="127.0.0.1",
                        bootstrap_port=shared["bootstrap_port"],
                        bootstrap_room=at,
                    )
                except Exception as error:  # what a client would see
                    return f"{type(error).__name__}: {error}"
                return asdict(_answer(reply))

            async def ask_all(prompts: list[list[int]] = one.prompts, first: int = room) -> list[Any]:
                tasks = [asyncio.ensure_future(ask(p, first + i)) for i, p in enumerate(prompts)]
                if role == "decode" and one.name == ABORT:  # noqa: B023
                    await _partly_sent(folder, shared["case"]["prefill"]["tp"])
                    engine.tokenizer_manager.abort_request(abort_all=True)
                return await asyncio.gather(*tasks)

            answers.append(engine.loop.run_until_complete(ask_all()))
            room += len(one.prompts)
            began.append(time.monotonic())
            print(f"ROUND {number} {one.name} done in {began[-1] - began[-2]:.1f} s", flush=True)
            _meet(folder, role, f"after-{number}")
            if os.environ.get(AUDIT_VARIABLE):
                _audit(engine, f"{number:02d}", spec.extra.get("attn_dp_size", 1))
        _meet(folder, role, "down")
    finally:
        engine.shutdown()
    seconds = [after - before for before, after in itertools.pairwise(began)]
    (folder / f"{role}.json").write_text(json.dumps({"answers": answers, "seconds": seconds}))


if __name__ == "__main__":
    main(*sys.argv[1:])
