"""GSM8K on eight GPUs: the block layout against a run without DCP and against token round-robin, question by question.

    DCP_BLOCK_GSM8K_MODEL=deepseek-ai/DeepSeek-V2-Lite python -m pytest -rs test/registered/test_dcp_block_gsm8k.py

DCP_BLOCK_GSM8K_MODEL  the model, a hub name or a folder; unset: the GPU tests are skipped and say so
DCP_BLOCK_GSM8K_DATA   GSM8K's test.jsonl; unset: SGLang's own download
DCP_BLOCK_GSM8K_OUT    a folder for the answers of each run as JSON; unset: not kept
"""

import json
import os
import unittest
from pathlib import Path

import requests
import torch
from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.kits.eval_accuracy_kit import GSM8KMixin
from sglang.test.simple_eval_common import CompletionSampler, SamplerBase
from sglang.test.simple_eval_mixed_prefix_gsm8k import INVALID, GSM8KEval, get_answer_value
from sglang.test.test_utils import (
    DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH,
    DEFAULT_URL_FOR_TEST,
    CustomTestCase,
    popen_launch_server,
    terminate_and_kill_process_tree,
)

from sglang_dcp_block.testing.accuracy_stats import paired, score

register_cuda_ci(est_time=2400, stage="extra-b", runner_config="8-gpu-h200")

MODEL = os.environ.get("DCP_BLOCK_GSM8K_MODEL", "")
DATA = os.environ.get("DCP_BLOCK_GSM8K_DATA")
OUT = os.environ.get("DCP_BLOCK_GSM8K_OUT")
SAMPLE = Path(__file__).with_name("gsm8k_sample.jsonl")
GPUS = 8

# (part of the model's name, least accuracy of 200 questions, 5-shot): the first match counts.
THRESHOLDS = (("V2-Lite", 0.62), ("V3", 0.90))
# Per-question agreement of two runs of one bfloat16 model: batch composition alone flips near ties.
LEAST_AGREEMENT = 0.90

COMMON = ["--tp-size", str(GPUS), "--page-size", "64", "--attention-backend", "triton", "--trust-remote-code"]
DCP = [*COMMON, "--dcp-size", str(GPUS), "--dcp-block-size"]
RUNS = {"no_dcp": COMMON, "block_1": [*DCP, "1"], "block_64": [*DCP, "64"]}


def threshold(model: str) -> float:
    """The least accuracy asked of ``model``. ValueError names what to add for a model without one."""
    for part, least in THRESHOLDS:
        if part.lower() in model.lower():
            return least
    raise ValueError(f"no accuracy threshold for {model!r}: add one to THRESHOLDS in {Path(__file__).name}")


def why_not_here(model: str, gpus: int) -> str:
    """Why the GPU tests can't run, or an empty string."""
    if gpus < GPUS:
        return f"GSM8K NOT MEASURED: needs {GPUS} GPUs, this machine has {gpus}"
    if not model:
        return "GSM8K NOT MEASURED: set DCP_BLOCK_GSM8K_MODEL to a DeepSeek model"
    return ""


def ask(sampler: SamplerBase, questions: int | None, shots: int, threads: int, data: str | None):
    """Ask GSM8K's questions. Returns (answers, expected), numbers in question order; no number found is INVALID."""
    evaluation = GSM8KEval(questions, threads, shots, data)
    result = evaluation(sampler)
    answers = [get_answer_value(conversation[-1]["content"] or "") for conversation in result.convos]
    expected = [get_answer_value(line["answer"]) for line in evaluation._lines]
    if len(answers) != len(expected) or INVALID in expected:
        raise ValueError("the data set is not GSM8K's format: every answer must end with '#### number'")
    return answers, expected


