"""Starts of other programs: all of them in this file, so that none runs a file of the current folder by accident."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SAFE_PATH = "PYTHONSAFEPATH"
NOTHING = subprocess.DEVNULL
"""Standard input of a program that is to read nothing, for `start`."""


def python(*arguments: str | Path) -> list[str]:
    """Return the command of this interpreter with arguments.

    For `-c` and `-m`, Python looks for modules first in the current folder, where a stranger's `json.py` may lie beside
    a stranger's script; -P leaves it out. A program given by its path finds what lies beside it, as always.
    """
    options = ["-P"] if str(arguments[0]) in ("-c", "-m") else []
    return [sys.executable, *options, *map(str, arguments)]


def command_of(module: str, function: str, *arguments: str) -> list[str]:
    """Return the command of a function of megalite, found where this process has megalite, installed or not."""
    code = (
        f"import sys; root = {str(Path(__file__).parents[2])!r}; root in sys.path or sys.path.insert(0, root); "
        f"from {module} import {function}; {function}()"
    )
    return python("-c", code, *arguments)


def pretrain(*flags: str) -> list[str]:
    """Return the command of megalite-pretrain."""
    return command_of("megalite.commands.pretrain", "command", *flags)


def run(command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run a command without a shell, and return how it ended, whatever its exit code."""
    return subprocess.run(command, **options, check=False)


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command without a shell."""
    return subprocess.Popen(command, **options)


@contextmanager
def safe_path() -> Iterator[None]:
    """Let interpreters that a library starts meanwhile find no modules in the current folder, either."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before
