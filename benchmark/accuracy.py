"""Accuracy of KV layouts on the tiny model: one engine per layout, the same questions, one table.

    python benchmark/accuracy.py                                             # CPU test bed: 1, 2x1, 2x16, 2x64
    python benchmark/accuracy.py reference 1 2x64 4x64 pd2x64 --questions 128 --json out.json
    python benchmark/accuracy.py 1 2x64 --device cuda --dtype bfloat16       # the same on GPUs
    python benchmark/accuracy.py 1 2x64 --device cuda --one-gpu --at-once 2  # all ranks share a GPU

A layout is `P` (DCP size P, without this plugin), `PxB` (block B), `pdPxB` (a prefill engine without DCP sends its KV
to a decode engine PxB; CPU only) or `reference` (transformers in float32, no engine). `PxB!FAULT` breaks the layout on
purpose (sglang_dcp_block.testing.sabotage). The others are compared with the first.

Word problems have 5 to 8 worked examples before them; needles are codes planted at eleven depths. An engine reads each
context first and then all questions about it, so every answer is read from rows that are in the pool.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_run  # noqa: E402
from tiny_math import problems  # noqa: E402  (the generator lives beside the trainer, outside the package)
from tiny_math.pad import write_padded  # noqa: E402
from tiny_math.tokenizer import BOS, EOS, Tokenizer  # noqa: E402

from sglang_dcp_block.testing import engine as bed  # noqa: E402
from sglang_dcp_block.testing import one_gpu_testbed, sabotage  # noqa: E402
from sglang_dcp_block.testing.accuracy_stats import paired, score  # noqa: E402
from sglang_dcp_block.testing.cpu_testbed import SABOTAGE_VARIABLE  # noqa: E402

if TYPE_CHECKING:
    from sglang_dcp_block.testing.warm import WarmServer

MODEL = ROOT / "models" / "tiny_math"
WORKED_ANSWER_TOKENS = 48  # the longest worked answer has 37
DEPTHS = [i / 10 for i in range(11)]
_LAYOUT = re.compile(r"(?P<pd>pd)?(?P<dcp>\d+)(x(?P<block>\d+))?(!(?P<fault>.+))?")


class Layout(NamedTuple):
    """text: as it was asked for. dcp None: the transformers reference. block None: stock, without the plugin."""

    text: str
    dcp: int | None = None
    block: int | None = None
    pd: bool = False
    fault: str | None = None


class Quiz(NamedTuple):
    """Prompts, each beginning with one of the contexts, and what each should answer, as `read` finds it in the
    generated text.
    """

    name: str
    contexts: list[list[int]]
    prompts: list[list[int]]
    expected: list[str]
    new_tokens: int
    read: Callable[[str], str | None]

    def only(self, *numbers: int) -> Quiz:
        """Of all questions these."""
        prompts = [self.prompts[n] for n in numbers]
        contexts = [c for c in self.contexts if any(p[: len(c)] == c for p in prompts)]
        return self._replace(contexts=contexts, prompts=prompts, expected=[self.expected[n] for n in numbers])


def parse_layout(text: str) -> Layout:
    if text == "reference":
        return Layout(text)
    match = _LAYOUT.fullmatch(text)
    if match is None or (match["fault"] and match["fault"] not in sabotage.FAULTS):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a layout: write reference, P, PxB, pdPxB or PxB!FAULT with a fault of "
            f"{', '.join(sabotage.FAULTS)}"
        )
    block = int(match["block"]) if match["block"] else None
    return Layout(text, int(match["dcp"]), block, bool(match["pd"]), match["fault"])


def token_ids(texts: Iterable[str], tokenizer: Tokenizer) -> list[list[int]]:
    return [[BOS, *tokenizer.encode(text)] for text in texts]


def contexts_of(prompts: Sequence[problems.Prompt]) -> list[str]:
    return list(dict.fromkeys(prompt.context for prompt in prompts))


def word_problems(questions: int, tokenizer: Tokenizer) -> Quiz:
    prompts = problems.evaluation_set(-(-questions // 8), 8, seed=1)[:questions]
    return Quiz(
        "word problems",
        token_ids(contexts_of(prompts), tokenizer),
        token_ids([prompt.text for prompt in prompts], tokenizer),
        [prompt.answer for prompt in prompts],
        WORKED_ANSWER_TOKENS,
        problems.final_answer,
    )


def needles(length: int, contexts: int, tokenizer: Tokenizer) -> Quiz:
    """The answer's first words, up to the code, are part of the prompt: what is left are three lookups."""
    prompts = problems.needle_set(length, DEPTHS, contexts, seed=1)
    asked = [prompt.text + prompt.solution.partition(prompt.answer)[0] for prompt in prompts]
    return Quiz(
        f"needles in {length}",
        token_ids(contexts_of(prompts), tokenizer),
        token_ids(asked, tokenizer),
        [prompt.answer for prompt in prompts],
        3,
        str,
    )


