"""Judging of GPU runs on answers and times whose truth is known."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from brute_force import deal_pages
from test_audit import Engine, served

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


# -- KV rows -----------------------------------------------------------------------------------------------------------


def recorded(engine: Engine, folder: Path) -> Path:
    """The engine's request records in the files that an audited engine leaves."""
    for number, record in enumerate(engine.request_records()):
        rank = folder / f"rank{record.dcp_rank}"
        rank.mkdir(parents=True, exist_ok=True)
        np.savez(rank / f"request-{number:05d}.npz", **record._asdict())
    return folder


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    return recorded(served(1, 1, 4), tmp_path / "dcp1")


def row_of(engine: Engine, request: int, position: int) -> np.ndarray:
    """(layers, width): a view."""
    rank, row = engine.place(engine.requests[request][1][position])
    return engine.pools[rank, :, row]


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_apart_by_the_largest_noise_seen_pass(reference: Path, tmp_path: Path, fp8: bool) -> None:
    engine = served(2, 4, 4)
    engine.pools += 0.07
    found = gpu_judge.audit(reference, recorded(engine, tmp_path / "dcp2"), 2, 4, fp8=fp8)
    assert found["ok"] and found["control_noticed"], found
    assert found["compared"] == sum(len(tokens) for tokens, _ in engine.requests)
    assert found["max_abs_diff"] == pytest.approx(0.07, abs=1e-5)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_halved_row_and_a_neighbours_row_are_mismatches(reference: Path, tmp_path: Path, fp8: bool) -> None:
    engine = served(2, 4, 4)
    row_of(engine, 2, 9)[:] /= 2
    row_of(engine, 3, 17)[:] = row_of(engine, 3, 18)
    found = gpu_judge.audit(reference, recorded(engine, tmp_path / "dcp2"), 2, 4, fp8=fp8)
    assert (found["ok"], found["mismatches"], found["written"]) == (False, 2, 0), found


@pytest.mark.parametrize("fp8", [False, True])
def test_one_fp8_step_passes_with_fp8_only(reference: Path, tmp_path: Path, fp8: bool) -> None:
    engine = served(2, 4, 4)
    row = row_of(engine, 2, 9)
    row[:] += np.where(np.abs(row) == np.abs(row).max(), 0.25 + np.abs(row) / 9, 0)
    found = gpu_judge.audit(reference, recorded(engine, tmp_path / "dcp2"), 2, 4, fp8=fp8)
    assert (found["ok"], found["mismatches"]) == ((True, 0) if fp8 else (False, 1)), found


class RotatedPages(Engine):
    def place(self, slot: int) -> tuple[int, int]:
        dealt = deal_pages(60, self.dcp, self.block, self.page_rows)
        return int(dealt.owner[slot]), int(dealt.row[slot])


def test_rotated_pages_are_judged_as_such(reference: Path, tmp_path: Path) -> None:
    records = recorded(served(2, 4, 4, RotatedPages), tmp_path / "rotated")
    found = gpu_judge.audit(reference, records, 2, 4, rotated_page=4)
    assert found["ok"] and found["control_noticed"], found
    assert not gpu_judge.audit(reference, records, 2, 4)["ok"]
    assert not gpu_judge.audit(reference, recorded(served(2, 4, 4), tmp_path / "plain"), 2, 4, rotated_page=4)["ok"]


# -- times -------------------------------------------------------------------------------------------------------------


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
