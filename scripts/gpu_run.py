"""Engines and PD servers on GPUs: started, asked and measured.

Every engine runs in a process of its own (``python scripts/gpu_run.py JOB.json RESULT.json``), works through a list of
steps and writes what it answered. Answers and times are judged in gpu_judge.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, NamedTuple

from gpu_judge import Answer

from sglang_dcp_block.testing import one_gpu_testbed
from sglang_dcp_block.testing.cpu_testbed import AUDIT_VARIABLE
from sglang_dcp_block.testing.cpu_testbed import NAME as CPU_BED
from sglang_dcp_block.testing.engine import free_port, kill_session, log_tail, write_whole
from sglang_dcp_block.testing.preload import random_prompts
from sglang_dcp_block.testing.tiny_model import TinyGqa, TinyMla, TinyModel, config, write

SGLANG_VERSION = "0.5.23"
TAIL_LINES = 12  #: of a failed engine's log
#: DeepSeek-V2-Lite's attention: 16 heads over kv_lora 512 and rope 64, in few dense layers.
V2_LITE = TinyMla(
    heads=16, layers=4, hidden=1024, intermediate=2048, vocab=32000, kv_lora_rank=512, rope_dim=64, nope_dim=128,
    value_dim=128, max_position=163840,
)  # fmt: skip
#: All of DeepSeek-V2-Lite's layers, each with a dense MLP as large as its first one. Never written: dummy weights.
V2_LITE_DEEP = replace(V2_LITE, layers=27, hidden=2048, intermediate=10944, vocab=102400)
#: Llama's attention with one KV head, which all ranks of a DCP group hold.
ONE_KV_HEAD = TinyGqa(
    heads=16, kv_heads=1, layers=4, hidden=1024, intermediate=2048, vocab=32000, head_dim=128, max_position=163840,
)  # fmt: skip
#: DeepSeek-V3's attention: 128 heads.
V3 = replace(V2_LITE, heads=128, hidden=2048, intermediate=4096)
PD_ENVIRONMENT = {"MC_FORCE_TCP": "1", "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1"}
#: A decode server that takes KV for granted, for timing: see testing/preload.py.
TIMED = {
    "load_format": "dummy",
    "disaggregation_mode": "decode",
    "disaggregation_transfer_backend": "mooncake",
    "disaggregation_decode_enable_radix_cache": True,
}


# -- what is started ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """One engine. block None: stock, this plugin not even loaded. bed: "", "one_gpu" or "cpu" (a rehearsal).

    max_tokens: KV rows of one rank, None for as many as fit. chunked: chunked prefill size in tokens. extra, env:
    further ``sgl.Engine`` arguments and environment variables.
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
    env: dict[str, str] = field(default_factory=dict)

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
            "sleep_on_idle": True,  # engines that wait for their turn leave the cores alone
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
        if self.bed == "one_gpu" and self.tp > 1:
            found |= one_gpu_testbed.ENGINE_ARGUMENTS
        if self.bed == "cpu":
            found |= {"device": "cpu", "dtype": "float32", "disable_overlap_schedule": True, "mem_fraction_static": 0.2}
        return found | self.extra

    def environment(self, audit: Path | None = None, trace: Path | None = None) -> dict[str, str]:
        found = os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        found["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "0"  # several engines start on the same GPUs
        if "disaggregation_mode" in self.extra:
            found |= PD_ENVIRONMENT | {one_gpu_testbed.PRELOAD_VARIABLE: "1"}
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
        return found | self.env


def rehearsed(engine: Engine) -> Engine:
    """The same engine on the CPU test bed: few ranks, short contexts."""
    ranks = min(engine.tp, 2)
    return replace(
        engine, bed="cpu", tp=ranks, dcp=min(engine.dcp, ranks), graphs=False, context=2048, max_tokens=4096,
        chunked=128, base_gpu=0, comm="ag_rs" if engine.comm == "a2a" else engine.comm,
    )  # fmt: skip


def model_folder(sizes: TinyModel, root: Path, weights: bool = True) -> Path:
    """A random checkpoint with these sizes, or its config alone, written once."""
    folder = root / f"model-{sizes.heads}-{sizes.hidden}-{sizes.layers}{'' if weights else '-dummy'}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        if weights:
            write(folder, sizes)
        described = config(sizes)
        # The CPU bed needs a scaled rope; plain rope is what GPUs have a kernel for.
        if isinstance(sizes, TinyMla) and sizes.kv_lora_rank == 512:
            described["rope_scaling"] = None
        (folder / "config.json").write_text(json.dumps(described))
        (folder / "done").touch()
    return folder


# -- steps -------------------------------------------------------------------------------------------------------------


def batch_step(name: str, prompts: list[list[int]], new_tokens: int, size: int, flush: bool = True) -> dict[str, Any]:
    """Ask ``prompts``, ``size`` at a time. flush: with an empty cache."""
    return {"kind": "batch", "name": name, "prompts": prompts, "new_tokens": new_tokens, "size": size, "flush": flush}


def answer_steps(lengths: Sequence[int], new_tokens: int, vocab: int, reference: bool) -> list[dict[str, Any]]:
    """Fresh prompts in one batch, the same with a cached prefix, and the first ones one at a time.

    The second round's additions don't come from the first one's answers: engines may part there. reference: also the
    fresh prompts in batches of four, and with one block of 64 tokens replaced, as if one block of KV were another's.
    """
    count = len(lengths)
    fresh = random_prompts(lengths, 0, vocab)
    tails = random_prompts([3 + i for i in range(count)], 1, vocab)
    again = [p + t for p, t in zip(fresh, tails, strict=True)]
    steps = [
        batch_step("fresh", fresh, new_tokens, count),
        batch_step("again", again, new_tokens, count, flush=False),
        batch_step("alone", fresh[:3], new_tokens, 1),
    ]
    if reference:
        others = random_prompts([64] * count, 2, vocab)
        changed = [_with_other_block(p, b) for p, b in zip(fresh, others, strict=True)]
        steps += [batch_step("fours", fresh, new_tokens, 4), batch_step("changed", changed, new_tokens, count)]
    return steps


def wait_step(file: Path) -> dict[str, Any]:
    """Do nothing until ``file`` exists."""
    return {"kind": "wait", "file": str(file)}


def _with_other_block(prompt: list[int], block: list[int]) -> list[int]:
    """The block of ``prompt`` around its middle, replaced."""
    start = len(prompt) // 2 // len(block) * len(block)
    end = min(start + len(block), len(prompt))
    return prompt[:start] + block[: end - start] + prompt[end:]


def soak_bank(longest: int, vocab: int) -> list[list[int]]:
    """Prompts whose answers a reference knows: block boundaries, lengths up to ``longest``, three families that share
    a prefix."""
    rng = random.Random(9)
    lengths = [1, 63, 64, 65, 127, 128, 129] + [int(2 ** rng.uniform(1, longest.bit_length() - 1)) for _ in range(17)]
    bank = random_prompts(lengths, 77, vocab)
    for number, shared in enumerate(random_prompts([64 * 7 + 5, longest // 10, longest // 2], 5, vocab)):
        bank += [shared + tail for tail in random_prompts([1, 7, 59, 64, 150, 333], 50 + number, vocab)]
    return bank


# -- the worker process ------------------------------------------------------------------------------------------------


def _generate(engine: Any, batch: list[list[int]], new_tokens: int) -> list[Answer]:
    replies = engine.generate(
        input_ids=batch,
        sampling_params={"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True},
        return_logprob=True,
        top_logprobs_num=2,
    )
    return [
        _logprobs(reply)
        | {
            "prompt": len(prompt),
            "cached": reply["meta_info"].get("cached_tokens"),
            "gaps": [best[0][0] - best[1][0] for best in reply["meta_info"]["output_top_logprobs"]],
        }
        for prompt, reply in zip(batch, replies, strict=True)
    ]


def _logprobs(reply: dict[str, Any]) -> Answer:
    """An aborted request may end with an id whose logprob never came."""
    logprobs = [entry[0] for entry in reply["meta_info"].get("output_token_logprobs") or []]
    return {"ids": list(reply["output_ids"])[: len(logprobs)], "logprobs": logprobs[: len(reply["output_ids"])]}


def _answers(engine: Any, step: dict[str, Any]) -> list[Answer]:
    if step["flush"]:
        engine.flush_cache()
    prompts, size = step["prompts"], step["size"]
    batches = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    return [row for batch in batches for row in _generate(engine, batch, step["new_tokens"])]


def _wait(_: Any, step: dict[str, Any]) -> None:
    while not Path(step["file"]).exists():
        time.sleep(0.2)


def _preload(engine: Any, step: dict[str, Any]) -> None:
    engine.collective_rpc("dcp_block_preload", lengths=step["lengths"], seed=step["seed"], vocab=step["vocab"])


_prefixes = functools.lru_cache(maxsize=1)(random_prompts)


def _speed(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """One batch over preloaded prefixes, decoded to the end: times between arrivals of every ``chunk`` tokens.

    The engine is a PD decode server whose requests come with SGLang's address for KV that needs no transfer.
    """
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    batch, chunk = step["batch"], step["chunk"]
    prefixes = _prefixes(tuple(step["lengths"]), step["seed"], step["vocab"])
    tails = random_prompts([chunk] * batch, 1_000_000 + step["round"], step["vocab"])
    prompts = [prefixes[i % len(prefixes)] + tails[i] for i in range(batch)]
    arrivals: list[list[float]] = [[] for _ in range(batch)]
    cached = [0] * batch

    async def run() -> None:
        stream = await engine.async_generate(
            input_ids=prompts,
            sampling_params={
                "temperature": 0, "max_new_tokens": step["tokens"], "ignore_eos": True, "stream_interval": chunk,
            },
            stream=True,
            bootstrap_host=[FAKE_BOOTSTRAP_HOST] * batch,
            bootstrap_port=[0] * batch,
            bootstrap_room=list(range(batch)),
        )  # fmt: skip
        async for reply in stream:
            now, number = time.perf_counter(), reply.get("index", 0)
            arrivals[number].append(now)
            cached[number] = reply["meta_info"].get("cached_tokens") or 0

    engine.loop.run_until_complete(run())
    # Only while every request decodes: from the last one's start to the first one's end.
    full = (max(a[0] for a in arrivals), min(a[-1] for a in arrivals))
    ticks = [t for t in arrivals[0][1:] if full[0] <= t <= full[1]]
    return {
        "batch": batch, "context": step["context"], "round": step["round"], "cached": min(cached),
        "samples_ms": [(b - a) / chunk * 1e3 for a, b in itertools.pairwise(ticks)],
    }  # fmt: skip


def _soak(engine: Any, step: dict[str, Any]) -> dict[str, Any]:
    """Mixed lengths, shared prefixes and aborts from many clients. Answers to prompts of the bank are kept."""
    vocab, longest, bank, rng = step["vocab"], step["longest"], step["bank"], random.Random(9)
    counts = {"finished": 0, "aborted": 0, "wrong_length": 0, "stuck": 0, "tokens": 0}
    checked: list[dict[str, Any]] = []
    began, rolling = time.monotonic(), Path(step["rolling"])
    deadline = min(began + step["seconds"], step["until"])
    engine.flush_cache()

    def prompt() -> tuple[int | None, list[int]]:
        draw = rng.random()
        if draw < 0.6:
            number = rng.randrange(len(bank))
            return number, bank[number]
        length = int(2 ** rng.uniform(0, longest.bit_length() - 1))
        fresh = random_prompts([length], rng.randrange(1 << 30), vocab)[0]
        return None, (rng.choice(bank) + fresh[:500] if draw < 0.8 else fresh)

    async def one(request: int) -> None:
        number, ids = prompt()
        wanted, abort_after = rng.randrange(1, step["new_tokens"] + 1), None
        if rng.random() < 0.15:
            abort_after = rng.randrange(1, 40)
        # SGLang aborts every request whose id begins with the one given.
        rid, aborted, last = f"soak-{request:07d}", False, None
        stream = await engine.async_generate(
            input_ids=ids,
            sampling_params={"temperature": 0, "max_new_tokens": wanted, "ignore_eos": True},
            rid=rid,
            stream=True,
            return_logprob=number is not None,
        )
        async for last in stream:
            if abort_after is not None and not aborted and last["meta_info"]["completion_tokens"] >= abort_after:
                engine.tokenizer_manager.abort_request(rid=rid)
                aborted = True
        got = last["meta_info"]["completion_tokens"] if last else 0
        counts["aborted" if aborted else "finished"] += 1
        counts["tokens"] += got
        counts["wrong_length"] += not aborted and got != wanted
        if number is not None and last is not None:
            row = _logprobs(last)
            row["logprobs"] = [round(x, 5) for x in row["logprobs"]]
            cached = last["meta_info"].get("cached_tokens")
            checked.append(row | {"number": number, "cached": cached, "aborted": aborted})

    async def client(first: int) -> None:
        request = first
        while time.monotonic() < deadline:
            try:
                await asyncio.wait_for(one(request), timeout=step["stuck_after_s"])
            except TimeoutError:
                counts["stuck"] += 1
            request += step["clients"]

    def found() -> dict[str, Any]:
        return {"counts": counts | {"seconds": round(time.monotonic() - began, 1)}, "checked": checked}

    async def keep() -> None:
        while time.monotonic() < deadline:
            await asyncio.sleep(5)
            write_whole(rolling, found())

    async def everyone() -> None:
        await asyncio.gather(keep(), *(client(i) for i in range(step["clients"])))

    engine.loop.run_until_complete(everyone())
    return found()


def worker(job_file: str, result_file: str) -> None:
    """The job's steps, then those that come as lines of standard input until it ends."""
    job = json.loads(Path(job_file).read_text())
    engine_spec = Engine(**job["engine"])
    began = time.monotonic()
    import sglang

    engine = sglang.Engine(**engine_spec.arguments(Path(job["model"])))
    result: dict[str, Any] = {"up_s": time.monotonic() - began, "steps": []}
    print(f"UP in {result['up_s']:.0f} s", flush=True)
    kinds = {"batch": _answers, "preload": _preload, "speed": _speed, "soak": _soak, "wait": _wait}
    try:
        info = engine.get_server_info()
        names = ("max_total_num_tokens", "dcp_size", "dcp_block_size", "dcp_comm_backend", "attention_backend")
        result["server"] = {name: info.get(name) for name in names}
        scheduler = engine._scheduler_init_result.scheduler_infos[0]
        result["server"] |= {k: scheduler.get(k) for k in ("max_total_num_tokens", "dcp_layout")}
        write_whole(Path(result_file), result)
        for number, step in enumerate(itertools.chain(job["steps"], map(json.loads, sys.stdin))):
            step_began = time.monotonic()
            outcome = kinds[step["kind"]](engine, step)
            took = time.monotonic() - step_began
            result["steps"].append({"kind": step["kind"], "name": step.get("name"), "took_s": took, "outcome": outcome})
            print(f"STEP {number} {step['kind']} {step.get('name', '')} {took:.1f} s", flush=True)
            # After every step: a later one that hangs doesn't cost the earlier ones' results.
            write_whole(Path(result_file), result)
        if os.environ.get(AUDIT_VARIABLE):
            engine.collective_rpc("dcp_block_audit", name="end")
        result["complete"] = True
        write_whole(Path(result_file), result)
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
    result: dict[str, Any] = field(default_factory=dict)
    audit: Path | None = None
    failure: str = "not run yet"
    seconds: float = 0.0

    def step(self, name: str) -> list[Answer] | None:
        return next((s["outcome"] for s in self.result.get("steps", []) if s["name"] == name), None)


class WorkerFailed(RuntimeError):
    """The worker ended or did not answer in time; the message ends with its log's last lines."""


class Worker:
    """An engine in a process of its own, driven step by step."""

    def __init__(self, job: Job, model: Path, work: Path) -> None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        self.job, self.work = job, work
        self.audit = work / "audit" if job.audit else None
        self.began = time.monotonic()
        request = work / "job.json"
        request.write_text(json.dumps({"engine": asdict(job.engine), "model": str(model), "steps": job.steps}))
        with (work / "log.txt").open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(request), str(work / "result.json")],
                env=job.engine.environment(self.audit),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                text=True,
            )

    def result(self) -> dict[str, Any]:
        file = self.work / "result.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def wait_steps(self, count: int, deadline: float) -> dict[str, Any]:
        """The result once ``count`` steps are done; 0 waits for the engine to be up.

        Raises:
            WorkerFailed: the process ended, or ``deadline`` (monotonic) passed.
        """
        while True:
            result = self.result()
            if result and len(result["steps"]) >= count:
                return result
            if self.process.poll() is not None:
                raise WorkerFailed(f"ended with {self.process.poll()}; {self.log_tail()}")
            if time.monotonic() > deadline:
                raise WorkerFailed(f"no answer in time; {self.log_tail()}")
            time.sleep(0.05)

    def ask(self, step: dict[str, Any], deadline: float) -> Any:
        """The outcome of one more step. Raises :class:`WorkerFailed`."""
        done = len(self.result().get("steps", []))
        try:
            self.process.stdin.write(json.dumps(step) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(f"{error}; {self.log_tail()}") from error
        return self.wait_steps(done + 1, deadline)["steps"][done]["outcome"]

    def finish(self, deadline: float) -> Outcome:
        """No more steps: wait until the worker has ended, or end it."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            code: Any = self.process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            code = "stopped at the end of the time"
        self.stop()
        result = self.result()
        failure = "" if code == 0 and result.get("complete") else f"exit {code}; {self.log_tail()}"
        return Outcome(self.job, result, self.audit, failure, time.monotonic() - self.began)

    def stop(self) -> None:
        kill_session(self.process)

    def log_tail(self) -> str:
        return f"{self.work / 'log.txt'} ends with:\n{log_tail(self.work / 'log.txt', TAIL_LINES)}"


def run_jobs(
    jobs: list[Job],
    model: Path,
    work: Path,
    at_once: int,
    deadline: float,
    say: Callable[[str], None] = print,
    done: Callable[[list[Outcome]], None] = lambda _: None,
) -> list[Outcome]:
    """Run ``jobs`` in order, ``at_once`` at a time, until ``deadline`` (monotonic). done: called after each one."""
    outcomes = [Outcome(job) for job in jobs]
    gate, one_at_a_time = threading.Semaphore(at_once), threading.Lock()

    def run(number: int, job: Job) -> None:
        try:
            outcome = Worker(job, model, work / job.engine.name).finish(deadline)
        finally:
            gate.release()
        with one_at_a_time:
            outcomes[number] = outcome
            state = "failed" if outcome.failure else "ok"
            say(f"  {job.engine.name}: {state}, {outcome.seconds:.0f} s (up {outcome.result.get('up_s', 0):.0f})")
            done(outcomes)

    threads = []
    for number, job in enumerate(jobs):
        gate.acquire()
        if deadline - time.monotonic() < job.needs_s:
            gate.release()
            outcomes[number].failure = f"not run: needs about {job.needs_s:.0f} s, too little time left"
            say(f"  {job.engine.name}: {outcomes[number].failure}")
            continue
        threads.append(threading.Thread(target=run, args=(number, job)))
        threads[-1].start()
        time.sleep(1.0)  # ports are picked by trying
    for thread in threads:
        thread.join()
    return outcomes


# -- PD ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode server. against: the pair whose total times its own are divided by."""

    name: str
    prefill: Engine
    decode: Engine
    against: str = ""


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
        raise RuntimeError(f"server not ready; {self.log} ends with:\n{log_tail(self.log, TAIL_LINES)}")

    def pool(self) -> int:
        """Tokens that its KV pool holds, over all DCP ranks."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/server_info", timeout=20) as reply:
            return json.load(reply)["max_total_num_tokens"]

    def post(self, body: dict[str, Any], timeout: float) -> Any:
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


#: Free tokens that a pool must have beside the longest prompt: new tokens, and whole virtual pages of any block.
POOL_MARGIN = 1024


def pool_complaint(mode: str, pool: int, longest: int) -> str:
    """Why a prompt of ``longest`` tokens doesn't fit in a pool of ``pool`` tokens over all ranks, or ""."""
    if pool >= longest + POOL_MARGIN:
        return ""
    return (
        f"the {mode} server's pool holds {pool:,} tokens, and a prompt of {longest:,} needs {longest + POOL_MARGIN:,}: "
        "raise max_tokens or mem_fraction, or start it before other engines"
    )


class RunningPair:
    """A started pair. pools: tokens that each server's pool holds, by mode, known once it is ready."""

    _room = 1000

    def __init__(self, pair: Pair, model: Path, work: Path) -> None:
        self.bootstrap_port, self.pools = free_port(), dict[str, int]()
        folder = work / pair.name
        self.prefill = Server(pair.prefill, "prefill", model, folder, self.bootstrap_port)
        self.decode = Server(pair.decode, "decode", model, folder, self.bootstrap_port)

    def wait_ready(self, deadline: float) -> None:
        for server in (self.prefill, self.decode):
            server.wait_ready(deadline)
        self.pools = {"prefill": self.prefill.pool(), "decode": self.decode.pool()}

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

    def too_small(self, longest: int) -> str:
        """Why prompts of ``longest`` tokens don't fit in both pools, or ""."""
        return next(filter(None, (pool_complaint(mode, pool, longest) for mode, pool in self.pools.items())), "")

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
    say: Callable[[str], None] = print,
    ready: Callable[[], None] = lambda: None,
    save: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Every pair up at once, asked in turns with the same fresh prompts: transfer, gather, memory, answers.

    Each round begins with another pair. A pair whose pools are too small for some prompts isn't asked those.

    ready: called when they are up, returns when they may be asked. save: called with what is found, after each round.
    """
    shutil.rmtree(work, ignore_errors=True)
    found: dict[str, Any] = {"pairs": {}, "failed": {}}
    running: dict[str, RunningPair] = {}
    try:
        for pair in pairs:
            running[pair.name] = RunningPair(pair, model, work)
        for name, pair in list(running.items()):
            try:
                pair.wait_ready(deadline - 30)
            except (RuntimeError, OSError, KeyError, ValueError) as error:
                found["failed"][name] = str(error) if isinstance(error, RuntimeError) else f"not ready: {error!r}"
                running.pop(name).stop()
        say(f"  pairs up: {list(running)}")
        for name, pair in running.items():
            if reason := pair.too_small(max(lengths)):
                found["failed"][f"{name}, pool"] = reason
                say(f"  {name}: {reason}")
        ready()
        for name in running:
            found["pairs"][name] = {"costs": [], "answers": []}
        names, now = list(running), time.monotonic
        rounds = [(n, r) for r in range(repeats + 1) for n in lengths]  # the first round warms up
        for n, r in rounds:
            ids, turn = random_prompts([n], 1000 * r + n, vocab)[0], r % max(len(names), 1)
            for name in names[turn:] + names[:turn]:
                pair = running.get(name)
                if pair is None or pair.too_small(n):
                    continue
                if now() > deadline - 10:
                    found["failed"].setdefault("time", f"stopped before round {r}, {n} tokens")
                    break
                try:
                    row, cost = pair.ask(ids, 16 if r == 0 else 1, timeout=max(5.0, deadline - now()))
                except (urllib.error.URLError, OSError, KeyError, TimeoutError) as error:
                    logs = "\n".join(log_tail(server.log, TAIL_LINES) for server in (pair.prefill, pair.decode))
                    found["failed"][name] = f"{n} tokens, round {r}: {error!r}\n{logs}"
                    running.pop(name).stop()
                    continue
                if r == 0:
                    found["pairs"][name]["answers"].append(row)
                else:
                    found["pairs"][name]["costs"].append(cost)
                    found["pairs"][name]["pack_buffer_bytes"] = pair.pack_bytes()
            save(found)
    finally:
        for pair in running.values():
            pair.stop()
    return found


def pd_rows(found: dict[str, Any], against: dict[str, str]) -> list[dict[str, Any]]:
    """Medians per pair and length, with the ratio of total times. against: pair -> the one it is divided by."""
    rows = []
    for name, data in found["pairs"].items():
        for n in sorted({c["prompt"] for c in data["costs"]}):
            costs = [c for c in data["costs"] if c["prompt"] == n]
            median = {k: statistics.median(c[k] for c in costs) for k in costs[0] if k not in ("prompt", "pack_fits")}
            other = [
                c["total_s"] for c in found["pairs"].get(against[name], {"costs": []})["costs"] if c["prompt"] == n
            ]
            rows.append(
                {"pair": name, "against": against[name], "prompt": n, **median, "samples": len(costs),
                 "pack_buffer_bytes": data.get("pack_buffer_bytes"),
                 "total_over": median["total_s"] / statistics.median(other) if other else None}
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
