"""The accuracy gate: a model that solves word problems and finds needles must solve and find as many in every layout.

The tiny model (models/tiny_math) reads each answer's facts from rows far back in the pool, many blocks away. Each
layout answers the same questions in a real engine on the CPU test bed and is compared, question by question, with an
engine without DCP. Its own control: a layout that never writes the first row of a block must lose answers.

The numbers of the larger runs are in docs/accuracy.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmark"))

import accuracy  # noqa: E402

from sglang_dcp_block.testing.accuracy_stats import paired, score  # noqa: E402

TOKENIZER = accuracy.Tokenizer.load(accuracy.MODEL)
WORDS = accuracy.word_problems(16, TOKENIZER)
NEEDLES = [accuracy.needles(length, 1, TOKENIZER) for length in (2048, 8192)]

#: A layout may lose at most this share of the questions (here: none), and must give the same answer to 99% of them.
MOST_LOST, LEAST_AGREEMENT = 0.0, 0.99

LAYOUTS = ["2x1", "2x16", "2x64", "4x1", "4x16", "4x64"]
FAULT = "lost-block-starts"

Ask = Callable[[str, list[accuracy.Quiz]], list[list[str | None]]]


@pytest.fixture(scope="session")
def ask(warm, tmp_path_factory, pytestconfig) -> Ask:
    """Final answers of a layout, by quiz; each engine is started once per session."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    known: dict[tuple, list[list[str | None]]] = {}

    def of(text: str, quizzes: list[accuracy.Quiz], backend: str = "flashinfer") -> list[list[str | None]]:
        key = (text, backend, *(quiz.name for quiz in quizzes))
        if key not in known:
            layout = accuracy.parse_layout(text)
            spec = accuracy.engine_spec(layout, quizzes, backend)
            with capture.global_and_fixture_disabled():
                print(flush=True)
                tokens = accuracy.ask_cpu(layout, quizzes, spec, tmp_path_factory.mktemp("accuracy"), 400, warm)
            known[key] = accuracy.final_answers(tokens, TOKENIZER)
        return known[key]

    return of


def assert_equal_to_dcp1(answers: list[str | None], single: list[str | None], quiz: accuracy.Quiz) -> None:
    pair = paired(single, answers, quiz.expected)
    print(f"{quiz.name}: {pair}")
    assert pair.only_first <= MOST_LOST * pair.asked, pair
    assert pair.agreement >= LEAST_AGREEMENT, pair


def right(answers: list[str | None], quiz: accuracy.Quiz) -> int:
    return sum(a == e for a, e in zip(answers, quiz.expected, strict=True))


def test_without_dcp(ask: Ask) -> None:
    for quiz, answers in zip([WORDS, *NEEDLES], ask("1", [WORDS, *NEEDLES]), strict=True):
        assert right(answers, quiz) >= 0.9 * len(quiz.expected), f"{quiz.name}: the model itself fails"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_word_problems(layout: str, ask: Ask) -> None:
    quizzes = [WORDS, *NEEDLES] if layout.endswith("x64") else [WORDS]
    assert_equal_to_dcp1(ask(layout, quizzes)[0], ask("1", [WORDS, *NEEDLES])[0], WORDS)


@pytest.mark.parametrize("number", range(len(NEEDLES)), ids=[quiz.name for quiz in NEEDLES])
@pytest.mark.parametrize("layout", ["2x64", "4x64"])
def test_needles(layout: str, number: int, ask: Ask) -> None:
    everything = [WORDS, *NEEDLES]
    assert_equal_to_dcp1(ask(layout, everything)[number + 1], ask("1", everything)[number + 1], NEEDLES[number])


def test_wrong_rows_cost_answers(ask: Ask) -> None:
    """The control: one row in 64 was never written."""
    everything = [WORDS, *NEEDLES]
    broken, whole = ask(f"2x64!{FAULT}", everything), ask("2x64", everything)
    for quiz, bad, good in zip(everything, broken, whole, strict=True):
        print(f"{quiz.name}: {score(right(bad, quiz), len(bad))} instead of {score(right(good, quiz), len(good))}")
    words, *needles = (right(b, q) - right(g, q) for q, b, g in zip(everything, broken, whole, strict=True))
    assert words < 0 and sum(needles) < 0
    with pytest.raises(AssertionError):
        assert_equal_to_dcp1(broken[0], ask("1", everything)[0], WORDS)


def test_prefill_without_dcp_to_decode_with_blocks(ask: Ask) -> None:
    assert_equal_to_dcp1(ask("pd2x64", [WORDS])[0], ask("1", [WORDS, *NEEDLES])[0], WORDS)
