"""The script that writes new source hashes into the hook table changes the rows that it means, and no others."""

import runpy
from pathlib import Path

import pytest

from sglang_dcp_block import plugin

ROOT = Path(__file__).parents[2]
refreshed = runpy.run_path(str(ROOT / "scripts/refresh_hashes.py"))["refreshed"]

A, B, C = "a" * 16, "b" * 16, "c" * 16
ROWS = {Path("one"): f'row("x", "{A}")\nrow("y", "{B}")\n', Path("two"): f'row("z", "{C}")\n'}


def test_a_new_hash_may_be_another_rows_old_one():
    new = refreshed(ROWS, [("x", A, B), ("y", B, C), ("z", C, A)])
    assert new == {Path("one"): f'row("x", "{B}")\nrow("y", "{C}")\n', Path("two"): f'row("z", "{A}")\n'}
    assert refreshed(ROWS, []) == ROWS


def test_equal_hashes_of_two_rows_are_refused():
    texts = ROWS | {Path("three"): f'row("w", "{A}")\n'}
    with pytest.raises(ValueError, match=r"x: its hash a{16} stands in 2 places: write this row by hand"):
        refreshed(texts, [("x", A, "d" * 16)])


def test_a_hash_that_stands_nowhere_is_refused():
    with pytest.raises(ValueError, match="stands in 0 places"):
        refreshed(ROWS, [("x", "d" * 16, A)])


def test_every_row_of_the_table_can_be_written():
    """No two rows have one hash, in the files that the script reads."""
    package = Path(plugin.__file__).parent
    texts = {path: path.read_text() for path in [Path(plugin.__file__), *package.glob("disaggregation/*.py")]}
    changes = [(hook.target, hook.source, f"{number:016x}") for number, hook in enumerate(plugin.HOOKS)]
    new = "".join(refreshed(texts, changes).values())
    assert all(new.count(f'"{now}"') == 1 for _, _, now in changes)
