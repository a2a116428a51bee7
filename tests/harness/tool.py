"""Commands of megalite run inside the test's process, because starting a new one would take seconds."""

from __future__ import annotations

import importlib
import io
import sys
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.errors import MegaliteError
from megalite.process.output import say

_PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


@dataclass(frozen=True)
class Ended:
    code: int
    stdout: str
    stderr: str


def run_tool(name: str, *arguments: object) -> Ended:
    """Run `main` of a command as `megalite-NAME` does, except for signals."""
    place, _, _ = _PROJECT["scripts"][f"megalite-{name.replace('_', '-')}"].partition(":")
    code, out, err = 0, io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        main = importlib.import_module(place).main
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            main()
        except MegaliteError as error:
            code = error.exit_code
            say(f"error: {error}", to_error=True)
        except SystemExit as ending:
            code = int(ending.code or 0)
    return Ended(code, out.getvalue(), err.getvalue())
