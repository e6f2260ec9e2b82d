"""The command line as a user meets it: output, exit status, JSON schemas, one-sentence errors."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from sglang_dcp_block import cli

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "docs/examples/deepseek-v3.json")
EXPLAIN = ["explain", "--tokens", "1000", "--dcp-size", "8", "--block-size", "64", "--page-size", "64"]
ADVISE = f"advise --model {MODEL} --tp 8 --gpu-memory 141GB --context 128K --concurrency 32".split()


def run(capsys, *arguments):
    status = cli.run(list(arguments))
    out = capsys.readouterr()
    return status, out.out, out.err


@pytest.mark.parametrize(
    "arguments",
    [
        EXPLAIN,
        [*EXPLAIN, "--prefix", "300", "--chunk", "512"],
        [*EXPLAIN, "--model", MODEL],
        [*EXPLAIN, "--model", MODEL, "--dtype", "fp8", "--memory", "40GB"],
        ["explain", "--tokens", "1", "--dcp-size", "62", "--block-size", "1", "--page-size", "1"],
        ADVISE,
        [*ADVISE[:-1], "1"],
        [*ADVISE, "--dtype", "fp8", "--mem-fraction", "0.8"],
        ["doctor"],
        [
            *["doctor", "--tp", "8", "--dcp-size", "3", "--block-size", "48", "--page-size", "64", "--peer"],
            "http://127.0.0.1:9",
        ],
    ],
    ids=" ".join,
)
def test_json_follows_its_schema(capsys, arguments):
    status, out, err = run(capsys, *arguments, "--json")
    report = json.loads(out)
    schema = json.loads((ROOT / f"docs/schema/{arguments[0]}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(report, schema, jsonschema.Draft202012Validator)
    assert err == "" and status == (0 if report.get("ok", True) else 1)
    # Control: a schema that lets anything pass would prove nothing.
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(report | {"surprise": 1}, schema, jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("explain --tokens abc --dcp-size 8 --block-size 64 --page-size 64", "'--tokens'"),
        ("explain --dcp-size 8 --block-size 64 --page-size 64", "Missing option '--tokens'"),
        ("explain --tokens 0 --dcp-size 8 --block-size 64 --page-size 64", "--tokens must be at least 1"),
        ("explain --tokens 9 --dcp-size 8 --block-size 64 --page-size 64 --memory 3", "--memory needs --model"),
        ("explain --tokens 9 --dcp-size 8 --block-size 64 --page-size 64 --model /nowhere", "can't read /nowhere"),
        ("explain --tokens 9 --dcp-size 8 --block-size 64 --page-size 64 --png /nowhere/x.png", "can't write"),
        (f"advise --model {MODEL} --tp 8 --gpu-memory plenty --context 1K --concurrency 1", "'plenty'"),
        (f"advise --model {MODEL} --tp 8 --gpu-memory 80GB --context 1K --concurrency 1", "leave no room for KV"),
        ("doctor --tp many", "'--tp'"),
        ("doctor --nonsense", "--nonsense"),
        ("nonsense", "nonsense"),
    ],
)
def test_bad_input_is_one_sentence_on_stderr(capsys, arguments, words):
    status, out, err = run(capsys, *arguments.split())
    text = " ".join(err.split())
    assert (status, out) == (2, "")
    assert words in text and text.startswith("error: ")
    assert text[-1] in ".?" and ". " not in text.removeprefix("error: ")


def test_no_arguments_shows_the_commands(capsys):
    status, out, _ = run(capsys)
    assert status == 2 and all(command in out for command in ("explain", "advise", "doctor"))


def test_bugs_are_not_hidden_as_user_errors(monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr(cli.explain_, "explain", broken)
    with pytest.raises(KeyError):
        cli.run(EXPLAIN)


def test_runs_as_a_module_without_loading_sglang_or_torch():
    code = (
        "import sys; from sglang_dcp_block.cli import run\n"
        f"assert run({EXPLAIN!r}) == 0\n"
        "assert not {'sglang', 'torch', 'prometheus_client', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
    by_module = subprocess.run([sys.executable, "-m", "sglang_dcp_block", *EXPLAIN], capture_output=True, text=True)
    assert by_module.returncode == 0 and "block RR" in by_module.stdout


def test_piped_output_has_no_colour_and_a_terminal_has(capsys, monkeypatch):
    assert "\x1b[" not in run(capsys, *EXPLAIN)[1]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert "\x1b[" in run(capsys, *EXPLAIN)[1]
