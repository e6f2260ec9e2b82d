"""Check an installation and, if asked, the settings of a launch and a running peer.

Nothing here imports SGLang or torch: their files are read instead, so the doctor answers in a second and on machines
where an import would fail. Each check is one function that returns one or more :class:`Check`.
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_dcp_block import __version__, plugin, server_args
from sglang_dcp_block.dcp.layout import DcpLayout
from sglang_dcp_block.disaggregation import wire
from sglang_dcp_block.hooks import Hook

# What Mooncake's engine links against that is not in its wheel, and the Debian package that has it.
SYSTEM_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "liburing.so.2": "liburing2",
}
REQUIRED_LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1")
# CUDA major version that a Mooncake distribution is built for; None: without CUDA.
MOONCAKE_CUDA = {
    "mooncake-transfer-engine": 12,
    "mooncake-transfer-engine-cuda13": 13,
    "mooncake-transfer-engine-non-cuda": None,
}
#: The NIXL that this project's extra ``nixl`` installs.
NIXL_VERSION = "1.5.1"
IMPORT_TIMEOUT_S = 120
PEER_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Check:
    """Result of one check. ``status``: "ok", "warn" (a server starts, but read this) or "fail"."""

    name: str
    status: str
    message: str


@dataclass(frozen=True)
class Settings:
    """What the user means to start; None where not given."""

    tp_size: int | None = None
    dcp_size: int | None = None
    block_size: int | None = None
    page_size: int | None = None
    backend: str | None = None

    @property
    def served_page_size(self) -> int | None:
        """The page that a server started like this has: whole blocks."""
        if self.page_size is None:
            return None
        return DcpLayout(self.dcp_size or 1, self.block_size or 1).rows_per_virtual_page(self.page_size)


# -- SGLang ------------------------------------------------------------------------------------------------------------


def check_sglang(expected: str = plugin.SGLANG_VERSION) -> Check:
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return Check("sglang", "fail", f"sglang is not installed: pip install sglang=={expected}.")
    if found != expected:
        return Check("sglang", "fail", wrong_version(found, expected))
    return Check("sglang", "ok", f"sglang {found}.")


def wrong_version(found: str, expected: str) -> str:
    return f"sglang {found} is installed, this package needs {expected}: install that."


def check_plugin(environ: Mapping[str, str] = os.environ) -> Check:
    """SGLang finds the plugin, and SGLANG_PLUGINS does not leave it out."""
    names = [
        e.name
        for e in metadata.entry_points(group="sglang.srt.plugins")
        if e.value == "sglang_dcp_block.plugin:register"
    ]
    if not names:
        return Check(
            "plugin", "fail", "SGLang can't find the plugin: install sglang-dcp-block with pip, don't copy it."
        )
    allowed = [name.strip() for name in environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if allowed and names[0] not in allowed:
        return Check("plugin", "fail", f"SGLANG_PLUGINS leaves the plugin out: add {names[0]} to it, or unset it.")
    return Check("plugin", "ok", f"sglang-dcp-block {__version__}, found by SGLang as {names[0]}.")


def read_source(target: str, root: Path) -> str:
    """Text of ``module:Class.name`` below ``root``, the parent folder of the package, as ``inspect`` would give it.

    A list is given as its repr.

    Raises:
        LookupError: no such file or definition.
    """
    module, _, path = target.partition(":")
    file = root.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    if not file.exists():
        raise LookupError(f"{file.name} is missing")
    text = file.read_text()
    *outer, last = path.split(".")
    body: Iterable[ast.stmt] = ast.parse(text).body
    for name in outer:
        holder = next((n for n in _definitions(body) if isinstance(n, ast.ClassDef) and n.name == name), None)
        if holder is None:
            raise LookupError(f"class {name} is not defined")
        body = holder.body
    node = next((n for n in _definitions(body) if _defines(n, last)), None)
    if node is None:
        raise LookupError(f"{last} is not defined")
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        return repr(ast.literal_eval(node.value))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return "".join(text.splitlines(keepends=True)[first - 1 : node.end_lineno])


def _definitions(body: Iterable[ast.stmt]) -> Iterable[ast.stmt]:
    """Statements of ``body`` in reverse, since the last definition counts, with those under if and try."""
    for node in reversed(list(body)):
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _definitions([*node.body, *node.orelse])


def _defines(node: ast.stmt, name: str) -> bool:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(t, ast.Name) and t.id == name for t in targets)


def check_hooks(hooks: Iterable[Hook] = plugin.HOOKS, root: Path | None = None) -> list[Check]:
    """One line for each hook target that is missing or changed, or one line for all."""
    if root is None:
        spec = util.find_spec("sglang")
        if spec is None or not spec.submodule_search_locations:
            return [Check("hooks", "fail", "no hook target can be read: install sglang.")]
        root = Path(next(iter(spec.submodule_search_locations))).parent
    hooks, faults = list(hooks), []
    for hook in hooks:
        try:
            found = hashlib.sha256(read_source(hook.target, root).encode()).hexdigest()[:16]
        except (LookupError, SyntaxError, ValueError) as error:
            faults.append(Check("hooks", "fail", f"{hook.target} can't be found ({error}): {_reinstall()}"))
            continue
        if found != hook.source:
            change = f"source hash {found}, expected {hook.source}"
            faults.append(Check("hooks", "fail", f"{hook.target} has changed ({change}): {_reinstall()}"))
    return faults or [Check("hooks", "ok", f"{len(hooks)} hook targets found, all with the expected source.")]


def _reinstall() -> str:
    return f"reinstall sglang=={plugin.SGLANG_VERSION}."


# -- Mooncake and its libraries ----------------------------------------------------------------------------------------


def torch_cuda() -> str | None:
    """CUDA version that the installed torch is built for, such as "13.0"; None without torch or without CUDA."""
    spec = util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(next(iter(spec.submodule_search_locations))) / "version.py"
    found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", file.read_text(), re.M) if file.exists() else None
    return found[1] if found else None


def mooncake_distributions() -> dict[str, str]:
    """Installed distributions that bring the ``mooncake`` package, by name, with their versions."""
    found = {}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if "mooncake" in name:
            found[name] = dist.version
    return found


def check_mooncake(installed: Mapping[str, str], cuda: str | None, gpus: int) -> list[Check]:
    """The wheel fits the machine. ``cuda``: torch's CUDA version; ``gpus``: NVIDIA GPUs here."""
    major = int(cuda.split(".")[0]) if cuda else None
    fitting = {12: "mooncake-transfer-engine", 13: "mooncake-transfer-engine-cuda13"}
    wanted = fitting.get(major or 0, fitting[13]) if gpus else "mooncake-transfer-engine-non-cuda"
    if not installed:
        return [Check("mooncake", "warn", f"no Mooncake: for PD install {wanted}, or else ignore this.")]
    if len(installed) > 1:
        names = ", ".join(sorted(installed))
        return [Check("mooncake", "fail", f"{names} share one import name: uninstall all of them, install {wanted}.")]
    name, version = next(iter(installed.items()))
    if name not in MOONCAKE_CUDA:
        return [
            Check("mooncake", "warn", f"{name} {version} is a build this project has not tried: {wanted} is tested.")
        ]
    built_for = MOONCAKE_CUDA[name]
    if built_for is not None and built_for != major:
        have = f"torch has CUDA {cuda}" if cuda else "torch has no CUDA"
        return [
            Check("mooncake", "fail", f"{name} is built for CUDA {built_for} but {have}: install {wanted} instead.")
        ]
    if built_for is None and gpus:
        return [
            Check("mooncake", "fail", f"{name} can't send GPU memory, and here are GPUs: install {wanted} instead.")
        ]
    return [Check("mooncake", "ok", f"{name} {version} fits.")]


