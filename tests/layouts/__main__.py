"""Judge steps of several programs on drawn networks and layouts, all of which should be right.

    python -m tests.layouts --count 8 --seed 1
    python -m tests.layouts --seed 1 --draw 5 --program megatron
    python -m tests.layouts --program torchtitan --python titan/bin/python

What is accused or fails is kept below --keep, with its files, its verdict and the command that runs it again.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.layouts.campaign import Outcome, as_lines, attempt, from_lines, table
from tests.layouts.draws import PROGRAMS, draw
from tests.layouts.programs import MissingProgram, Programs, interpreter

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Run the draws of each program; returns 1 if one is accused of what is not known or fails, or if none has run."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="draws of each program")
    parser.add_argument("--seed", default=str(time.time_ns()), help="what draws are made from; by default the time")
    parser.add_argument("--draw", type=int, nargs="+", help="these draws alone, by their numbers")
    parser.add_argument("--program", nargs="+", default=PROGRAMS, choices=PROGRAMS, help="some programs, not all")
    parser.add_argument("--python", type=Path, help="an interpreter that has torchtitan")
    parser.add_argument("--keep", type=Path, default=ROOT / "run" / "layouts", help="where findings are kept")
    parser.add_argument("--json", type=Path, help="a file for all outcomes, one a line")
    parser.add_argument("--report", action="store_true", help="end with 0 whatever is found")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tensors this small gain nothing from a second one, which spins
    numbers = arguments.draw or range(arguments.count)
    print(f"seed {arguments.seed}, {len(numbers)} draws of {', '.join(arguments.program)}", flush=True)
    outcomes: list[Outcome] = []
    missing: list[str] = []
    for program in arguments.program:
        try:
            python = interpreter(program, arguments.python)
        except MissingProgram as error:
            missing.append(f"NOT RUN: {program}: {error}")
            continue
        if python == Path(sys.executable):
            outcomes += of_program(program, arguments)
        else:
            outcomes += in_another(python, program)
    print("\n".join(["", table(outcomes), *missing]), flush=True)
    if arguments.json:
        arguments.json.write_text(as_lines(outcomes))
    bad = not outcomes or any(each.found in ("accused", "failed") for each in outcomes)
    return 1 if bad and not arguments.report else 0


def of_program(program: str, arguments: argparse.Namespace) -> Iterator[Outcome]:
    """Yield the outcomes of a program's draws, and print each."""
    programs = Programs(torchtitan=arguments.python)
    try:
        for number in arguments.draw or range(arguments.count):
            outcome = attempt(draw(program, arguments.seed, number), programs, arguments.keep)
            print(outcome.shown, flush=True)
            yield outcome
    finally:
        programs.pools.close()


def in_another(python: Path, program: str) -> list[Outcome]:
    """Return the outcomes of a program's draws in another Python, with the arguments of this one."""
    with tempfile.TemporaryDirectory() as folder:
        found, said = Path(folder) / "outcomes.json", Path(folder) / "stderr.txt"
        more = ["--report", "--program", program, "--json", str(found)]
        with said.open("w") as stderr:  # many lines of each rank
            code = subprocess.call([python, "-m", "tests.layouts", *sys.argv[1:], *more], cwd=ROOT, stderr=stderr)
        if code:
            sys.exit(f"layouts: {program} ended with {code}:\n{said.read_text()[-3000:]}")
        return from_lines(found.read_text())


if __name__ == "__main__":
    sys.exit(main())
