"""Start real SGLang engines on the CPU test bed, each in a process of its own, and collect what they answered.

    case = Case(EngineSpec(tp=2, dcp=2, block=64), rounds=[Round(prompts=[[5, 6, 7]], new_tokens=8)])
    result = run(case, workdir)

A case is one engine start and any number of rounds; a round is one batch of greedy requests. The engine runs in
``python -m sglang_dcp_block.testing.run_case``: a crash or a hang ends as :class:`EngineFailed` with the log's tail.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.testing.cpu_testbed import AUDIT_VARIABLE, NAME
from sglang_dcp_block.testing.tiny_model import TinyMla, cached, tiny

if TYPE_CHECKING:
    from sglang_dcp_block.testing.warm import WarmProcess, WarmServer


@dataclass(frozen=True)
class EngineSpec:
    """One engine. block None: stock, without our plugin. rotate: --dcp-rotate. max_total_tokens: KV rows of one rank.

    chunked: chunked prefill size in tokens, None for off. kv_heads: of a grouped-query model, whose architecture says
    that it is one. extra: further ``sgl.Engine`` arguments. env: further environment variables; those that SGLang reads
    at import want ``cold``, a start without the warm process.
    """

    tp: int = 1
    pp: int = 1
    dcp: int = 1
    block: int | None = None
    backend: str = "triton"
    comm: str = "ag_rs"
    page: int = 1
    chunked: int | None = None
    max_total_tokens: int = 4096
    max_running: int = 16
    context: int = 2048
    heads: int = 4
    kv_heads: int = 1
    architecture: str = TinyMla.architecture
    extra: dict[str, Any] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    cold: bool = False
    rotate: bool = False

    @property
    def layout(self) -> DcpLayout:
        layout = DcpLayout(self.dcp, self.block or 1)
        return layout.rotated(self.page) if self.rotate else layout

    @property
    def name(self) -> str:
        layout = f"dcp{self.dcp}-block{self.block or 'stock'}{'-rotated' * self.rotate}"
        return f"tp{self.tp}-{layout}-{self.backend}-{self.comm}-page{self.page}-chunked{self.chunked or 'off'}"

    def engine_arguments(self) -> dict[str, Any]:
        """Keyword arguments of ``sgl.Engine``. Everything that a CPU can't do or a test doesn't need is off."""
        arguments = {
            "model_path": str(cached(tiny(self.architecture, self.heads, self.kv_heads))),
            "skip_tokenizer_init": True,
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": self.backend,
            "sampling_backend": "pytorch",
            "tp_size": self.tp,
            "pp_size": self.pp,
            "page_size": self.page,
            "max_total_tokens": self.max_total_tokens,
            "max_running_requests": self.max_running,
            "context_length": self.context,
            "chunked_prefill_size": -1 if self.chunked is None else self.chunked,
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "skip_server_warmup": True,
            "mem_fraction_static": 0.2,
            "random_seed": 1,
            "log_level": "info",
        }
        if self.dcp > 1:
            arguments |= {"dcp_size": self.dcp, "dcp_comm_backend": self.comm}
        if self.block is not None:
            arguments["dcp_block_size"] = self.block
        if self.rotate:
            arguments["dcp_rotate"] = True
        return arguments | self.extra

    def environment(self, audit: Path | None = None) -> dict[str, str]:
        """The process environment: test bed on, one thread and one core per rank (ranks share cores round-robin)."""
        cores = sorted(os.sched_getaffinity(0))
        environment = os.environ | {
            "SGLANG_PLATFORM": NAME,
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(cores[i % len(cores)]) for i in range(self.tp * self.pp)),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
        }
        if self.block is None:  # stock: our plugin isn't even loaded
            environment["SGLANG_PLUGINS"] = NAME
        if audit is not None:
            environment[AUDIT_VARIABLE] = str(audit)
        return environment | self.env


#: The engine that others are compared with: no DCP, no plugin.
REFERENCE = EngineSpec(backend="flashinfer")


@dataclass(frozen=True)
class Round:
    """One batch of greedy requests. new_tokens: for each request alike, or at most so many where an end-of-text token
    stops (``stop``). flush: empty the radix cache first; of a PD pair, of both servers or of the one it names.
    """

    prompts: list[list[int]]
    new_tokens: int
    name: str = ""
    flush: bool | str = False
    stop: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        return {"temperature": 0.0, "max_new_tokens": self.new_tokens, "ignore_eos": not self.stop}


@dataclass(frozen=True)
class Case:
    spec: EngineSpec
    rounds: list[Round]


@dataclass(frozen=True)
class Answer:
    """tokens and logprobs: of the generated tokens, natural log. cached: prompt tokens taken from the radix cache.

    sources: of them, how many lay on the "device", and with a host cache on the "host" and in "storage".
    """

    tokens: list[int]
    logprobs: list[float]
    cached: int
    retracted: int
    sources: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CaseResult:
    """answers[round][request]. seconds: start of the engine, then each round. server: parts of get_server_info()."""

    answers: list[list[Answer]]
    seconds: list[float]
    server: dict[str, Any]
    audit: Path | None
    log: Path


class EngineFailed(RuntimeError):
    """The engine's process died, hung or answered nothing; the message ends with its log's last lines."""


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def kill_session(process: WarmProcess | subprocess.Popen) -> None:
    """The process and everything it started: a scheduler that outlives its engine keeps its core and its memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def log_tail(log: Path, lines: int = 40) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "no log"