@unittest.skipIf(why_not_here(MODEL, torch.cuda.device_count()), why_not_here(MODEL, torch.cuda.device_count()))
class TestDcpBlockGSM8K(GSM8KMixin, CustomTestCase):
    """Three servers, one after the other, answer the same questions; the tests compare what they answered."""

    gsm8k_num_questions = 200
    gsm8k_num_shots = 5
    base_url = DEFAULT_URL_FOR_TEST
    process = None

    @classmethod
    def setUpClass(cls):
        cls.gsm8k_score_threshold = threshold(MODEL)
        cls.answers, cls.slots = {}, {}
        for name, arguments in RUNS.items():
            cls.process = popen_launch_server(
                MODEL, cls.base_url, timeout=DEFAULT_TIMEOUT_FOR_SERVER_LAUNCH, other_args=arguments
            )
            try:
                info = requests.get(cls.base_url + "/server_info", timeout=60).json()
                cls.slots[name] = info["max_total_num_tokens"]
                sampler = CompletionSampler(
                    base_url=f"{cls.base_url}/v1",
                    model=MODEL,
                    temperature=0.0,
                    max_tokens=512,
                    stop=["Question", "Assistant:", "<|separator|>"],
                )
                cls.answers[name], cls.expected = ask(
                    sampler, cls.gsm8k_num_questions, cls.gsm8k_num_shots, cls.gsm8k_num_threads, DATA
                )
            finally:
                cls.stop_server()
            print(name, "slots", cls.slots[name], score(cls.right(name), len(cls.expected)), flush=True)
            if OUT:
                Path(OUT).mkdir(parents=True, exist_ok=True)
                record = {"expected": cls.expected, "answers": cls.answers[name], "slots": cls.slots[name]}
                Path(OUT, f"{name}.json").write_text(json.dumps(record))

    @classmethod
    def stop_server(cls):
        if cls.process is not None:
            terminate_and_kill_process_tree(cls.process, wait_timeout=60)
            cls.process = None

    @classmethod
    def tearDownClass(cls):
        cls.stop_server()

    @classmethod
    def right(cls, name: str) -> int:
        return sum(a == e for a, e in zip(cls.answers[name], cls.expected, strict=True))

    def test_gsm8k(self):
        for name in RUNS:
            with self.subTest(name):
                self.assertGreaterEqual(self.right(name) / len(self.expected), self.gsm8k_score_threshold)

    def test_dcp_holds_more_tokens(self):
        """Each rank keeps an eighth of a sequence, so the same memory holds several times the tokens."""
        for name in ("block_1", "block_64"):
            self.assertGreater(self.slots[name], GPUS / 2 * self.slots["no_dcp"], name)

    def check_pair(self, first: str, second: str):
        result = paired(self.answers[first], self.answers[second], self.expected)
        print(f"{first} -> {second}: {result}", flush=True)
        self.assertGreaterEqual(result.agreement, LEAST_AGREEMENT)
        self.assertGreaterEqual(result.interval.high, 0.0, "the block layout loses accuracy")

    def test_paired_with_no_dcp(self):
        self.check_pair("no_dcp", "block_64")

    def test_paired_with_token_round_robin(self):
        self.check_pair("block_1", "block_64")


class SolutionSampler(SamplerBase):
    """Answers from the data set's own solutions, wrongly for every ``wrong_every``-th of its questions."""

    def __init__(self, data: Path, wrong_every: int | None = None):
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        self.solutions = {line["question"]: line["answer"] for line in lines}
        self.wrong = set(list(self.solutions)[::wrong_every]) if wrong_every else set()
        self.prompts: list[str] = []

    def _pack_message(self, role: str, content: str):
        return {"role": role, "content": content}

    def __call__(self, messages) -> str:
        prompt = messages[-1]["content"]
        self.prompts.append(prompt)
        question = prompt.rsplit("Question: ", 1)[1].removesuffix("\nAnswer:")
        return f" {self.solutions[question]}" + (" and 7" if question in self.wrong else "")


class TestHarness(unittest.TestCase):
    """The parts that need no GPU, on the checked-in questions."""

    shots = 5

    def ask(self, sampler):
        return ask(sampler, None, self.shots, 4, str(SAMPLE))

    def test_all_right(self):
        sampler = SolutionSampler(SAMPLE)
        answers, expected = self.ask(sampler)
        self.assertEqual(len(expected), len(SAMPLE.read_text().splitlines()) - self.shots)
        self.assertGreaterEqual(len(expected), 20)
        self.assertEqual(answers, expected)
        self.assertEqual({p.count("\nAnswer:") for p in sampler.prompts}, {self.shots + 1})
        result = paired(answers, answers, expected)
        self.assertEqual((result.agreement, result.difference, result.p_value), (1.0, 0.0, 1.0))

    def test_wrong_answers_are_counted(self):
        """Negative control: a run that errs on every second question is told from a right one."""
        right, expected = self.ask(SolutionSampler(SAMPLE))
        flawed, _ = self.ask(SolutionSampler(SAMPLE, wrong_every=2))
        result = paired(right, flawed, expected)
        wrong = sum(a != e for a, e in zip(flawed, expected, strict=True))
        self.assertEqual(result.only_first, wrong)
        self.assertGreaterEqual(wrong, 10)
        self.assertLess(result.agreement, LEAST_AGREEMENT)
        self.assertLess(result.interval.high, 0.0)
        self.assertLess(result.p_value, 0.01)

    def test_a_bad_data_set_is_refused(self):
        bad = Path(self.enterContext(_folder()), "bad.jsonl")
        line = json.dumps({"question": "How many?", "answer": "none"}) + "\n"
        bad.write_text(SAMPLE.read_text() + line)
        sampler = SolutionSampler(bad)
        with self.assertRaisesRegex(ValueError, "####"):
            ask(sampler, None, self.shots, 4, str(bad))

    def test_thresholds(self):
        self.assertEqual(threshold("deepseek-ai/DeepSeek-V2-Lite"), 0.62)
        self.assertEqual(threshold("/models/DeepSeek-V3.1"), 0.90)
        with self.assertRaisesRegex(ValueError, "add one to THRESHOLDS"):
            threshold("some-other-model")

    def test_skips_say_why(self):
        self.assertIn("8 GPUs, this machine has 2", why_not_here("deepseek-ai/DeepSeek-V2-Lite", 2))
        self.assertIn("DCP_BLOCK_GSM8K_MODEL", why_not_here("", 8))
        self.assertEqual(why_not_here("deepseek-ai/DeepSeek-V2-Lite", 8), "")


def _folder():
    import tempfile

    return tempfile.TemporaryDirectory()


if __name__ == "__main__":
    unittest.main()
