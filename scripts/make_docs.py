"""Make the pages and examples under docs/ that are derived from the code, or check that they are current.

    python scripts/make_docs.py            # write them
    python scripts/make_docs.py --check    # exit status 1 and a list, when a committed file differs

Derived: hooks.md from plugin.HOOKS, support.md from server_args.REFUSALS and docs/data/support.toml,
troubleshooting.md from REFUSALS, every message that the package raises, and docs/data/troubleshooting.toml,
metrics.md from metrics.METRICS, and docs/examples/ from the commands themselves.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import runpy
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tomllib
from rich.console import Console

from sglang_dcp_block import advise, doctor, explain, metrics, plugin, server_args

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python/sglang_dcp_block"
DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/make_docs.py: edit its sources, not this file. -->\n\n"
REPOSITORY = "https://github.com/sgl-project/sglang"


def data(name: str) -> dict[str, Any]:
    return tomllib.loads((DOCS / "data" / name).read_text())


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *(list(row) for row in rows)]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


# -- hooks.md ----------------------------------------------------------------------------------------------------------


def hooks_page() -> str:
    rows = []
    for hook in plugin.HOOKS:
        module, _, name = hook.target.partition(":")
        ours, source, test = (f"`{text}`" for text in (hook.replacement, hook.source, hook.test))
        rows.append((f"`{name}`<br>{module}", hook.kind, hook.scope, hook.why, ours, source, test))
    heads = ("target", "kind", "scope", "what goes wrong without it", "ours", "source hash", "test")
    scopes = []
    for name, scope in plugin.SCOPES.items():
        scopes.append((f"`{name}`", scope if isinstance(scope, str) else SCOPE_TEXT[name]))
    return f"""{MADE}# Hooks

All that this package changes in SGLang {plugin.SGLANG_VERSION}: {len(plugin.HOOKS)} targets, this table, nothing else.
The table is `plugin.HOOKS` in the code. Before a hook is installed, the target's source text is hashed and compared;
one missing or changed target stops the process before it has a KV pool. Afterwards every module is searched for copies
of the original. `sglang-dcp-block doctor` does the first half without starting a server.

With the default block size of 1 and the FlashInfer backend, a server without PD has only the rows of scope `launch`,
`engine` and `scheduler` installed, none of which is on the path of a token.

FlashInfer's own code stays as it is. After the plan of a decode step (`call_begin_forward` below) that step's wrapper
holds a second module that FlashInfer compiled, for float16 results (`attention/flashinfer_float16.py`).

{table(heads, rows)}
## Scopes: when a row is installed

{table(("scope", "installed in"), scopes)}
## Kinds

- `around`: our function is called with the original as its first argument.
- `replace`: our function is called instead.
- `add`: the target is a list, and our value is appended to it.
"""


SCOPE_TEXT = {
    "block": "scheduler processes with a block size above 1, or with MLA on the Triton backend",
    "mla": "the same, of a model with multi-head latent attention (MLA)",
    "triton": "scheduler processes of the Triton backend under DCP: with MLA at every block size, else above 1",
    "triton_mla": "scheduler processes of the Triton backend under DCP with MLA, at every block size",
    "gqa": "scheduler processes of a grouped-query model with a block size above 1",
    "flashinfer": "scheduler processes of the FlashInfer backend with a block size above 1",
    "pd_prefill": "scheduler processes of a Mooncake or NIXL prefill server, whatever its flags",
    "pd_decode": "scheduler processes of a Mooncake or NIXL decode server, whatever its flags",
    "pd_pages": "scheduler processes of a Mooncake or NIXL prefill server without DCP",
    "mooncake_prefill": "the same, of a Mooncake prefill server alone",
    "mooncake_decode": "the same, of a Mooncake decode server alone",
    "nixl_prefill": "the same, of a NIXL prefill server alone",
    "nixl_decode": "the same, of a NIXL decode server alone",
}


# -- support.md --------------------------------------------------------------------------------------------------------


def cell_rows(spec: dict[str, str]) -> list[tuple[str, ...]]:
    """Rows from a test file's own list of cells, one for each backend and DCP size."""
    path, _, name = spec["list"].partition("::")
    cells = runpy.run_path(str(ROOT / path))[name]()
    rows = []
    for backend, dcp in sorted({(c.backend, c.dcp) for c in cells}):
        mine = [c for c in cells if (c.backend, c.dcp) == (backend, dcp)]
        blocks = ", ".join(str(b) for b in sorted({c.block for c in mine}))
        comms = ", ".join(sorted({c.comm for c in mine}))
        values = {"backend": backend, "dcp": dcp, "blocks": blocks, "comms": comms}
        rows.append(
            (spec["feature"].format(**values), spec["value"].format(**values), f"`{spec['test']}`", spec["runs"])
        )
    return rows