def _run_python(python: str, code: str, environ: Mapping[str, str] | None) -> subprocess.CompletedProcess[str]:
    """One that hangs has failed, with a word on it in stderr."""
    command, environ = [python, "-c", code], environ and dict(environ)
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {IMPORT_TIMEOUT_S} seconds")


def check_mooncake_import(python: str = sys.executable, environ: Mapping[str, str] | None = None) -> Check:
    """Import Mooncake's engine in a process of its own, since a bad build may end it."""
    run = _run_python(python, "import mooncake.engine", environ)
    if run.returncode == 0:
        return Check("mooncake import", "ok", "mooncake.engine can be imported.")
    return Check("mooncake import", "fail", explain_import_error(run.stderr or f"exit status {run.returncode}"))


def explain_import_error(stderr: str) -> str:
    """What to do about a failed import of mooncake.engine."""
    missing = re.search(r"(\S+\.so[\w.]*): cannot open shared object file", stderr)
    if missing is None:
        last = stderr.strip().splitlines()[-1]
        return f"mooncake.engine can't be imported ({last.rstrip('.')}): reinstall the Mooncake wheel."
    library = missing[1]
    if library in SYSTEM_LIBRARIES:
        return f"Mooncake needs {library}: apt-get install {SYSTEM_LIBRARIES[library]}."
    if toolkit := re.match(r"lib(?:cudart|cuda|cufile|nvrtc)\.so\.(\d+)", library):
        return f"this Mooncake wheel needs {library} of CUDA {toolkit[1]}: install the wheel for this machine's CUDA."
    return f"Mooncake needs {library}, which is not on this machine: install the package that has it."


