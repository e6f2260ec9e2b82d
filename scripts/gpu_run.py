"""Engines and PD servers on GPUs: started, asked, measured and judged.

Every engine runs in a process of its own (``python scripts/gpu_run.py JOB.json RESULT.json``), works through a list of
steps and writes what it answered. Nothing is compared by equal ids: in bfloat16 one and the same engine parts from
itself when the shape of the batch changes. So engines get the same batches, and a first difference is judged by the gap
between the two best tokens there and the logprob distance before it, against what DCP1 differs from itself by in the
same run (:func:`judge`). Whether KV lies where it should is decided by the pool audit (:func:`audit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dcp_block.testing import one_gpu_testbed
from sglang_dcp_block.testing.cpu_testbed import AUDIT_VARIABLE
from sglang_dcp_block.testing.cpu_testbed import NAME as CPU_BED
from sglang_dcp_block.testing.engine import free_port
from sglang_dcp_block.testing.tiny_model import TinyMla, write

SGLANG_VERSION = "0.5.23"
#: One bfloat16 step of a logit between 16 and 32: two computations may always differ by that.
NOISE_FLOOR = 0.125
#: How much more than DCP1's own noise another layout may differ by: its partial results are rounded once more.
NOISE_FACTOR = 2.0
#: Largest difference of one KV element (the rows have unit variance) that bfloat16 noise explains; a row of another
#: token differs by 4 to 6 somewhere.
AUDIT_TOLERANCE = 1.5

#: DeepSeek-V2-Lite's attention: 16 heads over kv_lora 512 and rope 64, in few dense layers.
V2_LITE = TinyMla(
    heads=16, layers=4, hidden=1024, intermediate=2048, vocab=32000, kv_lora_rank=512, rope_dim=64, nope_dim=128,
    value_dim=128, max_position=163840,
)  # fmt: skip
#: DeepSeek-V3's attention: 128 heads.
V3 = replace(V2_LITE, heads=128, hidden=2048, intermediate=4096)


# -- what is started ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One engine. block None: stock, this plugin not even loaded. bed: "", "one_gpu" or "cpu" (a rehearsal).

    max_tokens: KV rows of one rank, None for as many as fit. chunked: chunked prefill size in tokens.
    """

    name: str
    tp: int = 1
    dcp: int = 1
    block: int | None = None
    backend: str = "triton"
    comm: str = "a2a"
    graphs: bool = True
    bed: str = ""
    page: int = 64
    context: int = 140_000
    max_tokens: int | None = None
    chunked: int = 8192
    mem_fraction: float = 0.8
    base_gpu: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def arguments(self, model: Path) -> dict[str, Any]:
        """``sgl.Engine`` arguments, and command line flags by the same names."""
        found: dict[str, Any] = {
            "model_path": str(model),
            "skip_tokenizer_init": True,
            "skip_server_warmup": True,
            "dtype": "bfloat16",
            "attention_backend": self.backend,
            "sampling_backend": "pytorch",
            "tp_size": self.tp,
            "page_size": self.page,
            "context_length": self.context,
            "chunked_prefill_size": self.chunked,
            "mem_fraction_static": self.mem_fraction,
            "random_seed": 1,
            "log_level": "info",
            "disable_custom_all_reduce": True,
            # On by itself for this architecture on Hopper, and may use NVLink multicast, which a shared host forbids.
            "enforce_disable_flashinfer_allreduce_fusion": True,
            "disable_prefill_cuda_graph": True,
            "base_gpu_id": self.base_gpu,
        }
        if self.graphs:
            found["cuda_graph_max_bs_decode"] = 64
        else:
            found["disable_decode_cuda_graph"] = True
        if self.max_tokens:
            found["max_total_tokens"] = self.max_tokens
        if self.dcp > 1:
            found |= {"dcp_size": self.dcp, "dcp_comm_backend": self.comm}
        if self.block is not None:
            found["dcp_block_size"] = self.block
        if self.bed == "one_gpu":
            found["disable_overlap_schedule"] = True
        if self.bed == "cpu":
            found |= {"device": "cpu", "dtype": "float32", "disable_overlap_schedule": True, "mem_fraction_static": 0.2}
        return found | self.extra

    def environment(self, audit: Path | None = None, trace: Path | None = None) -> dict[str, str]:
        found = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.bed == "one_gpu" and self.tp > 1:
            found |= one_gpu_testbed.ENVIRONMENT
        if self.bed == "cpu":
            cores = sorted(os.sched_getaffinity(0))
            bind = "|".join(str(cores[i % len(cores)]) for i in range(self.tp))
            found |= {"SGLANG_PLATFORM": CPU_BED, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
            found["SGLANG_CPU_OMP_THREADS_BIND"] = bind
        if self.block is None:
            found["SGLANG_PLUGINS"] = f"{CPU_BED},{one_gpu_testbed.NAME}"
        if audit is not None:
            found[AUDIT_VARIABLE] = str(audit)
        if trace is not None:
            found[one_gpu_testbed.TRACE_VARIABLE] = str(trace)
        return found


def rehearsed(engine: Engine) -> Engine:
    """The same engine on the CPU test bed: few ranks, short contexts."""
    ranks = min(engine.tp, 2)
    return replace(
        engine, bed="cpu", tp=ranks, dcp=min(engine.dcp, ranks), graphs=False, context=2048, max_tokens=4096,
        chunked=128, base_gpu=0, comm="ag_rs" if engine.comm == "a2a" else engine.comm,
    )  # fmt: skip


def model_folder(sizes: TinyMla, root: Path) -> Path:
    """A random checkpoint with these sizes, written once."""
    folder = root / f"model-{sizes.heads}-{sizes.hidden}-{sizes.layers}"
    if not (folder / "done").exists():
        write(folder, sizes)
        config = json.loads((folder / "config.json").read_text())
        if sizes.kv_lora_rank == 512:  # the CPU bed needs a scaled rope; plain rope is what GPUs have a kernel for
            config["rope_scaling"] = None
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "done").touch()
    return folder


