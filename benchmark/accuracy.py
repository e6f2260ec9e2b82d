"""Accuracy of KV layouts on the tiny word-problem model: one engine per layout, the same questions, one table.

    python benchmark/accuracy.py                                         # CPU test bed: 1, 2x1, 2x16, 2x64
    python benchmark/accuracy.py 1 2x64 4x64 --questions 200 --json out.json
    python benchmark/accuracy.py 1 2x64 --device cuda --dtype bfloat16   # the same on GPUs

A layout is `P` (DCP size P, without this plugin) or `PxB` (block B); the others are compared with the first.
Word problems have 5 to 8 worked examples before them; needles are codes planted at eleven depths.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

from tiny_math import problems  # noqa: E402  (the generator lives beside the trainer, outside the package)
from tiny_math.tokenizer import BOS, Tokenizer  # noqa: E402

from sglang_dcp_block.testing.accuracy_stats import paired, score  # noqa: E402

MODEL = ROOT / "models" / "tiny_math"
WORKED_ANSWER_TOKENS = 40  # the longest worked answer has 36
NEEDLE_TOKENS = 16  # the fact again, #### and three numbers
DEPTHS = [i / 10 for i in range(11)]


class Layout(NamedTuple):
    dcp: int
    block: int | None  # None: stock, the plugin isn't loaded

    def __str__(self) -> str:
        return f"{self.dcp}" if self.block is None else f"{self.dcp}x{self.block}"


class Round(NamedTuple):
    name: str
    prompts: list[list[int]]
    expected: list[str]
    new_tokens: int


def parse_layout(text: str) -> Layout:
    size, cross, block = text.partition("x")
    if not size.isdigit() or (cross and not block.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout: write P or PxB, such as 1 or 2x64")
    return Layout(int(size), int(block) if cross else None)


def make_rounds(tokenizer: Tokenizer, questions: int, needle_lengths: list[int], per_depth: int) -> list[Round]:
    """The questions every layout gets. Word problems come in groups of 8 that share their context, and so its cache."""

    def round_of(name, prompts, new_tokens):
        ids = [[BOS, *tokenizer.encode(prompt.text)] for prompt in prompts]
        return Round(name, ids, [prompt.answer for prompt in prompts], new_tokens)

    word_problems = problems.evaluation_set(-(-questions // 8), 8, seed=1)[:questions]
    rounds = [round_of("word problems", word_problems, WORKED_ANSWER_TOKENS)]
    for length in needle_lengths:
        needles = problems.needle_set(length, DEPTHS, per_depth, seed=1)
        rounds.append(round_of(f"needle {length}", needles, NEEDLE_TOKENS))
    return rounds


def engine_arguments(layout: Layout, arguments, longest: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Keyword arguments of `sgl.Engine` and the environment its process needs."""
    common = {"model_path": str(arguments.model), "context_length": longest, "max_running_requests": arguments.batch}
    if arguments.device == "cpu":
        from sglang_dcp_block.testing.engine import EngineSpec

        spec = EngineSpec(
            tp=layout.dcp,
            dcp=layout.dcp,
            block=layout.block,
            backend=arguments.backend,
            page=arguments.page,
            extra=common | {"max_total_tokens": arguments.batch * longest},
        )
        return spec.engine_arguments(), spec.environment()
    keywords = common | {
        "skip_tokenizer_init": True,
        "dtype": arguments.dtype,
        "attention_backend": arguments.backend,
        "tp_size": layout.dcp,
        "page_size": arguments.page,
        "random_seed": 1,
    }
    if layout.dcp > 1:
        keywords["dcp_size"] = layout.dcp
    if layout.block is not None:
        keywords["dcp_block_size"] = layout.block
    return keywords, dict(os.environ)


def serve(task_file: str, answer_file: str) -> None:
    """Child process: one engine answers all rounds greedily; writes the generated token ids of each."""
    task = json.loads(Path(task_file).read_text())
    import sglang

    engine = sglang.Engine(**task["engine"])
    try:
        answers = []
        for name, prompts, new_tokens in task["rounds"]:
            started = time.monotonic()
            sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "stop_token_ids": [task["stop_id"]]}
            replies = engine.generate(input_ids=prompts, sampling_params=sampling)
            answers.append([reply["output_ids"] for reply in replies])
            print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    finally:
        engine.shutdown()
    Path(answer_file).write_text(json.dumps(answers))