def write_whole(file: Path, value: Any) -> None:
    """As JSON, so that a reader never sees half of it."""
    scratch = file.with_suffix(".part")
    scratch.write_text(json.dumps(value))
    scratch.rename(file)


def run(
    case: Case, workdir: Path, *, audit: bool = True, timeout_s: float = 600, warm: WarmServer | None = None
) -> CaseResult:
    """Run ``case`` in its own process. Files (case, result, log, audit/) go to ``workdir``. Prints one line.

    warm: fork the process from there, unless the case wants a cold start.

    Raises:
        EngineFailed: no result within ``timeout_s`` seconds, or the process failed.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    request, answer, log = workdir / "case.json", workdir / "result.json", workdir / "log.txt"
    audit_folder = workdir / "audit" if audit else None
    request.write_text(json.dumps(asdict(case)))
    answer.unlink(missing_ok=True)
    started = time.monotonic()
    environment = case.spec.environment(audit_folder)
    process = start_process(
        "sglang_dcp_block.testing.run_case",
        [str(request), str(answer)],
        environment,
        log,
        None if case.spec.cold else warm,
    )
    status: int | str
    try:
        status = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        status = f"no answer within {timeout_s:.0f} s"
    finally:
        kill_session(process)
    if status != 0 or not answer.exists():
        raise EngineFailed(f"engine {case.spec} failed ({status}); {log} ends with:\n{log_tail(log)}")
    loaded = json.loads(answer.read_text())
    steps = ", ".join(f"{s:.0f}" for s in loaded["seconds"])
    print(f"  engine {case.spec.name}: {time.monotonic() - started:.0f} s (start, rounds: {steps})", flush=True)
    return CaseResult(
        answers=[[Answer(**a) for a in answers] for answers in loaded["answers"]],
        seconds=loaded["seconds"],
        server=loaded["server"],
        audit=audit_folder,
        log=log,
    )


def differences(answers: list[Answer], expected: list[Answer], tolerance: float) -> list[str]:
    """What differs, in words: a token, or a logprob by more than ``tolerance`` (NaN differs). Empty means equal."""
    found = [] if len(answers) == len(expected) else [f"{len(answers)} answers, {len(expected)} expected"]
    for number, (got, want) in enumerate(zip(answers, expected, strict=False)):
        if got.tokens != want.tokens:
            at = next((i for i, (a, b) in enumerate(zip(got.tokens, want.tokens, strict=False)) if a != b), "the end")
            found.append(f"request {number}: tokens part at {at}: {got.tokens} instead of {want.tokens}")
            continue
        gaps = [abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)]
        wrong = [i for i, gap in enumerate(gaps) if not gap <= tolerance]
        if wrong:
            found.append(
                f"request {number}: logprob {wrong[0]} is {got.logprobs[wrong[0]]}, not {want.logprobs[wrong[0]]}"
            )
    return found


def start_process(
    module: str, arguments: list[str], environment: dict[str, str], log: Path, warm: WarmServer | None
) -> WarmProcess | subprocess.Popen:
    """Run ``main(*arguments)`` of a module in a process and a session of its own, forked from ``warm`` or cold."""
    if warm is not None:
        return warm.start(module, arguments, environment, log)
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", module, *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def case_from_json(text: str) -> Case:
    loaded = json.loads(text)
    return Case(EngineSpec(**loaded["spec"]), [Round(**r) for r in loaded["rounds"]])