# -- steps -------------------------------------------------------------------------------------------------------------


def prompts(lengths: Sequence[int], seed: int, vocab: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab - 10) for _ in range(n)] for n in lengths]


def answer_steps(lengths: Sequence[int], new_tokens: int, vocab: int, alone: int = 6) -> list[dict[str, Any]]:
    """Fresh prompts in one batch, the same with a cached prefix, and the first ones one at a time.

    The second round's additions don't come from the first one's answers: engines may part there.
    """
    fresh = prompts(lengths, 0, vocab)
    tails = prompts([3 + i for i in range(len(lengths))], 1, vocab)
    again = [p + t for p, t in zip(fresh, tails, strict=True)]
    return [
        {"kind": "batch", "name": "fresh", "prompts": fresh, "new_tokens": new_tokens, "flush": True},
        {"kind": "batch", "name": "again", "prompts": again, "new_tokens": new_tokens, "flush": False},
        {"kind": "alone", "name": "alone", "prompts": fresh[:alone], "new_tokens": new_tokens, "flush": True},
    ]


def speed_steps(
    cells: Sequence[tuple[int, int]], vocab: int, tokens: int = 64, together: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """cells: (batch, context). together: ``folder`` and how many ``engines`` start side by side, for :func:`_turn`."""
    together = together or {}
    return [
        {
            "kind": "speed",
            "batch": b,
            "context": n,
            "tokens": tokens,
            "repeats": 3,
            "vocab": vocab,
            "together": together,
        }
        for b, n in cells
    ]


# -- the worker process ------------------------------------------------------------------------------------------------


def _generate(engine: Any, batch: list[list[int]], new_tokens: int, gaps: bool = True) -> list[dict[str, Any]]:
    replies = engine.generate(
        input_ids=batch,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=gaps,
        top_logprobs_num=2 if gaps else 0,
    )
    rows = []
    for prompt, reply in zip(batch, replies, strict=True):
        meta = reply["meta_info"]
        row = {"prompt": len(prompt), "cached": meta.get("cached_tokens"), "ids": list(reply["output_ids"])}
        if gaps:
            row["logprobs"] = [entry[0] for entry in meta["output_token_logprobs"]]
            row["gaps"] = [best[0][0] - best[1][0] for best in meta["output_top_logprobs"]]
        rows.append(row)
    return rows


def _answers(engine: Any, step: dict[str, Any]) -> list[dict[str, Any]]:
    if step["flush"]:
        engine.flush_cache()
    if step["kind"] == "alone":
        return [row for p in step["prompts"] for row in _generate(engine, [p], step["new_tokens"])]
    return _generate(engine, step["prompts"], step["new_tokens"])


@contextlib.contextmanager
def _turn(together: dict[str, Any]) -> Iterator[None]:
    """Engines start side by side, wait for the last one, and then run one at a time, cell by cell."""
    if not together:
        yield
        return
    folder, patience = Path(together["folder"]), time.monotonic() + 200
    (folder / f"{os.getpid()}.up").touch()
    while len(list(folder.glob("*.up"))) < together["engines"] and time.monotonic() < patience:
        time.sleep(0.2)
    with (folder / "turn").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _speed(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    with _turn(step["together"]):
        return _time_per_token(engine, step)


def _time_per_token(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Two runs over cached prompts that differ in nothing but ``tokens`` decode steps."""
    engine.flush_cache()
    batch = prompts([step["context"]] * step["batch"], step["context"] + step["batch"], step["vocab"])

    def run(new_tokens: int) -> float:
        began = time.perf_counter()
        _generate(engine, batch, new_tokens, gaps=False)
        return time.perf_counter() - began

    prefill = run(1)
    run(8)
    samples = []
    for _ in range(step["repeats"]):
        short = run(8)
        samples.append((run(8 + step["tokens"]) - short) / step["tokens"] * 1e3)
    tpot = statistics.median(samples)
    return {
        "batch": step["batch"], "context": step["context"], "tpot_ms": tpot, "samples_ms": samples,
        "tokens_per_second": step["batch"] / tpot * 1e3, "prefill_s": prefill,
    }  # fmt: skip


def _soak(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Mixed lengths, shared prefixes and aborts from many clients; a few prompts are asked alone before and after."""
    vocab, rng = step["vocab"], random.Random(9)
    checks = prompts([1, 63, 65, 500, 5000], 77, vocab)
    engine.flush_cache()
    before = [row for p in checks for row in _generate(engine, [p], 32)]
    shared = prompts([64 * 7 + 5, 2000, step["longest"] // 2], 5, vocab)
    counts = {"finished": 0, "aborted": 0, "wrong_length": 0, "stuck": 0}
    deadline = time.monotonic() + step["seconds"]

    async def one(number: int) -> None:
        length = int(2 ** rng.uniform(0, step["longest"].bit_length() - 1))
        ids = prompts([length], rng.randrange(1 << 30), vocab)[0]
        if rng.random() < 0.4:
            ids = rng.choice(shared) + ids[:500]
        wanted, abort_after = rng.randrange(1, 200), rng.randrange(1, 40) if rng.random() < 0.15 else None
        rid, got, aborted = f"soak-{number}", 0, False
        stream = await engine.async_generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True},
            rid=rid,
            stream=True,
        )
        async for chunk in stream:
            got = chunk["meta_info"]["completion_tokens"]
            if abort_after is not None and got >= abort_after and not aborted:
                engine.tokenizer_manager.abort_request(rid=rid)
                aborted = True
        counts["aborted" if aborted else "finished"] += 1
        counts["wrong_length"] += not aborted and got != wanted

    async def client(first: int) -> None:
        number = first
        while time.monotonic() < deadline:
            try:
                await asyncio.wait_for(one(number), timeout=step["stuck_after_s"])
            except TimeoutError:
                counts["stuck"] += 1
            number += step["clients"]

    async def everyone() -> None:
        await asyncio.gather(*(client(i) for i in range(step["clients"])))

    engine.loop.run_until_complete(everyone())
    engine.flush_cache()
    after = [row for p in checks for row in _generate(engine, [p], 32)]
    partings = [part(a, b) for a, b in zip(before, after, strict=True)]
    return counts | {"seconds": step["seconds"], "checks": [p._asdict() for p in partings]}


def worker(job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    engine_spec = Engine(**job["engine"])
    began = time.monotonic()
    import sglang

    engine = sglang.Engine(**engine_spec.arguments(Path(job["model"])))
    result: dict[str, Any] = {"up_s": time.monotonic() - began, "steps": []}
    print(f"UP in {result['up_s']:.0f} s", flush=True)
    kinds = {"batch": _answers, "alone": _answers, "speed": _speed, "soak": _soak}
    try:
        info = engine.get_server_info()
        names = ("max_total_num_tokens", "dcp_size", "dcp_block_size", "dcp_comm_backend", "attention_backend")
        result["server"] = {name: info.get(name) for name in names}
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        result["server"] |= {k: scheduler.get(k) for k in ("max_total_num_tokens", "dcp_layout")}
        for number, step in enumerate(job["steps"]):
            step_began = time.monotonic()
            outcome = kinds[step["kind"]](engine, step)
            took = time.monotonic() - step_began
            result["steps"].append({"kind": step["kind"], "name": step.get("name"), "took_s": took, "outcome": outcome})
            print(f"STEP {number} {step['kind']} {step.get('name', '')} {took:.1f} s", flush=True)
            # After every step: a later one that hangs doesn't cost the earlier ones' results.
            Path(result_file).write_text(json.dumps(result))
        if os.environ.get(AUDIT_VARIABLE):
            engine.collective_rpc("dcp_block_audit", name="end")
        result["complete"] = True
        Path(result_file).write_text(json.dumps(result))
    finally:
        engine.shutdown()


# -- running workers ---------------------------------------------------------------------------------------------------


@dataclass
class Job:
    engine: Engine
    steps: list[dict[str, Any]]
    audit: bool = False
    needs_s: float = 90.0  # rough, start included: a job that can't finish in the time left isn't started


@dataclass
class Outcome:
    """result: the worker's file, possibly incomplete. failure: why, with the log's last lines; "" if it went well."""

    job: Job
    result: dict[str, Any]
    audit: Path | None
    failure: str = ""
    seconds: float = 0.0

    def step(self, name: str) -> list[dict[str, Any]] | None:
        return next((s["outcome"] for s in self.result.get("steps", []) if s["name"] == name), None)


def tail(log: Path, lines: int = 12) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else "no log"


def kill_session(process: subprocess.Popen) -> None:
    """The process and everything it started: a scheduler that outlives its engine keeps its memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_jobs(
    jobs: list[Job], model: Path, work: Path, at_once: int, deadline: float, say: Any = print
) -> list[Outcome]:
    """Run ``jobs`` in order, ``at_once`` at a time, until ``deadline`` (monotonic)."""
    outcomes: list[Outcome | None] = [None] * len(jobs)
    gate = threading.Semaphore(at_once)

    def run(number: int, job: Job) -> None:
        try:
            outcomes[number] = _run_job(job, model, work / job.engine.name, deadline)
        finally:
            gate.release()
        outcome = outcomes[number]
        if outcome.failure and (together := job.steps[0].get("together")):
            (Path(together["folder"]) / f"{job.engine.name}.up").touch()  # nobody need wait for it
        state = "failed" if outcome.failure else "ok"
        say(f"  {job.engine.name}: {state}, {outcome.seconds:.0f} s (up {outcome.result.get('up_s', 0):.0f})")

    threads = []
    for number, job in enumerate(jobs):
        gate.acquire()
        if deadline - time.monotonic() < job.needs_s:
            gate.release()
            outcomes[number] = Outcome(job, {}, None, f"not run: needs about {job.needs_s:.0f} s, too little time left")
            say(f"  {job.engine.name}: {outcomes[number].failure}")
            continue
        threads.append(threading.Thread(target=run, args=(number, job)))
        threads[-1].start()
        time.sleep(1.0)  # ports are picked by trying
    for thread in threads:
        thread.join()
    return [outcome for outcome in outcomes if outcome is not None]


def _run_job(job: Job, model: Path, work: Path, deadline: float) -> Outcome:
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    request, answer, log = work / "job.json", work / "result.json", work / "log.txt"
    request.write_text(json.dumps({"engine": asdict(job.engine), "model": str(model), "steps": job.steps}))
    audit_folder = work / "audit" if job.audit else None
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, str(request), str(answer)],
            env=job.engine.environment(audit_folder),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        code: Any = process.wait(timeout=max(1.0, deadline - began))
    except subprocess.TimeoutExpired:
        code = "stopped at the end of the time"
    finally:
        kill_session(process)
    result = json.loads(answer.read_text()) if answer.exists() else {}
    failure = "" if code == 0 and result.get("complete") else f"exit {code}; {log} ends with:\n{tail(log)}"
    return Outcome(job, result, audit_folder, failure, time.monotonic() - began)


# -- judging -----------------------------------------------------------------------------------------------------------


class Parting(NamedTuple):
    """How two greedy answers to one prompt compare.

    at: first differing token, None if none. gap: top-2 logprob gap there, of the first engine. before: largest
    logprob distance before it. tokens: compared.
    """

    prompt: int
    cached: int | None
    at: int | None
    gap: float
    before: float
    tokens: int


def part(a: dict[str, Any], b: dict[str, Any]) -> Parting:
    at = next((i for i, (x, y) in enumerate(zip(a["ids"], b["ids"], strict=False)) if x != y), None)
    end = len(a["ids"]) if at is None else at
    distances = [abs(x - y) for x, y in zip(a["logprobs"][:end], b["logprobs"][:end], strict=True)]
    bad = [d for d in distances if not d <= 1e30]  # NaN
    before = float("inf") if bad else max(distances, default=0.0)
    return Parting(a["prompt"], b["cached"], at, 0.0 if at is None else a["gaps"][at], before, end)


def compare(reference: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[Parting]:
    return [part(a, b) for a, b in zip(reference, other, strict=True)]


class Noise(NamedTuple):
    """What DCP1 differs from itself by: logprob distance before a parting, and top-2 gap at one."""

    before: float
    gap: float

    def limit(self) -> float:
        return NOISE_FACTOR * max(self.before, self.gap, NOISE_FLOOR)


def noise_of(partings: Sequence[Parting]) -> Noise:
    return Noise(
        max((p.before for p in partings), default=0.0), max((p.gap for p in partings if p.at is not None), default=0.0)
    )


class Verdict(NamedTuple):
    """wrong: prompts whose difference exceeds the noise, in words. equal: answers equal to the last token."""

    wrong: list[str]
    equal: int
    asked: int
    worst_before: float
    worst_gap: float


def judge(partings: Sequence[Parting], noise: Noise) -> Verdict:
    limit, wrong = noise.limit(), []
    for p in partings:
        if not p.before <= limit:
            wrong.append(f"prompt of {p.prompt}: logprobs {p.before:.3f} apart before token {p.at}, noise {limit:.3f}")
        elif p.at is not None and p.gap > limit:
            wrong.append(f"prompt of {p.prompt}: another token at {p.at} over a gap of {p.gap:.3f}, noise {limit:.3f}")
    observed = noise_of(partings)
    return Verdict(wrong, sum(p.at is None for p in partings), len(partings), observed.before, observed.gap)


def audit(reference: Path, records: Path, dcp_size: int, block: int) -> dict[str, Any]:
    """Does every KV row lie where the layout says? And the control: would another block size be noticed?"""
    from sglang_dcp_block.dcp.layout import DcpLayout
    from sglang_dcp_block.testing.audit import Reference, audit_requests, load_requests

    known, found = Reference(load_requests(reference)), load_requests(records)
    report = audit_requests(DcpLayout(dcp_size, block), found, known, AUDIT_TOLERANCE)
    control = audit_requests(DcpLayout(dcp_size, 2 if block == 1 else block // 2), found, known, AUDIT_TOLERANCE)
    return {
        "ok": report.compared > 0 and not report.mismatches and not report.written,
        "compared": report.compared, "mismatches": report.mismatches, "max_abs_diff": report.max_abs_diff,
        "unowned": report.unowned, "written": report.written, "uncovered": report.uncovered,
        "complaints": report.complaints, "control_noticed": bool(control.mismatches or control.written),
    }  # fmt: skip


# -- PD ----------------------------------------------------------------------------------------------------------------

PD_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server."""

    name: str
    prefill: Engine
    decode: Engine


def _flags(arguments: dict[str, Any]) -> list[str]:
    found = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            found.append(flag)
        elif value is not False:
            found += [flag, str(value)]
    return found


class Server:
    """One half of a pair as a ``sglang.launch_server`` process."""

    def __init__(self, engine: Engine, mode: str, model: Path, work: Path, bootstrap_port: int) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.port, self.log, self.trace = free_port(), work / f"{mode}.log", work / f"{mode}.trace"
        self.trace.unlink(missing_ok=True)
        arguments = engine.arguments(model) | {
            "host": "127.0.0.1",
            "port": self.port,
            "disaggregation_mode": mode,
            "disaggregation_transfer_backend": "mooncake",
        }
        if mode == "prefill":
            arguments["disaggregation_bootstrap_port"] = bootstrap_port
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *_flags(arguments)],
                env=engine.environment(trace=self.trace) | PD_ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self, deadline: float) -> None:
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"server not ready; {self.log} ends with:\n{tail(self.log)}")

    def post(self, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return json.load(reply)

    def events(self, since: float, until: float) -> list[dict[str, Any]]:
        if not self.trace.exists():
            return []
        events = [json.loads(line) for line in self.trace.read_text().splitlines()]
        return [e for e in events if since <= e["at"] <= until]


class RunningPair:
    _room = 1000

    def __init__(self, pair: Pair, model: Path, work: Path) -> None:
        self.pair, self.bootstrap_port = pair, free_port()
        folder = work / pair.name
        self.prefill = Server(pair.prefill, "prefill", model, folder, self.bootstrap_port)
        self.decode = Server(pair.decode, "decode", model, folder, self.bootstrap_port)

    def ask(self, ids: list[int], new_tokens: int, timeout: float = 120.0) -> tuple[dict[str, Any], dict[str, Any]]:
        """Decode's answer, and what the request cost."""
        RunningPair._room += 1
        body = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 2,
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.bootstrap_port,
            "bootstrap_room": RunningPair._room,
        }
        began = time.monotonic()
        half = threading.Thread(target=self._prefill, args=(body, timeout))
        half.start()
        reply = self.decode.post(body, timeout)
        ended = time.monotonic()
        half.join()
        events = self.prefill.events(began, time.monotonic())
        # Besides KV, each rank gets one batch of metadata: the small ones.
        batches = [e for e in events if e["event"] == "batch" and e["bytes"] > 64 * 1024]
        packs = [e for e in events if e["event"] == "pack"]
        meta = reply["meta_info"]
        row = {
            "prompt": len(ids), "cached": meta.get("cached_tokens"), "ids": list(reply["output_ids"]),
            "logprobs": [e[0] for e in meta["output_token_logprobs"]],
            "gaps": [b[0][0] - b[1][0] for b in meta["output_top_logprobs"]],
        }  # fmt: skip
        return row, {
            "prompt": len(ids),
            "total_s": ended - began,
            "segments": sum(e["segments"] for e in batches),
            "batches": len(batches),
            "kv_bytes": sum(e["bytes"] for e in batches),
            "transfer_s": sum(e["seconds"] for e in batches),
            "pack_s": sum(e["seconds"] for e in packs),
            "pack_fits": all(e["fits"] for e in packs),
        }

    def _prefill(self, body: dict[str, Any], timeout: float) -> None:
        with contextlib.suppress(Exception):  # decode's answer tells
            self.prefill.post(body, timeout)

    def pack_bytes(self) -> int:
        return sum(e["bytes"] for e in self.prefill.events(0, float("inf")) if e["event"] == "pack_buffers")

    def stop(self) -> None:
        for server in (self.prefill, self.decode):
            kill_session(server.process)


def run_pd(
    pairs: Sequence[Pair],
    lengths: Sequence[int],
    repeats: int,
    vocab: int,
    model: Path,
    work: Path,
    deadline: float,
    say: Any = print,
) -> dict[str, Any]:
    """Every pair up at once, asked in turns with the same fresh prompts: transfer, gather, memory, answers."""
    shutil.rmtree(work, ignore_errors=True)
    found: dict[str, Any] = {"pairs": {}, "failed": {}}
    running: dict[str, RunningPair] = {}
    try:
        for pair in pairs:
            running[pair.name] = RunningPair(pair, model, work)
        for name, pair in list(running.items()):
            try:
                pair.prefill.wait_ready(deadline - 30)
                pair.decode.wait_ready(deadline - 30)
            except RuntimeError as error:
                found["failed"][name] = str(error)
                running.pop(name).stop()
        say(f"  pairs up: {list(running)}")
        for name in running:
            found["pairs"][name] = {"costs": [], "answers": []}
        rounds = [(n, r) for r in range(repeats + 1) for n in lengths]  # the first round warms up
        for n, r in rounds:
            ids = prompts([n], 1000 * r + n, vocab)[0]
            for name, pair in list(running.items()):
                if time.monotonic() > deadline - 10:
                    found["failed"].setdefault("time", f"stopped before round {r}, {n} tokens")
                    break
                try:
                    row, cost = pair.ask(ids, 16 if r == 0 else 1, timeout=max(5.0, deadline - time.monotonic()))
                except (urllib.error.URLError, OSError, KeyError, TimeoutError) as error:
                    log = tail(pair.prefill.log) + "\n" + tail(pair.decode.log)
                    found["failed"][name] = f"{n} tokens, round {r}: {error!r}\n{log}"
                    running.pop(name).stop()
                    continue
                if r == 0:
                    found["pairs"][name]["answers"].append(row)
                else:
                    found["pairs"][name]["costs"].append(cost)
        for name, pair in running.items():
            found["pairs"][name]["pack_buffer_bytes"] = pair.pack_bytes()
    finally:
        for pair in running.values():
            pair.stop()
    return found


def pd_rows(found: dict[str, Any], against: str) -> list[dict[str, Any]]:
    """Medians per pair and length, with the ratio of total times to the pair ``against``."""
    rows = []
    for name, data in found["pairs"].items():
        for n in sorted({c["prompt"] for c in data["costs"]}):
            costs = [c for c in data["costs"] if c["prompt"] == n]
            median = {k: statistics.median(c[k] for c in costs) for k in costs[0] if k not in ("prompt", "pack_fits")}
            other = [c["total_s"] for c in found["pairs"].get(against, {"costs": []})["costs"] if c["prompt"] == n]
            rows.append(
                {"pair": name, "prompt": n, **median, "pack_buffer_bytes": data.get("pack_buffer_bytes"),
                 "total_over": median["total_s"] / statistics.median(other) if other else None, "samples": len(costs)}
            )  # fmt: skip
    return rows


# -- prerequisites -----------------------------------------------------------------------------------------------------


class Check(NamedTuple):
    what: str
    found: str
    ok: bool


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _importable(module: str) -> tuple[str, bool]:
    # In a process of its own: a library built for another system may end it.
    done = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True)
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return ("yes" if done.returncode == 0 else f"no: {last[:120]}"), done.returncode == 0


