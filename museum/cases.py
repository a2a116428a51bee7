"""Cases for detectors: what a run leaves, and beside it what another layout of the same model leaves.

    python -m museum.cases NAME FOLDER [--right]

A case is a folder with run/ and reference/, each with command.txt (in Megatron-LM's flags), checkpoint/, trace/, and,
if the program writes them, metrics.jsonl and checkpoint_next/. A detector is not told which runs are right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from museum.entries import FOLDER, Entry, read_entry
from museum.plain.settings import Settings
from museum.trainer import run

ROOT = Path(__file__).resolve().parents[1]
_LAYOUT = ("tp", "sp", "cp", "dp", "ep", "pp", "zero", "average")


class MissingProgram(Exception):
    """A program that is not installed on this machine, and how to install it."""


def make_case(entry: Entry, folder: Path, *, wrong: bool) -> None:
    """Run the program of an entry, wrong or right, and its reference, into a folder that is not there.

    Raises:
        MissingProgram: the program is not on this machine.
    """
    folder.mkdir(parents=True)
    bug = entry.bug
    (folder / "case.json").write_text(json.dumps({"program": entry.program, "steps": bug.get("STEPS", 1)}))
    if entry.program == "plain":
        settings: dict[str, Any] = {"steps": 1, "whole": True, **bug["SETTINGS"]}
        patches = bug.get("PATCHES", {}) if wrong else {}
        settings_of_run = settings if wrong else settings | bug.get("RIGHT", {})
        run(Settings(**settings_of_run), folder / "run", patches)
        run(Settings(**bug.get("REFERENCE") or _alone(settings)), folder / "reference")
        return
    module = {"megatron-core": "museum.megatron", "megalite": "museum.own"}[entry.program]
    python = interpreter() if entry.program == "megatron-core" else sys.executable
    command = [python, "-m", module, str(FOLDER / entry.name / "bug.py"), str(folder), *([] if wrong else ["--right"])]
    run_program(command)


def run_program(command: Sequence[str], **environment: str) -> None:
    """Run a command in the project's folder, with more variables. Raises RuntimeError with its output if it fails."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    found = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    if found.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{found.stdout[-2000:]}\n{found.stderr[-4000:]}")


def _alone(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the same model on one rank."""
    return {name: value for name, value in settings.items() if name not in _LAYOUT}


def interpreter() -> str:
    """Return the Python that has megatron-core.

    Raises:
        MissingProgram: there is none.
    """
    from tests.environments import ENVIRONMENTS

    environment = next(each for each in ENVIRONMENTS if each.name == "megatron")
    if not environment.is_complete:
        raise MissingProgram("megatron-core 0.19.2 is not here: make oracles NAMES=megatron installs it and its Python")
    return str(environment.interpreter)


def main() -> None:
    """Make the case that is asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("name", help="of the entry")
    parser.add_argument("folder", type=Path, help="for the case; it must not be there")
    parser.add_argument("--right", action="store_true", help="run the program as it should be")
    given = parser.parse_args()
    make_case(read_entry(FOLDER / given.name), given.folder, wrong=not given.right)


if __name__ == "__main__":
    main()
