"""The accuracy gate: a model that solves word problems and finds needles must solve and find as many in every layout.

The tiny model (models/tiny_math) reads each answer's facts from rows far back in the pool, many blocks away. Each
layout answers the same questions in a real engine on the CPU test bed and is compared, question by question, with an
engine without DCP. Its own control: a layout that never writes one row in 64 must lose the answers that stand there.

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
from sglang_dcp_block.testing.sabotage import LOST_ROW  # noqa: E402

TOKENIZER = accuracy.Tokenizer.load(accuracy.MODEL)
# Triton's interpreter takes a millisecond per program, and a token that isn't cached costs dozens of them per layer and
# rank. So: few questions, on contexts that end just behind a page of four ranks, where the cached part ends.
WORDS = accuracy.word_problems(56, TOKENIZER).only(*range(48, 56))
FEW_WORDS = WORDS.only(0, 3, 5, 7)
TWO_WORDS = WORDS.only(0, 5)
NEEDLES = accuracy.needles(2058, 1, TOKENIZER).only(0, 2, 5, 8, 10)
BOTH = [WORDS, NEEDLES]
FAR_NEEDLES = accuracy.needles(8202, 1, TOKENIZER).only(0, 2, 5, 8, 10)

#: A layout may lose at most this share of the questions (here: none), and must give the same answer to 99% of them.
MOST_LOST, LEAST_AGREEMENT = 0.0, 0.99

FAULT = "lost-rows"

Ask = Callable[[str, list[accuracy.Quiz]], list[list[str | None]]]


@pytest.fixture(scope="session")
def ask(warm, tmp_path_factory, pytestconfig) -> Ask:
    """Final answers of a layout, by quiz; each engine is started once per session."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")
    known: dict[tuple, list[list[str | None]]] = {}

    def of(text: str, quizzes: list[accuracy.Quiz], backend: str = "flashinfer") -> list[list[str | None]]:
        key = (text, backend, *((quiz.name, len(quiz.prompts)) for quiz in quizzes))
        if key not in known:
            layout = accuracy.parse_layout(text)
            spec = accuracy.engine_spec(layout, quizzes, backend)
            with capture.global_and_fixture_disabled():
                print(flush=True)
                tokens = accuracy.ask_cpu(layout, quizzes, spec, tmp_path_factory.mktemp("accuracy"), 400, warm)
            known[key] = accuracy.read_answers(tokens, quizzes, TOKENIZER)
        return known[key]

    return of


def right(answers: list[str | None], quiz: accuracy.Quiz) -> int:
    return sum(a == e for a, e in zip(answers, quiz.expected, strict=True))


def assert_as_good(answers: list[list[str | None]], baseline: list[list[str | None]], quizzes: list[accuracy.Quiz]):
    """As the baseline, quiz by quiz: no more than MOST_LOST lost, at least LEAST_AGREEMENT answered alike."""
    for quiz, mine, theirs in zip(quizzes, answers, baseline, strict=True):
        pair = paired(theirs, mine, quiz.expected)
        print(f"{quiz.name}: {pair}")
        assert pair.only_first <= MOST_LOST * pair.asked, f"{quiz.name}: {pair}"
        assert pair.agreement >= LEAST_AGREEMENT, f"{quiz.name}: {pair}"


def without_dcp(ask: Ask, words: accuracy.Quiz) -> list[str | None]:
    """What the engine without DCP answers to some of the word problems."""
    answers = ask("1", BOTH)[0]
    return [answers[WORDS.prompts.index(prompt)] for prompt in words.prompts]


def test_without_dcp(ask: Ask) -> None:
    for quiz, answers in zip(BOTH, ask("1", BOTH), strict=True):
        assert right(answers, quiz) >= 0.9 * len(quiz.expected), f"{quiz.name}: the model itself fails"


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        pytest.param("2x1", FEW_WORDS, id="2x1"),
        pytest.param("2x16", FEW_WORDS, id="2x16"),
        pytest.param("4x1", TWO_WORDS, id="4x1"),
        pytest.param("4x16", TWO_WORDS, id="4x16"),
    ],
)
def test_word_problems(layout: str, words: accuracy.Quiz, ask: Ask) -> None:
    assert_as_good(ask(layout, [words]), [without_dcp(ask, words)], [words])


@pytest.mark.parametrize(("layout", "words"), [("2x64", WORDS), ("4x64", TWO_WORDS)], ids=["2x64", "4x64"])
def test_word_problems_and_needles(layout: str, words: accuracy.Quiz, ask: Ask) -> None:
    quizzes = [words, NEEDLES]
    assert_as_good(ask(layout, quizzes), [without_dcp(ask, words), ask("1", BOTH)[1]], quizzes)


def test_prefill_without_dcp_to_decode_with_blocks(ask: Ask) -> None:
    assert_as_good(ask("pd2x64", [FEW_WORDS]), [without_dcp(ask, FEW_WORDS)], [FEW_WORDS])


def planted_in_lost_rows(quiz: accuracy.Quiz) -> list[bool]:
    """Whether a number that answers the question stands in a row that FAULT never writes."""
    found = []
    for prompt, expected in zip(quiz.prompts, quiz.expected, strict=True):
        code = TOKENIZER.encode(expected)
        start = next(i for i in range(len(prompt)) if prompt[i : i + len(code)] == code)
        found.append(any((start + i) % 64 == LOST_ROW for i in range(len(code))))
    return found


def assert_lost(broken: list[str | None], quiz: accuracy.Quiz) -> None:
    planted = planted_in_lost_rows(quiz)
    wrong = [answer != expected for answer, expected in zip(broken, quiz.expected, strict=True)]
    assert any(planted)
    assert all(w for w, p in zip(wrong, planted, strict=True) if p), f"needles in lost rows: {planted}, wrong: {wrong}"


def test_one_lost_row_in_64_costs_answers(ask: Ask) -> None:
    """The control of everything above."""
    broken, whole = ask(f"2x64!{FAULT}", BOTH), ask("2x64", BOTH)
    for quiz, bad, good in zip(BOTH, broken, whole, strict=True):
        print(f"{quiz.name}: {score(right(bad, quiz), len(bad))} instead of {score(right(good, quiz), len(good))}")
        assert right(bad, quiz) < right(good, quiz)
        with pytest.raises(AssertionError):
            assert_as_good([bad], [good], [quiz])
    assert_lost(broken[1], NEEDLES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2x64", "4x64"])
def test_far_needles(layout: str, ask: Ask) -> None:
    """Against what they should answer: an engine without DCP would take as long again."""
    assert right(ask(layout, [FAR_NEEDLES])[0], FAR_NEEDLES) == len(FAR_NEEDLES.expected)


@pytest.mark.slow
def test_one_lost_row_in_64_costs_far_needles(ask: Ask) -> None:
    assert_lost(ask(f"2x64!{FAULT}", [FAR_NEEDLES])[0], FAR_NEEDLES)