def prerequisites(gpus: int, flashinfer: bool, mooncake: bool, free_gb: float = 20.0) -> list[Check]:
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(i) for i in range(devices)})
    plugins = {e.name for e in entry_points(group="sglang.srt.plugins")}
    sglang, free = _version("sglang"), shutil.disk_usage(tempfile.gettempdir()).free / 1e9
    checks = [
        Check(f"{gpus} CUDA devices", f"{devices} {', '.join(names)}", devices >= gpus),
        Check(f"sglang {SGLANG_VERSION}", sglang, sglang == SGLANG_VERSION),
        Check("plugin dcp_block registered", str(sorted(plugins)), "dcp_block" in plugins),
        Check(f"{free_gb:.0f} GB free in {tempfile.gettempdir()}", f"{free:.0f} GB", free >= free_gb),
    ]
    if gpus == 1:
        checks.append(Check(f"plugin {one_gpu_testbed.NAME} registered", "", one_gpu_testbed.NAME in plugins))
    if flashinfer:
        checks.append(Check("flashinfer", *_importable("flashinfer")))
    if mooncake:
        checks.append(Check("mooncake.engine", *_importable("mooncake.engine")))
    return checks


def environment() -> dict[str, Any]:
    """Which machine, how many GPUs, which versions: written with every result."""
    import platform

    import torch

    cuda = torch.cuda.is_available()
    packages = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python", "transformers")
    return {
        "gpu": torch.cuda.get_device_name(0) if cuda else "none",
        "gpus": torch.cuda.device_count() if cuda else 0,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        **{p: _version(p) for p in packages},
    }


if __name__ == "__main__":
    worker(*sys.argv[1:])
