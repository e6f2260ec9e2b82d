"""The tiny model, its problems and its tokenizer, without any engine."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from tiny_math import problems  # noqa: E402
from tiny_math.model import TinyDeepseekV2  # noqa: E402
from tiny_math.pad import write_padded  # noqa: E402
from tiny_math.tokenizer import BOS, EOS, Tokenizer, build_vocabulary  # noqa: E402

MODEL = ROOT / "models" / "tiny_math"


def load(folder: Path) -> TinyDeepseekV2:
    model = TinyDeepseekV2(json.loads((folder / "config.json").read_text()))
    model.load_state_dict({name: weight.float() for name, weight in load_file(folder / "model.safetensors").items()})
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(MODEL)


def test_the_tokenizer_is_the_generator_s(tokenizer) -> None:
    assert tokenizer.ids == build_vocabulary()


def test_hugging_face_reads_text_the_same_way(tokenizer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(MODEL)
    for prompt in (problems.evaluation_set(1, 1, seed=3)[0], problems.needle_set(300, [0.0, 0.5], 1, seed=3)[0]):
        text = prompt.text + prompt.solution
        ids = [BOS, *tokenizer.encode(text)]
        assert theirs(text)["input_ids"] == ids
        assert ids[-1] == EOS


def test_worked_answers_compute_what_they_say() -> None:
    """Every step and the final answer, worked out again by Python."""
    prompts = problems.evaluation_set(20, 8, seed=4)
    for prompt in prompts:
        *steps, (last, result) = re.findall(r"([\d+*/ -]+|\d+ [a-z]+ at \d+) = (\d+)\.", prompt.solution)
        for left, right in [*steps, (last, result)]:
            assert eval(re.sub(r"[a-z]+ at", "*", left)) == int(right), prompt.solution  # digits and signs only
        assert result == prompt.answer == problems.final_answer(prompt.solution)
    assert not problems.final_answer("no mark"), "an answer without its mark is none"


def test_prices_stand_in_the_list_and_nowhere_near_the_question() -> None:
    for prompt in problems.evaluation_set(20, 8, seed=4):
        prices = dict(re.findall(r"([a-z]+) at (\d+) dollars each", prompt.context))
        examples = prompt.context.split("\n\n", 1)[1]
        for item, price in re.findall(r"([a-z]+) at (\d+) =", prompt.solution):
            assert prices[item] == price
            assert f" {item} at " not in examples, "an example already shows this price"


def test_questions_are_held_out() -> None:
    """The story before a question is another each time; the question itself must never have been trained on."""

    def without_story(question: str) -> str:
        return re.sub(r"^Question: (The [^.]*\. )*", "", question)

    document = problems.math_document(random.Random(5))
    trained = {without_story(text) for text, _ in (next(document) for _ in range(9000)) if text.startswith("Question")}
    asked = {without_story(prompt.question) for prompt in problems.evaluation_set(20, 8, seed=4)}
    assert len(trained) > 2500 and len(asked) > 150
    assert not trained & asked
    assert not any(question.startswith("The ") for question in trained | asked), "control: stories are gone"


def test_each_needle_stands_once_and_where_it_should() -> None:
    depths = [0.0, 0.3, 1.0]
    for prompt in problems.needle_set(1000, depths, 2, seed=6):
        name = re.search(r"code of (\w+)\?", prompt.question)[1]
        fact = problems.fact_text(name, prompt.answer)
        assert prompt.context.count(fact) == 1
        assert abs(prompt.context.index(fact) / len(prompt.context) - prompt.depth) < 0.06


def test_the_model_solves_both_tasks(tokenizer) -> None:
    """A few of each, with the trainer's own code in float32; docs/accuracy.md has the large numbers."""
    model = load(MODEL)
    prompts = problems.evaluation_set(1, 6, seed=7) + problems.needle_set(700, [0.0, 0.5, 1.0], 1, seed=7)
    outputs = model.generate([[BOS, *tokenizer.encode(p.text)] for p in prompts], 48, EOS)
    assert [problems.final_answer(tokenizer.decode(o)) for o in outputs] == [p.answer for p in prompts]


def test_padded_heads_compute_the_same(tokenizer, tmp_path) -> None:
    write_padded(MODEL, tmp_path)
    ids = torch.tensor([[BOS, *tokenizer.encode(problems.evaluation_set(1, 1, seed=8)[0].text)]])
    narrow, wide = load(MODEL), load(tmp_path)
    with torch.inference_mode():
        expected = narrow(ids)
        assert (wide(ids) - expected).abs().max() < 1e-3 * expected.abs().max()
        wide.model.layers[0].self_attn.q_proj.weight.mul_(0.5**0.5)  # control: forget the softmax scale
        assert (wide(ids) - expected).abs().max() > 1e-2 * expected.abs().max()
