"""Tests that need an optional library are skipped where it is missing, by its name, and no others."""

from __future__ import annotations

import os
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from megalite.errors import ConfigurationError
from tests.harness.extras import EXTRAS, missing_extra

ROOT = Path(__file__).parents[2]
MISSING = frozenset({"tokenizers", "tree_sitter"})


@pytest.mark.parametrize(
    ("message", "name"),
    [
        ("No module named 'tokenizers'", "tokenizers"),
        ("No module named 'tokenizers.models'", "tokenizers"),
        (
            "[70]\nerror: launch scripts are read by tree-sitter, which needs tree-sitter>=0.25: pip install",
            "tree-sitter",
        ),
        ("which needs tree-sitter-bash>=0.25: pip install 'tree-sitter-bash'", None),
        ("No module named 'tiktoken'", None),
        ("the tokenizers differ", None),
    ],
)
def test_the_missing_library_is_named(message: str, name: str | None) -> None:
    error = ConfigurationError("it failed")
    error.__cause__ = ImportError(message)
    assert missing_extra(error, MISSING) == name


def test_what_is_installed_is_not_missing() -> None:
    assert missing_extra(ImportError("No module named 'numpy'")) is None


def test_the_extras_of_the_project_are_here() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    of_tests = [lines for name, lines in extras.items() if name not in ("test", "s3", "gs", "abfs", "sinks")]
    assert {line.split(">")[0] for lines in of_tests for line in lines} <= set(EXTRAS.values())


@pytest.mark.skipif("CI" not in os.environ, reason="only CI must have all of them")
def test_nothing_is_skipped_in_ci() -> None:
    assert not [name for name in EXTRAS if find_spec(name) is None]