def rounds_of(quizzes: Sequence[Quiz]) -> list[bed.Round]:
    """Two rounds per quiz: the contexts, whose KV rows the radix cache keeps, then the questions."""
    rounds = []
    for quiz in quizzes:
        rounds.append(bed.Round(quiz.contexts, 1, f"{quiz.name}: contexts"))
        rounds.append(bed.Round(quiz.prompts, quiz.new_tokens, quiz.name, stop=True))
    return rounds


def engine_spec(
    layout: Layout,
    quizzes: Sequence[Quiz],
    backend: str,
    *,
    page: int = 64,
    batch: int = 16,
    model: Path = MODEL,
) -> bed.EngineSpec:
    """An engine of the CPU test bed whose pool holds all contexts and `batch` running requests."""
    longest = max(len(prompt) + quiz.new_tokens for quiz in quizzes for prompt in quiz.prompts)
    beyond = max(len(p) - len(c) for q in quizzes for p in q.prompts for c in q.contexts if p[: len(c)] == c)
    # Each context and each request may leave a virtual page (a page of every rank) half used.
    kept = sum(len(context) for quiz in quizzes for context in quiz.contexts)
    widest = page * layout.dcp
    requests = batch + sum(len(quiz.contexts) for quiz in quizzes)
    rows = kept + requests * (beyond + max(quiz.new_tokens for quiz in quizzes) + 2 * widest)
    return bed.EngineSpec(
        tp=layout.dcp,
        dcp=layout.dcp,
        block=layout.block,
        backend=backend,
        page=page,
        chunked=2048,
        max_running=batch,
        max_total_tokens=rows + -rows % widest,
        context=longest + widest,
        extra={"model_path": str(model)},
        env={SABOTAGE_VARIABLE: layout.fault} if layout.fault else {},
    )


def ask_cpu(
    layout: Layout,
    quizzes: Sequence[Quiz],
    spec: bed.EngineSpec,
    folder: Path,
    timeout_s: float,
    warm: WarmServer | None = None,
) -> list[list[list[int]]]:
    """Token ids of every answer, by quiz, from the CPU test bed."""
    rounds = rounds_of(quizzes)
    if layout.pd:
        from sglang_dcp_block.testing.pd import PdCase, run_pd

        prefill = replace(spec, tp=1, dcp=1, block=1)
        # All prompts are sent at once, and the last one waits for the prefill of all.
        patient = dict.fromkeys(
            ("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", "SGLANG_DISAGGREGATION_WAITING_TIMEOUT"), str(int(timeout_s))
        )
        case = PdCase(prefill, spec, rounds[1::2], patient, audit=False)
        result = run_pd(case, folder, timeout_s=timeout_s, warm=warm)
        answers = result.answers
        for failed in (answer for one in answers for answer in one if isinstance(answer, str)):
            raise RuntimeError(f"layout {layout.text}: a request failed: {failed}")
    else:
        answers = bed.run(bed.Case(spec, rounds), folder, audit=False, timeout_s=timeout_s, warm=warm).answers[1::2]
    return [[answer.tokens for answer in one] for one in answers]


