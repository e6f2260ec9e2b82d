"""Judging of GPU runs on answers and times whose truth is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import gpu_judge
from gpu_judge import Noise, part


def answer(ids: list[int], logprobs: list[float] | None = None, gaps: list[float] | None = None) -> dict:
    size = len(ids)
    return {
        "prompt": 5, "cached": 0, "ids": ids, "logprobs": logprobs or [-1.0] * size, "gaps": gaps or [2.0] * size,
    }  # fmt: skip


def test_a_first_difference_takes_its_gap_from_the_reference() -> None:
    found = part(answer([1, 2, 3], gaps=[9.0, 0.1, 9.0]), answer([1, 7, 3], [-1.25, -5.0, -9.0]))
    assert (found.at, found.gap, found.before, found.tokens) == (1, 0.1, 0.25, 1)


def test_an_aborted_answer_is_compared_as_far_as_it_goes() -> None:
    found = part(answer([1, 2, 3]), answer([1, 2]))
    assert (found.at, found.tokens) == (None, 2)


def test_nan_is_never_within_the_noise() -> None:
    found = part(answer([1, 2]), answer([1, 2], [float("nan"), -1.0]))
    assert gpu_judge.judge([found], Noise(100.0, 100.0)).wrong


@pytest.mark.parametrize("gap, wrong", [(0.12, 0), (0.13, 1)])
def test_the_limit_is_twice_the_measured_noise(gap: float, wrong: int) -> None:
    noise = gpu_judge.noise_of([part(answer([1], gaps=[0.0625]), answer([2])), part(answer([1]), answer([1], [-1.05]))])
    assert noise == Noise(pytest.approx(0.05), 0.0625)
    assert len(gpu_judge.judge([part(answer([1], gaps=[gap]), answer([2]))], noise).wrong) == wrong


def test_without_noise_only_float32_rounding_passes() -> None:
    silent = Noise(0.0, 0.0)
    assert not gpu_judge.judge([part(answer([1]), answer([1], [-1.0001]))], silent).wrong
    assert gpu_judge.judge([part(answer([1]), answer([1], [-1.001]))], silent).wrong


def test_soak_counts_wrong_answers_and_notices_swapped_ones() -> None:
    bank = [answer([1, 2, 3]), answer([4, 5, 6]), answer([7, 8, 9])]
    good = {"number": 1, "aborted": False, **answer([4, 5])}
    aborted = {"number": 2, "aborted": True, **answer([7]), "cached": 64}
    bad = {"number": 0, "aborted": False, **answer([1, 5])}
    found = gpu_judge.judge_soak(bank, bank, [good, aborted, bad], {"stuck": 0})
    assert (found["checked"], len(found["wrong"]), found["stuck"]) == (3, 1, 0)
    assert (found["checked_aborted"], found["checked_with_cached_prefix"], found["control_noticed"]) == (1, 1, 3)


def timed(**samples: list[list[float]]) -> dict:
    return {
        name: [{"batch": 8, "context": 100, "round": r, "samples_ms": s} for r, s in enumerate(rounds, 1)]
        for name, rounds in samples.items()
    }


def test_ratios_pair_the_rounds() -> None:
    # The machine slows down to a half in the second round: a ratio of medians over all samples would not be 0.5.
    found = timed(a=[[1.0, 1.0, 9.0], [2.0]], b=[[2.0], [4.0, 4.0, 4.0]])
    assert gpu_judge.speed_ratios(found, [("a", "b"), ("a", "absent")]) == [
        {"over": "a", "under": "b", "batch": 8, "context": 100, "ratio": 0.5, "low": 0.5, "high": 0.5, "rounds": 2}
    ]


def test_throughput_is_batch_over_time_per_token() -> None:
    (row,) = gpu_judge.speed_rows(timed(a=[[4.0], [4.0, 4.0]]))
    assert (row["tpot_ms"], row["tokens_per_second"], row["samples"]) == (4.0, 2000.0, 3)
