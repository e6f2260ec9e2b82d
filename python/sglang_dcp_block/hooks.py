"""Strict installation of hooks into SGLang: all of them, exactly where they are expected, or the process stops.

SGLang's own hook registry logs a failed hook and goes on. A rank that misses one hook would write or read KV in
another order than its peers and answer with plausible nonsense, so here a missing or changed target raises
:class:`HookError`, which is a ``SystemExit``: no ``except Exception`` between here and the process can swallow it.

An installation has three steps. *Check*: every target exists and its source has the expected hash. *Patch*: the
target and every ``from module import name`` copy in ``sys.modules`` are rebound. *Verify*: no module still holds the
original.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import pkgutil
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

#: Calls of each hooked target in this process, by target. Tests read it to prove that the hooked code ran.
call_counts: Counter[str] = Counter()

_installed: dict[str, _Patch] = {}


class HookError(SystemExit):
    """A hook could not be installed as expected; the message names the target and what to do."""


@dataclass(frozen=True)
class Hook:
    """One row of the table in :mod:`sglang_dcp_block.plugin`.

    Attributes:
        target: ``module:name`` or ``module:Class.name`` in the installed SGLang.
        replacement: ``module:name`` in this package. See ``kind`` for how it is called.
        kind: ``replace`` (called instead), ``around`` (called with the original as first argument),
            ``add`` (the target is a list; the replacement is the value to append).
        source: first 16 hex digits of the SHA-256 of the target's source text in the supported SGLang version.
        scope: key of ``plugin.SCOPES``: when the hook is installed.
        why: what goes wrong without it.
        test: the test that fails without it.
    """

    target: str
    replacement: str
    kind: str
    source: str
    scope: str
    why: str
    test: str


@dataclass
class _Patch:
    hook: Hook
    original: Any
    patched: Any


def _resolve(path: str) -> tuple[Any, str, Any]:
    """``module:Class.name`` -> (holder, name, raw attribute, descriptors kept)."""
    module_name, _, attribute = path.partition(":")
    holder: Any = importlib.import_module(module_name)
    *outer, name = attribute.split(".")
    for part in outer:
        holder = getattr(holder, part)
    raw = inspect.getattr_static(holder, name)
    if isinstance(holder, type) and name not in vars(holder):
        raise AttributeError(f"{holder.__name__} inherits {name} instead of defining it")
    return holder, name, raw


def source_hash(obj: Any) -> str:
    """First 16 hex digits of the SHA-256 of a function's source text, or of a list's repr."""
    if isinstance(obj, (staticmethod, classmethod)):
        obj = obj.__func__
    text = repr(obj) if isinstance(obj, list) else inspect.getsource(obj)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(hook: Hook) -> str | None:
    """None when the target is there and unchanged, else one sentence that names it.

    A target this process has patched already is compared through the original that the patch keeps.
    """
    try:
        raw = _installed[hook.target].original if hook.target in _installed else _resolve(hook.target)[2]
    except (ImportError, AttributeError) as error:
        return f"{hook.target} does not exist in the installed SGLang ({error})"
    found = source_hash(raw)
    if found != hook.source:
        return f"{hook.target} has changed (source hash {found}, expected {hook.source})"
    return None


def _wrap(hook: Hook, original: Any) -> Any:
    function = original.__func__ if isinstance(original, (staticmethod, classmethod)) else original
    ours = pkgutil.resolve_name(hook.replacement)
    target, kind = hook.target, hook.kind
    if kind == "replace":

        @functools.wraps(function)
        def patched(*args, **kwargs):
            call_counts[target] += 1
            return ours(*args, **kwargs)

    elif kind == "around":

        @functools.wraps(function)
        def patched(*args, **kwargs):
            call_counts[target] += 1
            return ours(function, *args, **kwargs)

    else:
        raise HookError(f"{target}: unknown hook kind {kind!r}")
    if isinstance(original, (staticmethod, classmethod)):
        return type(original)(patched)
    return patched


def _module_bindings() -> Iterable[tuple[types.ModuleType, str, Any]]:
    for module in list(sys.modules.values()):
        if isinstance(module, types.ModuleType):
            for name, value in list(vars(module).items()):
                yield module, name, value


def install(hooks: Iterable[Hook], advice: str = "install the sglang version this package pins") -> list[str]:
    """Check, patch and verify ``hooks``; hooks that are installed already are left alone.

    Returns:
        The targets patched by this call.

    Raises:
        HookError: a target is missing or changed (nothing has been patched then), or an original survived.
    """
    pending = [h for h in hooks if h.target not in _installed]
    problems = [p for p in map(check, pending) if p]
    if problems:
        raise HookError(f"sglang-dcp-block: {'; '.join(problems)}. Refusing to start: {advice}.")
    replaced: dict[int, Any] = {}
    for hook in pending:
        holder, name, original = _resolve(hook.target)
        if hook.kind == "add":
            patched: Any = original
            if hook.replacement not in original:
                original.append(hook.replacement)
        else:
            patched = _wrap(hook, original)
            setattr(holder, name, patched)
            if isinstance(holder, types.ModuleType):
                replaced[id(original)] = patched
        _installed[hook.target] = _Patch(hook, list(original) if hook.kind == "add" else original, patched)
    if replaced:
        for module, name, value in _module_bindings():
            if id(value) in replaced:
                setattr(module, name, replaced[id(value)])
    verify()
    return [h.target for h in pending]


def _still_called(raw: Any, patched: Any) -> bool:
    """Whether ``raw`` is ``patched`` or a chain of wrappers around it (other plugins may wrap the same target)."""
    unwrap = lambda x: x.__func__ if isinstance(x, (staticmethod, classmethod)) else x  # noqa: E731
    function, ours = unwrap(raw), unwrap(patched)
    while function is not ours:
        if not hasattr(function, "__wrapped__"):
            return False
        function = function.__wrapped__
    return True


def verify() -> None:
    """Check that every installed hook is still in force everywhere.

    Raises:
        HookError: a target was rebound by someone else, or a module imported since still holds an original.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    # A wrapper put on by SGLang's registry keeps a link to what it wraps even if it never calls it.
    replaced_by_others = {t for t, rows in HookRegistry._hooks.items() if any(r[0] == HookType.REPLACE for r in rows)}
    originals: dict[int, str] = {}
    for target, patch in _installed.items():
        holder, name, raw = _resolve(target)
        if patch.hook.kind == "add":
            if patch.hook.replacement not in raw:
                raise HookError(f"sglang-dcp-block: {patch.hook.replacement!r} has vanished from {target}.")
            continue
        if not _still_called(raw, patch.patched) or target.replace(":", ".") in replaced_by_others:
            raise HookError(f"sglang-dcp-block: {target} was replaced by another plugin; load only one of the two.")
        if isinstance(holder, types.ModuleType):
            originals[id(patch.original)] = target
    for module, name, value in _module_bindings():
        if id(value) in originals:
            raise HookError(
                f"sglang-dcp-block: {module.__name__}.{name} still holds the original of {originals[id(value)]}."
            )


def installed() -> dict[str, Hook]:
    """Hooks in force in this process, by target."""
    return {target: patch.hook for target, patch in _installed.items()}


def original(target: str) -> Callable[..., Any]:
    """The function that ``target`` was before it was patched."""
    return _installed[target].original
