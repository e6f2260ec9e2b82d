"""The strict installer: a target that is missing, changed, copied or replaced by others stops the process."""

from __future__ import annotations

import sys
import types

import pytest

from sglang_dcp_block import hooks
from sglang_dcp_block.hooks import Hook, HookError

SOURCE = """
def double(x):
    return 2 * x

class Pool:
    def rows(self, n):
        return n
    @classmethod
    def make(cls, n):
        return cls, n
    @staticmethod
    def size(n):
        return n

NAMES = ["a"]
"""


def around_add_one(original, *args):
    return original(*args) + 1


def replaced(*args):
    return "ours"


def around_tuple(original, *args):
    return "ours", *original(*args)


@pytest.fixture
def target(tmp_path, monkeypatch):
    """A module `fake_sglang` with a file (its source is hashed), a second module with a copy, and a clean installer."""
    (tmp_path / "fake_sglang.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(hooks, "_installed", {})
    monkeypatch.setattr(hooks, "call_counts", type(hooks.call_counts)())
    import fake_sglang

    user = types.ModuleType("fake_user")
    user.double = fake_sglang.double
    monkeypatch.setitem(sys.modules, "fake_user", user)
    yield types.SimpleNamespace(module=fake_sglang, user=user)
    sys.modules.pop("fake_sglang", None)


def row(name: str, ours: str = "around_add_one", kind: str = "around", source: str | None = None) -> Hook:
    path = f"fake_sglang:{name}"
    found = hooks.source_hash(hooks._resolve(path)[2]) if source is None else source
    return Hook(path, ours if kind == "add" else f"{__name__}:{ours}", kind, found, "launch", "why", "test")


def test_patches_the_target_and_every_copy_and_counts_calls(target):
    assert hooks.install([row("double")]) == ["fake_sglang:double"]
    assert target.module.double(4) == 9 and target.user.double(4) == 9
    assert hooks.call_counts == {"fake_sglang:double": 2}
    assert hooks.installed().keys() == {"fake_sglang:double"}
    assert hooks.original("fake_sglang:double")(4) == 8
    assert hooks.install([row("double", source="?")]) == [], "an installed hook is left alone"


def test_methods_keep_their_kind(target):
    hooks.install([row("Pool.rows"), row("Pool.make", "around_tuple"), row("Pool.size", "replaced", "replace")])
    pool = target.module.Pool
    assert pool().rows(3) == 4
    assert pool.make(3) == ("ours", pool, 3)
    assert pool.size(3) == pool().size(3) == "ours"


def test_adds_to_a_list_once(target):
    hooks.install([row("NAMES", "triton", "add")])
    assert target.module.NAMES == ["a", "triton"]
    target.module.NAMES.remove("triton")
    with pytest.raises(HookError, match="'triton' has vanished from fake_sglang:NAMES"):
        hooks.verify()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("fake_sglang:tripled", "fake_sglang:tripled does not exist"),
        ("fake_sglang:Pool.columns", "fake_sglang:Pool.columns does not exist"),
        ("fake_missing:double", "fake_missing:double does not exist"),
    ],
)
def test_a_renamed_target_stops_the_process_before_anything_is_patched(target, path, text):
    with pytest.raises(SystemExit, match=text):
        hooks.install([row("double"), Hook(path, f"{__name__}:replaced", "replace", "0", "launch", "why", "test")])
    assert target.module.double(4) == 8, "nothing may be patched when one target is missing"


def test_a_changed_source_stops_the_process(target):
    with pytest.raises(SystemExit, match=r"fake_sglang:double has changed \(source hash [0-9a-f]{16}, expected 0123"):
        hooks.install([row("double", source="0123456789abcdef")])
    assert target.module.double(4) == 8


def test_hook_errors_are_not_exceptions_that_sglang_would_swallow():
    assert not issubclass(HookError, Exception)


def test_a_wrapper_of_another_plugin_is_fine_but_a_replacement_is_not(target):
    from functools import wraps

    hooks.install([row("double")])
    ours = target.module.double

    @wraps(ours)
    def logged(x):
        return ours(x)

    target.module.double = logged
    hooks.verify()
    target.module.double = lambda x: x
    with pytest.raises(HookError, match="fake_sglang:double was replaced by another plugin"):
        hooks.verify()


def test_a_replace_hook_in_sglangs_registry_is_noticed(target, monkeypatch):
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks.install([row("double")])
    monkeypatch.setitem(HookRegistry._hooks, "fake_sglang.double", [(HookType.REPLACE, replaced, None)])
    with pytest.raises(HookError, match="was replaced by another plugin"):
        hooks.verify()


def test_a_copy_of_the_original_made_later_is_noticed(target):
    hooks.install([row("double")])
    target.user.old = hooks.original("fake_sglang:double")
    with pytest.raises(HookError, match=r"fake_user\.old still holds the original of fake_sglang:double"):
        hooks.verify()
