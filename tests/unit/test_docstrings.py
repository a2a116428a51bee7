"""Docstrings: their first word is a verb or a noun, and long functions have one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PLACES = (
    "megalite",
    "kernels",
    "megalite_trace.py",
    "tools",
    "finetune_gpt.py",
    "pretrain_gpt.py",
    "pretrain_hybrid.py",
    "pretrain_mamba.py",
    "tests",
    "benchmarks",
)
RIDDLE = re.compile(
    r'^\s*[rR]?"""(What|Of|Whether|Where|How|That|Which|The one that|As|Like|By|For|From|Is|And|Not|None'
    r"|Those|Within|Under|When|Why|Raises|With)\b.*",
    re.MULTILINE,
)
LONG = 12
"""Lines from which on a name and a signature do not say enough. A constructor's arguments stand in its class."""


def files_of(place: str) -> list[Path]:
    return sorted((ROOT / place).rglob("*.py")) or [ROOT / place]


def riddles(path: Path) -> Iterator[str]:
    for riddle in RIDDLE.finditer(path.read_text()):
        yield f"{path.relative_to(ROOT)}: {riddle.group().strip()}"


def outer_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield functions and methods, without those within others, which are parts of them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.stmt | ast.excepthandler):
            yield from outer_functions(node)


def undocumented(path: Path) -> Iterator[str]:
    for node in outer_functions(ast.parse(path.read_text())):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if node.name != "__init__" and lines >= LONG and not ast.get_docstring(node):
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {lines} lines and no docstring"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    found = [riddle for place in PLACES for path in files_of(place) for riddle in riddles(path)]
    assert not found, "\n".join(found)


def test_long_functions_have_a_docstring() -> None:
    places = "megalite", "kernels/megalite_kernels", "megalite_trace.py"
    paths = [path for place in places for path in files_of(place)]
    found = [function for path in paths for function in undocumented(path)]
    assert not found, "\n".join(found)
