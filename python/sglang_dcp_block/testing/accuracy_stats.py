"""Statistics of an accuracy comparison: how sure a score is, and how sure a difference of two paired scores is.

Two runs answer the same questions. Their scores alone hide flips (one layout loses a question, gains another), so the
comparison is paired: the discordant questions, McNemar's exact test, an interval of the difference, and the share of
questions on which both gave the same answer, right or wrong.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import sqrt
from typing import NamedTuple

from scipy.stats import binomtest, norm


class Interval(NamedTuple):
    low: float
    high: float


class Score(NamedTuple):
    """right of asked, with Wilson's interval of the accuracy."""

    right: int
    asked: int
    interval: Interval

    @property
    def accuracy(self) -> float:
        return self.right / self.asked

    def __str__(self) -> str:
        return f"{self.right}/{self.asked} = {self.accuracy:.3f} [{self.interval.low:.3f}, {self.interval.high:.3f}]"


class Paired(NamedTuple):
    """Two runs over the same questions; difference = accuracy of the second minus accuracy of the first."""

    asked: int
    both_right: int
    only_first: int
    only_second: int
    same_answer: int
    p_value: float
    difference: float
    interval: Interval

    @property
    def agreement(self) -> float:
        return self.same_answer / self.asked

    def __str__(self) -> str:
        return (
            f"difference {self.difference:+.3f} [{self.interval.low:+.3f}, {self.interval.high:+.3f}], "
            f"lost {self.only_first}, gained {self.only_second}, McNemar p {self.p_value:.3f}, "
            f"same answer {self.same_answer}/{self.asked} = {self.agreement:.3f}"
        )


def score(right: int, asked: int, confidence: float = 0.95) -> Score:
    """A score with Wilson's interval (Wilson 1927). ValueError when nothing was asked or right is not in 0..asked."""
    if not 0 <= right <= asked or asked == 0:
        raise ValueError(f"{right} right answers of {asked} questions is not a score: ask at least one question")
    low, high = binomtest(right, asked).proportion_ci(confidence, method="wilson")
    return Score(right, asked, Interval(float(low), float(high)))


def paired_interval(only_first: int, only_second: int, asked: int, confidence: float = 0.95) -> Interval:
    """Interval of (only_second - only_first) / asked: the adjusted Wald interval of Bonett and Price (2012).

    One question is added to both discordant cells, so that two identical runs don't get an interval of width zero.
    """
    loss, gain = (only_first + 1) / (asked + 2), (only_second + 1) / (asked + 2)
    half = norm.ppf((1 + confidence) / 2) * sqrt((loss + gain - (gain - loss) ** 2) / (asked + 2))
    return Interval(max(-1.0, gain - loss - half), min(1.0, gain - loss + half))


def paired(
    first: Sequence[Hashable], second: Sequence[Hashable], expected: Sequence[Hashable], confidence: float = 0.95
) -> Paired:
    """Compare two runs' answers, question by question, with the expected answers.

    Raises ValueError when the runs did not answer the same number of questions, or none.
    """
    if not len(first) == len(second) == len(expected) or not expected:
        raise ValueError(
            f"runs of {len(first)} and {len(second)} answers to {len(expected)} questions can't be paired: "
            "give both runs the same questions"
        )
    right = [(a == e, b == e) for a, b, e in zip(first, second, expected, strict=True)]
    only_first, only_second = right.count((True, False)), right.count((False, True))
    discordant = only_first + only_second
    return Paired(
        asked=len(expected),
        both_right=right.count((True, True)),
        only_first=only_first,
        only_second=only_second,
        same_answer=sum(a == b for a, b in zip(first, second, strict=True)),
        # McNemar's exact test: under no difference a discordant question falls to either side with probability 1/2.
        p_value=float(binomtest(only_second, discordant).pvalue) if discordant else 1.0,
        difference=(only_second - only_first) / len(expected),
        interval=paired_interval(only_first, only_second, len(expected), confidence),
    )
