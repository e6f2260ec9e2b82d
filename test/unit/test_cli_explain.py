"""``explain``: its numbers against brute force, and its pictures against its numbers."""

import io
import re
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from sglang_dcp_block.advise import UserError
from sglang_dcp_block.explain import SYMBOLS, explain, render_png, render_text


def simulate(tokens, dcp_size, block_size):
    """Positions of each rank in row order, by dealing tokens out one by one."""
    rows = [[] for _ in range(dcp_size)]
    rank, left = 0, block_size
    for position in range(tokens):
        rows[rank].append(position)
        left -= 1
        if left == 0:
            rank, left = (rank + 1) % dcp_size, block_size
    return rows


def runs(positions):
    """(first position, first row, length) of each run of consecutive positions."""
    out = []
    for row, position in enumerate(positions):
        if out and position == out[-1][0] + out[-1][2]:
            out[-1][2] += 1
        else:
            out.append([position, row, 1])
    return [tuple(run) for run in out]


def as_run(piece):
    return piece["source_row"], piece["destination_row"], piece["rows"]


cases = st.tuples(
    st.integers(1, 600), st.integers(2, 9), st.sampled_from([1, 2, 3, 16, 48]), st.sampled_from([1, 8, 48])
)


@given(cases)
def test_numbers_by_simulation(case):
    tokens, dcp_size, block_size, page_size = case
    report = explain(tokens, dcp_size, block_size, page_size)
    for name, block in (("block_round_robin", block_size), ("token_round_robin", 1)):
        rows = simulate(tokens, dcp_size, block)
        shards = report[name]
        assert [shard["rows"] for shard in shards["ranks"]] == [len(r) for r in rows]
        assert shards["empty_ranks"] == [rank for rank, r in enumerate(rows) if not r]
        for shard, positions in zip(shards["ranks"], rows, strict=True):
            expected = runs(positions)
            assert shard["segments"] == len(expected)
            assert [as_run(p) for p in shard["first"]] == expected[: len(shard["first"])]
            assert [as_run(p) for p in shard["last"]] == expected[-1:]
            assert len(shard["first"]) == min(len(expected), 8)
        # Pages of which no two are neighbours cut a run at every page edge, on the source side.
        scattered = sum((p + n - 1) // page_size - p // page_size + 1 for r in rows for p, _, n in runs(r))
        assert shards["segments_scattered"] == scattered
    page = report["virtual_page"]
    assert page["count"] * page["slots"] == tokens + page["unused_slots"]
    assert 0 <= page["unused_slots"] < page["slots"]


@given(cases, st.data())
def test_extend_by_simulation(case, data):
    tokens, dcp_size, block_size, page_size = case
    prefix = data.draw(st.integers(0, tokens))
    chunk = data.draw(st.integers(0, tokens - prefix))
    part = explain(tokens, dcp_size, block_size, page_size, prefix=prefix, chunk=chunk)["prefix"]
    rows = simulate(tokens, dcp_size, block_size)
    assert part["rows_before"] == [sum(p < prefix for p in r) for r in rows]
    assert part["rows_added"] == [sum(prefix <= p < prefix + chunk for p in r) for r in rows]
    # Control: counting the chunk from its own zero, the classic mistake, is told apart.
    from_zero = [len(r) for r in simulate(chunk, dcp_size, block_size)]
    if prefix and chunk == block_size and prefix % (dcp_size * block_size) == block_size:
        assert part["rows_added"] != from_zero


def text_of(report, width=80):
    out = io.StringIO()
    render_text(report, Console(width=width, file=out))
    return out.getvalue()


@given(cases, st.booleans())
@settings(max_examples=60, deadline=None)
def test_picture_fits_80_columns_and_needs_no_colour(case, with_prefix):
    extra = {"prefix": case[0] // 2, "chunk": case[0] - case[0] // 2} if with_prefix else {}
    text = text_of(explain(*case, **extra))
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80
    # Every rank has its line in the table, with its rows.
    lines = text.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("rank ")) + 1 :]
    for rank, rows in enumerate(simulate(*case[:3])):
        assert re.match(rf"\s*{SYMBOLS[rank]}\s", table[rank]) and f" {len(rows):,} " in table[rank] + " "


@pytest.mark.parametrize("ranks", [2, 8, 16, 32, 62])
@pytest.mark.parametrize("tokens", [1, 999, 1_000_000])
def test_picture_at_any_size(tokens, ranks):
    text = text_of(explain(tokens, ranks, 64, 64))
    assert max(map(len, text.splitlines())) <= 80


def test_owner_strip_is_the_rule():
    text = text_of(explain(1000, 8, 64, 64))
    strip = {name: re.search(rf"{name} RR  (\w+)", text)[1] for name in ("token", "block")}
    first = int(re.search(r"Positions (\d+) to", text)[1])
    assert strip["token"] == "".join(SYMBOLS[p % 8] for p in range(first, first + 64))
    assert strip["block"] == "".join(SYMBOLS[p // 64 % 8] for p in range(first, first + 64))
    assert len(set(strip["block"])) == 2, "the window must show a block's edge"


def test_png_is_a_picture(tmp_path):
    file = tmp_path / "layout.png"
    render_png(explain(1000, 8, 64, 64), file)
    data = file.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and width > 1000 and height > 500


@pytest.mark.parametrize(
    ("arguments", "extra", "words"),
    [
        ((0, 8, 64, 64), {}, "--tokens must be at least 1"),
        ((10, 1, 64, 64), {}, "--dcp-size 1 keeps every token on rank 0"),
        ((10, 63, 64, 64), {}, "more than the 62 ranks"),
        ((10, 8, 0, 64), {}, "--block-size must be at least 1"),
        ((10, 8, 64, -1), {}, "--page-size must be at least 1"),
        ((10, 8, 64, 64), {"prefix": 6, "chunk": 5}, "raise --tokens to 11"),
        ((10, 8, 64, 64), {"prefix": -1}, "--prefix must not be negative"),
        ((10, 8, 64, 64), {"memory": 1}, "--memory needs --model"),
    ],
)
def test_bad_input_in_one_sentence(arguments, extra, words):
    with pytest.raises(UserError) as error:
        explain(*arguments, **extra)
    text = str(error.value)
    assert words in text and text.endswith(".") and ". " not in text


def test_unwritable_png(tmp_path):
    with pytest.raises(UserError, match="can't write"):
        render_png(explain(10, 2, 1, 1), tmp_path / "missing" / "x.png")