def support_page() -> str:
    listed = data("support.toml")
    rows = [row for spec in listed["cells"] for row in cell_rows(spec)]
    rows += [(row["feature"], row["value"], f"`{row['test']}`", row["runs"]) for row in listed["supported"]]
    for row in listed["measured"]:
        rows.append((row["feature"], row["value"], f"run of `{row['record']}`", row["runs"]))
    for refusal in server_args.REFUSALS:
        link = f"[{template(refusal.message)}](troubleshooting.md#{refusal.id})"
        rows.append((refusal.feature, "refused", link, "at start"))
    return f"""{MADE}# What is supported

One table. A row is proved by the test it names, or by one run by hand whose record it names, or refused before the
server is ready with the message it quotes. What has no row has not been looked at. The last column says where it runs;
[performance](performance.md) and [accuracy](accuracy.md) say what was measured on which machine.

{table(("feature", "value", "test, or message that refuses it", "runs on"), rows)}"""


# -- troubleshooting.md ------------------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A message in the source: file below the package, line, and text with an ellipsis for each value."""

    file: str
    line: int
    text: str

    @property
    def id(self) -> str:
        """First words of the text, as an anchor."""
        words = re.findall(r"[a-z0-9]+", self.text.lower().removeprefix("sglang-dcp-block"))
        return "-".join(words[:8])

    @property
    def title(self) -> str:
        """First words of the text, as a heading."""
        words = self.text.removeprefix("sglang-dcp-block: ").split()
        return " ".join(words[:10]) + (" ..." if len(words) > 10 else "")


def template(message: str) -> str:
    """A message with {values} shown as an ellipsis."""
    return re.sub(r"\{[^}]*\}", "…", message)


# Refusals of a peer and failed transfers are returned, not raised: an exception would end SGLang's receiving thread.
_BETWEEN_SERVERS = tuple(f"disaggregation/{name}.py" for name in ("wire", "common", "mooncake", "nixl"))
# Files whose messages get an explanation each; the others' only check arguments, and are listed.
EXPLAINED = (
    "hooks.py",
    "plugin.py",
    "server_args.py",
    "runtime.py",
    *_BETWEEN_SERVERS,
)


def messages(file: Path) -> list[Message]:
    """Every message that ``file`` raises, refuses a peer with, or fails a request with."""
    tree = ast.parse(file.read_text())
    name = str(file.relative_to(PACKAGE))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, Message] = {}
    for node in _message_nodes(tree, name):
        text = _text(node, constants)
        if len(text.split()) >= 4:
            found.setdefault(text, Message(name, node.lineno, text))
    return list(found.values())


