"""Cases of detectors that must see the program run: it runs once more under them, on the same ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from museum.cases import run_program
from museum.entries import Entry


def make_instrumented_case(
    entry: Entry, folder: Path, *, wrong: bool, module: str, interpreter: str = sys.executable
) -> None:
    """Make a case as `make_case`, with the `instrument` of a module around the steps of each rank.

    Of other programs than the plain trainer, the case has case.json alone.
    """
    if entry.program != "plain":
        folder.mkdir(parents=True)
        (folder / "case.json").write_text(json.dumps({"program": entry.program}))
        return
    command = [interpreter, "-m", "museum.cases", entry.name, str(folder), *([] if wrong else ["--right"])]
    run_program(command, MUSEUM_INSTRUMENT=module)


def is_plain(case: Path) -> bool:
    program: str = json.loads((case / "case.json").read_text())["program"]
    return program == "plain"


def other_interpreter(variable: str, packages: str) -> str:
    """Return the Python that an environment variable names.

    Raises:
        FileNotFoundError: it does not say it.
    """
    found = os.environ.get(variable)
    if not found or not Path(found).exists():
        raise FileNotFoundError(
            f"{variable} should be a Python with: pip install torch safetensors numpy {packages}; now it is {found}"
        )
    return found