def check_libraries(libraries: Mapping[str, str] | None = None) -> Check:
    """The system libraries that Mooncake's wheels leave to the machine can be loaded."""
    if libraries is None:
        libraries = {name: SYSTEM_LIBRARIES[name] for name in REQUIRED_LIBRARIES}
    missing = {}
    for library, package in libraries.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing[library] = package
    if missing:
        names, packages = ", ".join(missing), " ".join(missing.values())
        return Check(
            "libraries", "fail", f"{names} can't be loaded, so Mooncake can't start: apt-get install {packages}."
        )
    return Check("libraries", "ok", f"{', '.join(libraries)} can be loaded.")


# -- NIXL --------------------------------------------------------------------------------------------------------------


def check_nixl(installed: str | None) -> Check:
    """``installed``: version of the distribution ``nixl``, None without it. Nothing but its own backend needs it."""
    if installed is None:
        return Check("nixl", "ok", "no NIXL, which --disaggregation-transfer-backend nixl alone needs.")
    if installed != NIXL_VERSION:
        return Check(
            "nixl", "warn", f"nixl {installed} is not the one this project has tried: {NIXL_VERSION} is tested."
        )
    return Check("nixl", "ok", f"nixl {installed} fits.")


def check_nixl_import(python: str = sys.executable, environ: Mapping[str, str] | None = None) -> Check:
    """Start an agent without a backend in a process of its own; it must find UCX, the plugin that is tested."""
    agent = "nixl_agent('doctor', nixl_agent_config(backends=[]))"
    code = f"from nixl._api import nixl_agent, nixl_agent_config; print({agent}.get_plugin_list())"
    run = _run_python(python, code, environ)
    if run.returncode != 0:
        last = (run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1].rstrip(".")
        return Check("nixl import", "fail", f"NIXL can't be started ({last}): reinstall nixl=={NIXL_VERSION}.")
    if "'UCX'" not in run.stdout:
        return Check(
            "nixl import", "fail", f"NIXL finds no UCX plugin: unset NIXL_PLUGIN_DIR or reinstall nixl=={NIXL_VERSION}."
        )
    return Check("nixl import", "ok", "NIXL can be started and has the UCX plugin.")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


# -- GPUs --------------------------------------------------------------------------------------------------------------


