"""The derived pages and examples are current, and what they point at exists."""

import ast
import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dcp_block import plugin, server_args

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
make_docs = runpy.run_path(str(ROOT / "scripts/make_docs.py"))


def test_committed_pages_and_examples_are_current():
    run = subprocess.run([sys.executable, "scripts/make_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_stale_page_is_noticed(tmp_path):
    for part in ("docs", "scripts"):
        shutil.copytree(ROOT / part, tmp_path / part)
    for part in ("python", "test"):
        (tmp_path / part).symlink_to(ROOT / part)
    page = tmp_path / "docs/hooks.md"
    page.write_text(page.read_text().replace("around", "replace", 1))
    (tmp_path / "docs/examples/explain.txt").unlink()
    run = subprocess.run(
        [sys.executable, "scripts/make_docs.py", "--check"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 1 and "not current: hooks.md, examples/explain.txt;" in run.stderr


def test_every_message_has_an_entry():
    page = (DOCS / "troubleshooting.md").read_text()
    for refusal in server_args.REFUSALS:
        assert f"{{#{refusal.id}}}" in page and make_docs["template"](refusal.message) in page
    found = make_docs["package_messages"]()
    assert len(found) > 40
    for message in found:
        assert message.text.replace("|", "\\|") in page, f"{message.file}:{message.line}"


def test_messages_are_collected_from_every_way_to_say_them(tmp_path):
    """Control for the collector: it must see raises, returned refusals and values in f-strings."""
    package = make_docs["PACKAGE"]
    texts = {m.text for m in make_docs["messages"](package / "disaggregation/wire.py")}
    assert any(text.startswith("prefill has … DCP groups (--tp-size …, --dcp-size …)") for text in texts)
    texts = {m.text for m in make_docs["messages"](package / "server_args.py")}
    assert "--dcp-block-size must be a whole number of tokens >= 1, got …." in texts


def test_message_ids_are_unique_where_they_are_anchors():
    ids = [m.id for m in make_docs["package_messages"]() if m.file in make_docs["EXPLAINED"]]
    ids += [r.id for r in server_args.REFUSALS]
    assert len(ids) == len(set(ids))


def test_explained_files_have_a_section():
    sections = make_docs["data"]("troubleshooting.toml")["sections"]
    assert sorted(f for files in sections.values() for f in files) == sorted(make_docs["EXPLAINED"])


def has_test(reference):
    path, _, name = reference.partition("::")
    file = ROOT / path
    if not file.exists():
        return False
    names = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
    return name in names if name else any(n.startswith("test_") for n in names)


def test_supported_rows_name_tests_that_exist():
    listed = make_docs["data"]("support.toml")
    for row in listed["supported"]:
        assert has_test(row["test"]), row
        assert row["runs"] and set(row) == {"feature", "value", "test", "runs"}
    for row in listed["cells"]:
        assert has_test(row["test"]) and make_docs["cell_rows"](row), row
    for row in listed["measured"]:
        record = json.loads((ROOT / row["record"]).read_text())
        assert record["environment"]["gpus"] > 0 and not record.get("rehearsal")
        assert row["runs"] and set(row) == {"feature", "value", "record", "runs"}
    assert not has_test("test/unit/test_nothing.py") and not has_test("test/unit/test_layout.py::test_nothing")


def test_one_support_table_with_every_refusal():
    page = (DOCS / "support.md").read_text()
    assert page.count("\n| --- |") == 1
    for refusal in server_args.REFUSALS:
        assert f"| {refusal.feature} | refused | [" in page


@pytest.mark.parametrize("reference", sorted({hook.test for hook in plugin.HOOKS}))
def test_hooks_name_tests_that_exist(reference):
    assert has_test(reference)


def test_pictures_are_compared_unless_another_matplotlib_drew_them():
    same = make_docs["same_picture"]
    ours = b"Software\0Matplotlib version3.11.2, https://x" + b"pixels"
    other = b"Software\0Matplotlib version3.9.0, https://x" + b"pixels"
    assert same(ours, ours) and same(ours, other) and not same(ours, ours + b"!")


def test_examples_fit_a_terminal_of_80_columns():
    for file in (DOCS / "examples").glob("*.txt"):
        assert max(map(len, file.read_text().splitlines())) <= 80
        assert "\x1b" not in file.read_text()


def test_the_documented_commands_are_real(capsys):
    """Every option of our commands that the pages show is one that the command takes."""
    from sglang_dcp_block import cli

    known = {}
    for command in ("explain", "advise", "doctor"):
        cli.run([command, "--help"])
        known[command] = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for file in DOCS.glob("*.md"):
        for command, rest in re.findall(r"sglang-dcp-block (explain|advise|doctor)([^\n`]*)", file.read_text()):
            assert set(re.findall(r"--[a-z-]+", rest)) <= known[command], f"{file.name}: {command}{rest}"


def test_site_builds_with_strict_links(tmp_path):
    mkdocs = shutil.which("mkdocs", path=str(Path(sys.executable).parent))
    assert mkdocs, "pip install mkdocs-material"
    run = subprocess.run([mkdocs, "build", "--strict", "-d", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, "\n".join(x for x in run.stderr.splitlines() if x.startswith(("WARNING", "ERROR")))