def ask_gpu(layout: Layout, quizzes: Sequence[Quiz], arguments, folder: Path) -> list[list[list[int]]]:
    """Token ids of every answer, by quiz, from GPUs; the model's heads are padded to sizes that GPU kernels know.
    RuntimeError with the log's tail when the engine fails.
    """
    spec = engine_spec(layout, quizzes, arguments.backend, page=arguments.page, batch=arguments.batch)
    write_padded(arguments.model, folder / "model")
    keywords: dict[str, Any] = {
        "model_path": str(folder / "model"),
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "attention_backend": arguments.backend,
        "sampling_backend": "pytorch",
        "tp_size": layout.dcp,
        "page_size": arguments.page,
        "context_length": spec.context,
        "max_total_tokens": spec.max_total_tokens,
        "max_running_requests": arguments.batch,
        "chunked_prefill_size": spec.chunked,
        "mem_fraction_static": 0.8,
        "random_seed": 1,
        "log_level": "info",
        # FlashInfer's may use NVLink multicast, which a shared host forbids.
        "disable_custom_all_reduce": True,
        "enforce_disable_flashinfer_allreduce_fusion": True,
        "disable_prefill_cuda_graph": True,
    }
    if layout.dcp > 1:
        keywords["dcp_size"] = layout.dcp
    if layout.block is not None:
        keywords["dcp_block_size"] = layout.block
    environment = os.environ | spec.env | {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}  # engines start side by side
    if arguments.one_gpu:
        keywords |= one_gpu_testbed.ENGINE_ARGUMENTS
        environment |= one_gpu_testbed.ENVIRONMENT
    else:
        keywords["cuda_graph_max_bs_decode"] = arguments.batch
    task, answer, log = folder / "task.json", folder / "answer.json", folder / "log.txt"
    task.write_text(json.dumps({"engine": keywords, "rounds": [asdict(r) for r in rounds_of(quizzes)]}))
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(task), str(answer)],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(timeout=arguments.timeout)
        except subprocess.TimeoutExpired:
            print(f"layout {layout.text}: no answer within {arguments.timeout} s", file=sys.stderr)
        finally:
            bed.kill_session(process)
    if not answer.exists():
        raise RuntimeError(f"the engine of layout {layout.text} failed; its log ends with:\n{bed.log_tail(log)}")
    return json.loads(answer.read_text())[1::2]


def serve(task_file: str, answer_file: str) -> None:
    """Child process of `ask_gpu`: one engine answers all rounds greedily; writes the token ids of each."""
    task = json.loads(Path(task_file).read_text())
    import sglang

    engine = sglang.Engine(**task["engine"])
    try:
        answers = []
        for one in (bed.Round(**r) for r in task["rounds"]):
            started = time.monotonic()
            replies = engine.generate(input_ids=one.prompts, sampling_params=one.sampling)
            answers.append([reply["output_ids"] for reply in replies])
            print(f"{one.name}: {time.monotonic() - started:.1f} s", flush=True)
    finally:
        engine.shutdown()
    Path(answer_file).write_text(json.dumps(answers))


def ask_reference(quizzes: Sequence[Quiz], model_path: Path) -> list[list[list[int]]]:
    """Token ids of every answer, by quiz, from transformers in float32 on the CPU: greedy, one question at a time."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(1)  # the model is so small that threads mostly wait for each other
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

    @torch.inference_mode()
    def step(ids: list[int], cache: DynamicCache) -> int:
        out = model(torch.tensor([ids]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    answers = []
    for quiz in quizzes:
        told: dict[tuple[int, ...], DynamicCache] = {}
        for context in quiz.contexts:
            step(context, told.setdefault(tuple(context), DynamicCache()))
        answers.append([])
        for prompt in quiz.prompts:
            context = next(c for c in told if tuple(prompt[: len(c)]) == c)
            cache, tokens, ids = copy.deepcopy(told[context]), [], prompt[len(context) :]
            while len(tokens) < quiz.new_tokens and EOS not in tokens:
                ids = [step(ids, cache)]
                tokens += ids
            answers[-1].append(tokens)
    return answers


def read_answers(
    tokens: Sequence[Sequence[list[int]]], quizzes: Sequence[Quiz], tokenizer: Tokenizer
) -> list[list[str | None]]:
    return [[quiz.read(tokenizer.decode(answer)) for answer in one] for quiz, one in zip(quizzes, tokens, strict=True)]


def ask(layout: Layout, quizzes: Sequence[Quiz], arguments) -> list[list[list[int]]]:
    if layout.dcp is None:
        return ask_reference(quizzes, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.device == "cuda":
            return ask_gpu(layout, quizzes, arguments, Path(folder))
        spec = engine_spec(
            layout, quizzes, arguments.backend, page=arguments.page, batch=arguments.batch, model=arguments.model
        )
        return ask_cpu(layout, quizzes, spec, Path(folder), arguments.timeout)


def compare(names: list[str], answers: list[list[list[str | None]]], quizzes: Sequence[Quiz]) -> list[dict[str, Any]]:
    """One row per layout and quiz: its score, and how it differs from the first layout's answers."""
    rows = []
    for name, one in zip(names, answers, strict=True):
        for index, quiz in enumerate(quizzes):
            expected = quiz.expected
            result = score(sum(a == e for a, e in zip(one[index], expected, strict=True)), len(expected))
            pair = paired(answers[0][index], one[index], expected)
            rows.append(
                {
                    "layout": name,
                    "quiz": quiz.name,
                    "right": result.right,
                    "asked": result.asked,
                    "accuracy": result.accuracy,
                    "interval": list(result.interval),
                    "agreement": pair.agreement,
                    "lost": pair.only_first,
                    "gained": pair.only_second,
                    "difference_interval": list(pair.interval),
                    "mcnemar_p": pair.p_value,
                }
            )
    return rows


