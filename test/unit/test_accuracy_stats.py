"""The accuracy statistics against other computations: the score equation, exact sums, exact coverage."""

from math import comb, sqrt

import pytest

from sglang_dcp_block.testing.accuracy_stats import paired, paired_interval, score

Z = 1.959963984540054


@pytest.mark.parametrize("right, asked", [(0, 20), (1, 20), (180, 200), (124, 200), (200, 200)])
def test_wilson_bounds_solve_the_score_equation(right, asked):
    """Each bound p satisfies |right/asked - p| = z * sqrt(p (1-p) / asked): the definition, not the closed form."""
    result = score(right, asked)
    for bound in result.interval:
        assert abs(abs(result.accuracy - bound) - Z * sqrt(bound * (1 - bound) / asked)) < 1e-9
    assert result.interval.low <= result.accuracy <= result.interval.high


def test_plain_wald_bounds_do_not_solve_the_score_equation():
    """Negative control of the test above: the interval that is wrong near 1 is told from the right one."""
    p, n = 0.9, 200
    for bound in (p - Z * sqrt(p * (1 - p) / n), p + Z * sqrt(p * (1 - p) / n)):
        assert abs(abs(p - bound) - Z * sqrt(bound * (1 - bound) / n)) > 1e-3


@pytest.mark.parametrize("right, asked", [(1, 0), (0, 0), (5, 4), (-1, 4)])
def test_no_score_of_nothing(right, asked):
    with pytest.raises(ValueError, match="at least one question"):
        score(right, asked)


def exact_mcnemar(b: int, c: int) -> float:
    """Sum of all outcomes of b + c fair coins that are no likelier than the one seen."""
    n = b + c
    return sum(comb(n, k) for k in range(n + 1) if comb(n, k) <= comb(n, b)) / 2**n


@pytest.mark.parametrize("b, c", [(0, 0), (1, 0), (0, 5), (3, 9), (12, 2), (6, 6)])
def test_mcnemar_is_the_exact_binomial_sum(b, c):
    expected = ["x"] * 40
    first = ["x"] * (40 - c) + ["-"] * c
    second = ["y"] * b + ["x"] * (40 - b)
    result = paired(first, second, expected)
    assert (result.only_first, result.only_second) == (b, c)
    assert result.p_value == pytest.approx(exact_mcnemar(b, c))
    assert result.difference == pytest.approx((sum(s == "x" for s in second) - sum(f == "x" for f in first)) / 40)


def test_agreement_counts_equal_answers_not_equal_correctness():
    expected = ["1", "2", "3", "4"]
    result = paired(["1", "9", "8", "4"], ["1", "9", "7", "5"], expected)
    assert (result.same_answer, result.both_right, result.only_first, result.only_second) == (2, 1, 1, 0)


def coverage(loss: float, gain: float, asked: int, interval) -> float:
    """Exact probability that the interval holds the true difference: sum over the trinomial of discordant counts."""
    total = 0.0
    for b in range(asked + 1):
        for c in range(asked + 1 - b):
            low, high = interval(b, c, asked)
            if low <= gain - loss <= high:
                rest = asked - b - c
                total += comb(asked, b) * comb(asked - b, c) * loss**b * gain**c * (1 - loss - gain) ** rest
    return total


def plain_wald(b: int, c: int, asked: int):
    half = Z * sqrt(b + c - (b - c) ** 2 / asked) / asked
    return (c - b) / asked - half, (c - b) / asked + half


def test_paired_interval_covers_the_true_difference():
    cases = [(0.01, 0.01), (0.02, 0.0), (0.05, 0.02), (0.1, 0.1), (0.3, 0.1)]
    for loss, gain in cases:
        assert coverage(loss, gain, 40, paired_interval) >= 0.93, (loss, gain)
    # Negative control: the unadjusted interval does not pass the same check (it has width zero when nothing differs).
    assert min(coverage(loss, gain, 40, plain_wald) for loss, gain in cases) < 0.9


def test_paired_interval_is_antisymmetric_and_shrinks():
    low, high = paired_interval(3, 9, 200)
    assert paired_interval(9, 3, 200) == pytest.approx((-high, -low))
    assert paired_interval(0, 0, 2000).high < paired_interval(0, 0, 200).high < 0.015


def test_unpaired_runs_are_refused():
    with pytest.raises(ValueError, match="same questions"):
        paired(["1"], ["1", "2"], ["1", "2"])