def _message_nodes(tree: ast.Module, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            yield node.exc.args[0]
        if name not in _BETWEEN_SERVERS:
            continue
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            yield node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_fail_request":
            yield node.args[-1]


def _text(node: ast.expr, constants: dict[str, Any]) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(part.value)
            else:
                value = part.value if isinstance(part, ast.FormattedValue) else None
                known = constants.get(value.id) if isinstance(value, ast.Name) else None
                parts.append(str(known) if known is not None else "…")
        return "".join(parts)
    return ""


def package_messages() -> list[Message]:
    files = sorted(f for f in PACKAGE.rglob("*.py") if "testing" not in f.parts)
    return [message for file in files for message in messages(file)]


def troubleshooting_page() -> str:
    notes = data("troubleshooting.toml")
    refused, raised = notes["refusals"], notes["messages"]
    parts = [
        MADE,
        "# Troubleshooting by message\n\n"
        "Search this page for a few words of the message you got; … stands for a value. "
        "`sglang-dcp-block doctor` checks most of this before a launch.\n\n",
        "## Refused at start\n\nThe server stops before it loads weights, with one of these.\n\n",
    ]
    for refusal in server_args.REFUSALS:
        note = refused.get(refusal.id, notes["untested"] if "not tested with" in refusal.message else None)
        if note is None:
            raise SystemExit(f"docs/data/troubleshooting.toml has no [refusals] entry for {refusal.id!r}")
        parts.append(f"### {refusal.feature} {{#{refusal.id}}}\n\n> {template(refusal.message)}\n\n{note.strip()}\n\n")
    listed = package_messages()
    for title, files in notes["sections"].items():
        parts.append(f"## {title}\n\n")
        for message in (m for m in listed if m.file in files):
            if message.id not in raised:
                raise SystemExit(
                    f"docs/data/troubleshooting.toml has no [messages] entry {message.id!r}: {message.text}"
                )
            parts.append(
                f"### {message.title} {{#{message.id}}}\n\n> {message.text}\n\n{raised[message.id].strip()}\n\n"
            )
    unknown = set(raised) - {m.id for m in listed}
    if unknown:
        raise SystemExit(
            f"docs/data/troubleshooting.toml explains messages that are gone: {', '.join(sorted(unknown))}"
        )
    parts.append(
        "## Bad arguments\n\n"
        "These messages say what to change. From the commands `explain`, `advise` and `doctor` they mean a value you "
        "gave; in a server's log they mean a mistake in this package: please report it with the lines around it.\n\n"
    )
    rows = [(f"`{m.file}`", m.text) for m in listed if m.file not in EXPLAINED]
    parts.append(table(("file", "message"), rows))
    return "".join(parts)


# -- metrics.md --------------------------------------------------------------------------------------------------------


def metrics_page() -> str:
    rows = [(f"`{m.name}`", m.kind, m.documentation) for m in metrics.METRICS]
    return f"""{MADE}# Metrics

Start the server with SGLang's `--enable-metrics`; these series then stand beside SGLang's own under `/metrics`, with
the same labels (`model_name`, `engine_type`, `tp_rank`, ...).

{table(("metric", "kind", "meaning"), rows)}
The label `reason` of `sglang:dcp_refused_peers_total` is a short fixed word.

`benchmark/grafana/dashboard.json` is a Grafana dashboard of them: Dashboards, New, Import, then choose your Prometheus.
Each panel's description says what a healthy value looks like. The first one to look at is *Bytes per segment*: at block
64 of a bf16 MLA model it is near 72 KiB, and 1,152 bytes mean that rows are sent one by one.
"""


# -- examples ----------------------------------------------------------------------------------------------------------

EXAMPLE_MODEL = "examples/deepseek-v3.json"


def _plain(render: Any, thing: Any) -> str:
    out = io.StringIO()
    render(thing, Console(width=80, file=out, color_system=None))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _svg(render: Any, thing: Any, title: str) -> str:
    console = Console(width=80, file=io.StringIO(), record=True, force_terminal=True, color_system="truecolor")
    render(thing, console)
    return console.export_svg(title=title, unique_id="example")


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def broken_machine() -> list[doctor.Check]:
    """The doctor's words for a machine with one fault of each kind, from its own check functions."""
    nvlink = "GPU0\t X \tNV18\tSYS\nGPU1\tNV18\t X \tNV18\nGPU2\tSYS\tNV18\t X \n"
    healthy = plugin.layout_record(plugin.DcpLayout(8, 64), 64)
    settings = doctor.Settings(tp_size=8, dcp_size=8, block_size=48, page_size=64, backend="fa3")
    missing = "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory"
    fault = doctor.layout_fault({"dcp_size": 8, "block_size": 32, "page_size": 64}, healthy, "http://decode:30000")
    return [
        doctor.check_plugin({"SGLANG_PLUGINS": "another"}),
        doctor.Check("sglang", "fail", doctor.wrong_version("0.5.22", plugin.SGLANG_VERSION)),
        doctor.check_gpus(["NVIDIA H200"] * 3, nvlink, 8),
        *doctor.check_mooncake({"mooncake-transfer-engine": "0.3.13.post1"}, "13.0", 3),
        doctor.Check("mooncake import", "fail", doctor.explain_import_error(missing)),
        doctor.check_nixl("1.6.0"),
        *doctor.check_settings(settings),
        doctor.Check("peer", "fail", str(fault)),
    ]


def examples() -> dict[str, str]:
    """Text of each example by its path below docs/."""
    shape = advise.load_model(DOCS / EXAMPLE_MODEL)
    basic = explain.explain(1000, 8, 64, 64)
    prefix = explain.explain(1000, 8, 64, 64, prefix=300, chunk=512)
    model = explain.explain(131_072, 8, 64, 64, shape=shape, memory=40 * 10**9)
    short = explain.explain(300, 8, 64, 64)
    advice = advise.advise(shape, tp_size=8, gpu_memory=141 * 10**9, context=131_072, concurrency=32)
    broken = broken_machine()
    return {
        "examples/explain.txt": _plain(explain.render_text, basic),
        "examples/explain.svg": _svg(explain.render_text, basic, "sglang-dcp-block explain"),
        "examples/explain.json": _json(basic),
        "examples/explain-prefix.txt": _plain(explain.render_text, prefix),
        "examples/explain-model.txt": _plain(explain.render_text, model),
        "examples/explain-short.txt": _plain(explain.render_text, short),
        "examples/advise.txt": _plain(advise.render_text, advice),
        "examples/advise.json": _json(advice),
        "examples/doctor-broken.txt": _plain(doctor.render_text, broken),
        "examples/doctor-broken.json": _json(doctor.as_json(broken)),
    }


PICTURES = {"examples/explain.png": (1000, 8, 64, 64), "examples/explain-page16.png": (200, 4, 16, 32)}


def pages() -> dict[str, str]:
    return {
        "hooks.md": hooks_page(),
        "support.md": support_page(),
        "troubleshooting.md": troubleshooting_page(),
        "metrics.md": metrics_page(),
    }


# -- pictures ----------------------------------------------------------------------------------------------------------


def same_picture(old: bytes, new: bytes) -> bool:
    """Equal, or drawn by another matplotlib, whose fonts and metadata we can't expect to be the same."""

    def drawn_by(png: bytes) -> bytes | None:
        found = re.search(rb"Software\0([^\0]*?)https?:", png)
        return found[1] if found else None

    return old == new or drawn_by(old) != drawn_by(new)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, text in (pages() | examples()).items():
        path = DOCS / name
        if check:
            if not path.exists() or path.read_text() != text:
                stale.append(name)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    for name, arguments in PICTURES.items():
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            explain.render_png(explain.explain(*arguments), file.name)
            new = Path(file.name).read_bytes()
        path = DOCS / name
        if not check:
            path.write_bytes(new)
        elif not path.exists() or not same_picture(path.read_bytes(), new):
            stale.append(name)
    if stale:
        print(f"not current: {', '.join(stale)}; run python scripts/make_docs.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