def table(rows: list[dict[str, Any]], baseline: str) -> str:
    """The rows as a Markdown table."""
    lines = [
        f"| layout | questions | right | accuracy (95%) | same answer as {baseline} | lost/gained | difference (95%) "
        "| McNemar p |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        low, high = row["interval"]
        less, more = row["difference_interval"]
        cells = (
            row["layout"],
            row["quiz"],
            f"{row['right']}/{row['asked']}",
            f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]",
            f"{row['agreement']:.3f}",
            f"{row['lost']}/{row['gained']}",
            f"[{less:+.3f}, {more:+.3f}]",
            f"{row['mcnemar_p']:.3f}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse_arguments(command_line: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", type=parse_layout, help="the first is the baseline")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[2048])
    parser.add_argument("--needles", type=int, default=2, help="needle contexts of each length, eleven needles each")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--one-gpu", action="store_true", help="all ranks share one GPU, collectives through the host")
    parser.add_argument("--backend", choices=("triton", "flashinfer"), default="flashinfer")
    parser.add_argument("--dtype", default="float32", help="of a CUDA engine; the CPU test bed computes in float32")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--at-once", type=int, default=1, help="layouts whose engines run side by side")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one layout's engine")
    parser.add_argument("--json", type=Path, help="write the rows and every answer here, after each layout")
    arguments = parser.parse_args(command_line)
    arguments.layouts = arguments.layouts or [parse_layout(text) for text in ("1", "2x1", "2x16", "2x64")]
    if not (arguments.model / "model.safetensors").exists():
        parser.error(
            f"no model in {arguments.model}: train one with scripts/tiny_math/train.py --out {arguments.model}"
        )
    if arguments.device == "cuda" and any(layout.pd for layout in arguments.layouts):
        parser.error("P->D runs on the CPU test bed only: leave --device cuda out, or name P or PxB")
    return arguments


def main(command_line: list[str]) -> None:
    if command_line[:1] == ["--serve"]:
        return serve(*command_line[1:])
    arguments = parse_arguments(command_line)
    tokenizer = Tokenizer.load(arguments.model)
    quizzes = [word_problems(arguments.questions, tokenizer)] if arguments.questions else []
    quizzes += [needles(length, arguments.needles, tokenizer) for length in arguments.needle_lengths]
    answers: dict[str, list[list[str | None]]] = {}
    failed = 0
    with ThreadPoolExecutor(arguments.at_once) as pool:
        running = {pool.submit(timed_answers, one, quizzes, arguments, tokenizer): one for one in arguments.layouts}
        for done in as_completed(running):
            layout = running[done]
            try:
                seconds, answers[layout.text] = done.result()
            except RuntimeError as error:
                failed += 1
                print(f"layout {layout.text}: {error}", file=sys.stderr, flush=True)
                continue
            print(f"layout {layout.text}: {seconds:.0f} s", flush=True)
            names = [one.text for one in arguments.layouts if one.text in answers]
            rows = compare(names, [answers[name] for name in names], quizzes)
            if arguments.json:
                write_record(arguments, quizzes, rows, answers)
    if arguments.layouts[0].text in answers:
        print(table(rows, names[0]))
    sys.exit(bool(failed))


def timed_answers(
    layout: Layout, quizzes: Sequence[Quiz], arguments, tokenizer: Tokenizer
) -> tuple[float, list[list[str | None]]]:
    """Seconds, and every answer, by quiz."""
    started = time.monotonic()
    answers = read_answers(ask(layout, quizzes, arguments), quizzes, tokenizer)
    return time.monotonic() - started, answers


def write_record(arguments, quizzes: Sequence[Quiz], rows: list[dict[str, Any]], answers: dict[str, list]) -> None:
    record = {
        "environment": gpu_run.environment(),
        "device": arguments.device,
        "dtype": arguments.dtype,
        "one_gpu": arguments.one_gpu,
        "backend": arguments.backend,
        "page": arguments.page,
        "rows": rows,
        "expected": {quiz.name: quiz.expected for quiz in quizzes},
        "answers": {
            name: {quiz.name: a for quiz, a in zip(quizzes, one, strict=True)} for name, one in answers.items()
        },
    }
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