def query_gpus() -> tuple[list[str], str]:
    """Names of the NVIDIA GPUs here, and the link matrix of ``nvidia-smi topo -m`` ("" when there is none)."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [], ""
    names = subprocess.run(
        [smi, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
    )
    if names.returncode != 0:
        return [], ""
    matrix = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=30)
    return names.stdout.split("\n")[:-1], matrix.stdout


def gpu_links(matrix: str) -> dict[tuple[int, int], str]:
    """Link of each GPU pair (i < j) in the output of ``nvidia-smi topo -m``: NV18, PIX, PHB, SYS and the like."""
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in matrix.splitlines()]
    rows = [line.split() for line in lines if re.match(r"GPU\d+\s", line.strip())]
    rows = [row for row in rows if "X" in row]  # a device's link to itself; the heading has none
    return {(i, j): rows[i][j + 1] for i in range(len(rows)) for j in range(i + 1, len(rows))}


def check_gpus(names: list[str], matrix: str, tp_size: int | None = None) -> Check:
    if not names:
        return Check("gpus", "warn", "no NVIDIA GPU: only the CPU test bed runs here.")
    here = f"{len(names)} GPU{'s' if len(names) > 1 else ''} ({' and '.join(sorted(set(names)))})"
    if tp_size and len(names) < tp_size:
        return Check("gpus", "fail", f"{here}, fewer than --tp {tp_size}: lower --tp.")
    slow = sorted({link for link in gpu_links(matrix).values() if not link.startswith("NV")})
    if slow:
        text = f"{here}, some pairs without NVLink ({', '.join(slow)}): expect slow DCP merges there."
        return Check("gpus", "warn", text)
    return Check("gpus", "ok", here + (", all pairs on NVLink." if gpu_links(matrix) else "."))


# -- settings of a launch ----------------------------------------------------------------------------------------------

# Refusals that can be judged from Settings alone, and the settings that each needs.
_JUDGED = {
    "block-without-dcp": ("dcp_size",),
    "dcp-not-dividing-tp": ("tp_size", "dcp_size"),
    "attention-backend": ("backend",),
}


def check_settings(settings: Settings) -> list[Check]:
    """What the server would refuse, told from its own table of refusals; nothing where no setting was given."""
    given = {name for name, value in vars(settings).items() if value is not None}
    if not given - {"tp_size"}:
        return []
    cfg = SimpleNamespace(
        tp_size=settings.tp_size,
        dcp_size=settings.dcp_size,
        page_size=settings.page_size,
        attention_backend=settings.backend,
        prefill_attention_backend=None,
        decode_attention_backend=None,
    )
    launch = server_args.Launch(cfg, None, settings.block_size or 1)
    refused = [
        Check("settings", "fail", refusal.text(launch))
        for refusal in server_args.REFUSALS
        if refusal.id in _JUDGED
        and given.issuperset(_JUDGED[refusal.id])
        and (launch.block_size > 1 or refusal.id == "dcp-not-dividing-tp")
        and refusal.applies(launch)
    ]
    if refused:
        return refused
    told = ", ".join(f"{name.replace('_', ' ')} {getattr(settings, name)}" for name in vars(settings) if name in given)
    page = settings.served_page_size
    raised = "" if page == settings.page_size else f"; the page becomes {page}, whole blocks"
    return [Check("settings", "ok", f"{told} fit together{raised}.")]


# -- peers -------------------------------------------------------------------------------------------------------------


def ask_peer(url: str, timeout: float = PEER_TIMEOUT_S) -> dict[str, Any]:
    """``/server_info`` of a running server.

    Raises:
        ConnectionError: no answer, or not one of SGLang's; the message is one sentence.
    """
    base = url.rstrip("/")
    if not re.match(r"https?://", base):
        raise ConnectionError(f"{url} is not an address: write it like http://host:30000.")
    try:
        with urllib.request.urlopen(f"{base}/server_info", timeout=timeout) as answer:
            info = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConnectionError(f"{url} gave no /server_info ({reason}): check the address and that it is up.") from None
    if not isinstance(info, dict):
        raise ConnectionError(f"{url} gave no SGLang /server_info: check the address.")
    return info


def is_pd(info: Mapping[str, Any]) -> bool:
    """Whether a running server is one end of a prefill/decode pair, where layouts and page sizes may differ."""
    return info.get("disaggregation_mode") in ("prefill", "decode")


def layout_fault(ours: Mapping[str, Any], theirs: Mapping[str, Any], name: str) -> str | None:
    """Why two layouts (dicts like /server_info's ``dcp_layout``) differ, or None.

    Only the keys of ``ours`` are compared. A side with dcp_size 1 fits any block size: it holds whole requests.
    """
    flags = {"page_size": "--page-size", "dcp_size": "--dcp-size", "block_size": server_args.FLAG}
    one_side_is_whole = 1 in (ours.get("dcp_size"), theirs["dcp_size"])
    for key in ("page_size",) if one_side_is_whole else flags:
        if key in ours and ours[key] != theirs[key]:
            what = f"{key.replace('_', ' ')} {theirs[key]}, this side {ours[key]}"
            return f"{name} has {what}: give both the same {flags[key]}."
    return None


def pair_fault(first: Mapping[str, Any], second: Mapping[str, Any], name: str) -> str | None:
    """Why two running servers (their /server_info) can't work together, or None; ``name`` is the second one's."""
    by_role = {info.get("disaggregation_mode"): info for info in (first, second)}
    if not {"prefill", "decode"} <= set(by_role):
        return None if is_pd(second) else layout_fault(first["dcp_layout"], second["dcp_layout"], name)
    # The same judgement that the prefill server will make. "auto" is resolved there, so it can't be compared here.
    dtypes = {role: str(info.get("kv_cache_dtype", "auto")) for role, info in by_role.items()}
    if "auto" in dtypes.values():
        dtypes = dict.fromkeys(dtypes, "auto")
    sides = {}
    for role, info in by_role.items():
        layout = info["dcp_layout"]
        sides[role] = wire.KvGeometry(layout["dcp_size"], layout["block_size"], layout["page_size"], dtypes[role])
    fault = wire.refusal(sides["prefill"], sides["decode"])
    decode_tp, prefill_tp = (by_role[role].get("tp_size") for role in ("decode", "prefill"))
    if fault is None and decode_tp and prefill_tp and sides["prefill"].dcp_size > 1:
        try:
            wire.senders_of(0, decode_tp, prefill_tp, sides["prefill"].dcp_size)
        except wire.WireError as error:
            fault = str(error)
    return f"{name} would be refused: {fault}" if fault else None


def check_peers(urls: Iterable[str], settings: Settings) -> list[Check]:
    """Compare each peer with the given settings and with the first peer."""
    keys = ("dcp_size", "block_size", "page_size")
    ours = {"dcp_size": settings.dcp_size, "block_size": settings.block_size, "page_size": settings.served_page_size}
    ours = {key: value for key, value in ours.items() if value is not None}
    checks: list[Check] = []
    first: dict[str, Any] | None = None
    for url in urls:
        try:
            info = ask_peer(url)
        except ConnectionError as error:
            checks.append(Check("peer", "fail", str(error)))
            continue
        layout = info.get("dcp_layout")
        if layout is None:
            todo = f"install sglang-dcp-block {__version__} there and restart it"
            checks.append(Check("peer", "fail", f"{url} reports no dcp_layout: {todo}."))
            continue
        fault = None if is_pd(info) else layout_fault(ours, layout, url)
        fault = fault or (pair_fault(first, info, url) if first else None)
        first = first or info
        said = ", ".join(f"{key.replace('_', ' ')} {layout[key]}" for key in keys)
        if fault:
            checks.append(Check("peer", "fail", fault))
        elif layout["plugin_version"] != __version__:
            other = f"plugin version {layout['plugin_version']}, here {__version__}"
            checks.append(Check("peer", "warn", f"{url} has {said}, but {other}: install one version."))
        else:
            checks.append(Check("peer", "ok", f"{url} has {said}."))
    return checks


# -- all of them -------------------------------------------------------------------------------------------------------


def diagnose(settings: Settings, peers: Iterable[str] = ()) -> list[Check]:
    """Every check, in the order of a launch."""
    names, matrix = query_gpus()
    installed = mooncake_distributions()
    checks = [check_plugin(), check_sglang(), *check_hooks(), check_gpus(names, matrix, settings.tp_size)]
    checks += check_mooncake(installed, torch_cuda(), len(names))
    if installed:
        checks += [check_libraries(), check_mooncake_import()]
    checks.append(check_nixl(nixl := _version("nixl")))
    if nixl:
        checks.append(check_nixl_import())
    return [*checks, *check_settings(settings), *check_peers(peers, settings)]


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"schema": 1, "ok": all(c.status != "fail" for c in checks), "checks": [asdict(c) for c in checks]}


def render_text(checks: list[Check], console: Console) -> None:
    """One line a check."""
    styles = {"ok": "green", "warn": "yellow", "fail": "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    for check in checks:
        table.add_row(Text(check.status, style=styles[check.status]), check.name, check.message)
    console.print(table)