def run_layout(layout: Layout, rounds: list[Round], tokenizer: Tokenizer, arguments) -> list[list[str | None]]:
    """The final answer to every question of every round. RuntimeError with the log's tail when the engine fails."""
    longest = max(len(p) + r.new_tokens for r in rounds for p in r.prompts) + arguments.page
    longest += -longest % arguments.page
    keywords, environment = engine_arguments(layout, arguments, longest)
    with tempfile.TemporaryDirectory() as folder:
        task, answer, log = Path(folder, "task.json"), Path(folder, "answer.json"), Path(folder, "log.txt")
        task.write_text(
            json.dumps(
                {
                    "engine": keywords,
                    "rounds": [(r.name, r.prompts, r.new_tokens) for r in rounds],
                    "stop_id": tokenizer.stop_id,
                }
            )
        )
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
                print(f"layout {layout}: no answer within {arguments.timeout} s", file=sys.stderr)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # a scheduler must not outlive its engine
                process.wait()
        if not answer.exists():
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise RuntimeError(f"the engine of layout {layout} failed; its log ends with:\n{tail}")
        outputs = json.loads(answer.read_text())
    return [[read_answer(tokenizer, tokens) for tokens in one] for one in outputs]


def read_answer(tokenizer: Tokenizer, tokens: list[int]) -> str | None:
    return problems.final_answer(tokenizer.decode(tokens))


def compare(names: list[str], answers: list[list[list[str | None]]], rounds: list[Round]) -> list[dict[str, Any]]:
    """One row per layout and round: its score, and how it differs from the first layout's answers."""
    rows = []
    for name, one in zip(names, answers, strict=True):
        for index, questions in enumerate(rounds):
            expected = questions.expected
            result = score(sum(a == e for a, e in zip(one[index], expected, strict=True)), len(expected))
            pair = paired(answers[0][index], one[index], expected)
            rows.append(
                {
                    "layout": name,
                    "round": questions.name,
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


def show(rows: list[dict[str, Any]], baseline: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"accuracy, and agreement with layout {baseline} (95% intervals)")
    for heading in (
        "layout",
        "questions",
        "right",
        "accuracy",
        "same answer",
        "lost/gained",
        "difference",
        "McNemar p",
    ):
        table.add_column(heading)
    for row in rows:
        low, high = row["interval"]
        less, more = row["difference_interval"]
        table.add_row(
            row["layout"],
            row["round"],
            f"{row['right']}/{row['asked']}",
            f"{row['accuracy']:.3f} [{low:.3f}, {high:.3f}]",
            f"{row['agreement']:.3f}",
            f"{row['lost']}/{row['gained']}",
            f"[{less:+.3f}, {more:+.3f}]",
            f"{row['mcnemar_p']:.3f}",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def parse_arguments(command_line: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layouts", nargs="*", type=parse_layout, help="P or PxB; the first is the baseline")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--needle-lengths", type=int, nargs="*", default=[2048])
    parser.add_argument("--needles", type=int, default=2, help="needles at each of eleven depths")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--backend", choices=("triton", "flashinfer"), default="triton")
    parser.add_argument("--dtype", default="float32", help="of a CUDA engine; the CPU test bed computes in float32")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="requests that run at once")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one layout's engine")
    parser.add_argument("--json", type=Path, help="write the rows and every answer here")
    arguments = parser.parse_args(command_line)
    arguments.layouts = arguments.layouts or [parse_layout(text) for text in ("1", "2x1", "2x16", "2x64")]
    if not (arguments.model / "model.safetensors").exists():
        parser.error(
            f"no model in {arguments.model}: train one with scripts/tiny_math/train.py --out {arguments.model}"
        )
    return arguments


def main(command_line: list[str]) -> None:
    if command_line[:1] == ["--serve"]:
        return serve(*command_line[1:])
    arguments = parse_arguments(command_line)
    tokenizer = Tokenizer.load(arguments.model)
    rounds = make_rounds(tokenizer, arguments.questions, arguments.needle_lengths, arguments.needles)
    answers = []
    for layout in arguments.layouts:
        started = time.monotonic()
        answers.append(run_layout(layout, rounds, tokenizer, arguments))
        print(f"layout {layout}: {time.monotonic() - started:.0f} s", flush=True)
    names = [str(layout) for layout in arguments.layouts]
    rows = compare(names, answers, rounds)
    show(rows, names[0])
    if arguments.json:
        record = {
            "device": arguments.device,
            "backend": arguments.backend,
            "page": arguments.page,
            "rows": rows,
            "expected": {r.name: r.expected for r in rounds},
            "answers": {
                n: {r.name: a for r, a in zip(rounds, one, strict=True)} for n, one in zip(names, answers, strict=True)
            },
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
