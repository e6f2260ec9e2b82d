"""Only sglang_dcp_block/dcp may spell the rule: a second copy is how layouts come to disagree."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
THE_RULE = ROOT / "python" / "sglang_dcp_block" / "dcp"
SCANNED = [ROOT / "python", ROOT / "benchmark", ROOT / "scripts"]

# What P, B and P * B are called, as a whole name or as its end: self.dcp_size, args.dcp_block_size, attn_dcp_size.
_NAMES = re.compile(
    r"(^|_)(dcp_(world_)?size|dcp_ranks|(dcp_)?block_size|cycle(_size)?|world_size|P|B)$", re.IGNORECASE
)
# Sizes divide sizes in checks ("--dcp-size must divide --tp-size"); the rule divides positions, slots and rows.
_DIVIDED_SIZES = re.compile(r"(^|_)(page_size|tp_size|heads)$")
_CALLS = {"divmod", "mod", "fmod", "remainder", "floor_divide", "div", "cdiv"}


def _names_a_size(node: ast.AST) -> bool:
    for child in ast.walk(node):
        name = child.id if isinstance(child, ast.Name) else child.attr if isinstance(child, ast.Attribute) else ""
        if _NAMES.search(name):
            return True
    return False


def _is_a_size(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        node = node.func
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return bool(_DIVIDED_SIZES.search(name))


def spellings(source: str) -> list[int]:
    """Lines that divide by, take the remainder of, or step by something called like P, B or P * B."""
    found = []
    for node in ast.walk(ast.parse(source)):
        divisors: list[ast.AST | None] = []
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            dividend = node.left if isinstance(node, ast.BinOp) else node.target
            if isinstance(dividend, (ast.Constant, ast.JoinedStr)) or _is_a_size(dividend):
                continue  # "%d" % x formats a string
            divisors = [node.right if isinstance(node, ast.BinOp) else node.value]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _CALLS:
                divisors = [*node.args, *(k.value for k in node.keywords)]
        elif isinstance(node, ast.Slice):
            divisors = [node.step]
        if any(d is not None and _names_a_size(d) for d in divisors):
            found.append(node.lineno)
    return sorted(found)


def scanned_files() -> list[Path]:
    files = [f for folder in SCANNED for f in sorted(folder.rglob("*.py"))]
    return [f for f in files if THE_RULE not in f.parents]


def test_no_second_copy_of_the_rule():
    second = [f"{f.relative_to(ROOT)}:{line}" for f in scanned_files() for line in spellings(f.read_text())]
    assert not second, f"ask sglang_dcp_block.dcp.layout.DcpLayout instead: {', '.join(second)}"


def test_the_rule_itself_is_found():
    """Control: the scanner sees the one place that spells the rule, and the folders it scans are not empty."""
    assert spellings((THE_RULE / "layout.py").read_text()) and spellings((THE_RULE / "kernels.py").read_text())
    assert ROOT / "python" / "sglang_dcp_block" / "mem_cache" / "kv_write.py" in scanned_files()


@pytest.mark.parametrize(
    "planted",
    [
        "owner = t % dcp_size",
        "row = t // self.dcp_size",
        "owner = (t // B) % P",
        "row = t // (P * B)",
        "owner = slot % layout.dcp_size",
        "owner = slot // args.dcp_block_size",
        "owner = loc % world_size",
        "x %= parallel.attn_dcp_size",
        "row, rest = divmod(t, dcp_size)",
        "owner = torch.remainder(t, layout.cycle)",
        "row = torch.div(t, dcp_world_size, rounding_mode='floor')",
        "mine = indices[rank::dcp_size]",
        "first_rank = page_sizes_sum % dcp_size == 0",
        "@triton.jit\ndef kernel(t, DCP_SIZE):\n    return t % DCP_SIZE",
    ],
)
def test_a_planted_copy_is_found(planted):
    assert spellings(planted)


@pytest.mark.parametrize(
    "harmless",
    [
        "'%d of %d' % (rank, dcp_size)",
        "pages = n // page_size",
        "total = rows * dcp_size",
        "ranks = range(dcp_size)",
        "fits = args.tp_size % args.dcp_size == 0",
        "fits = num_heads(config) % dcp_size == 0",
    ],
)
def test_other_arithmetic_is_left_alone(harmless):
    assert not spellings(harmless)
