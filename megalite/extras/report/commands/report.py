"""Show runs as one page: curves, figures, what happened, and the configuration.

    python tools/report.py run/small-llama
    python tools/report.py run/7b run/7b-lr2 --output compare.html
    python tools/report.py s3://bucket/run/7b --json > report.json

A run is its directory or a metrics file. The page is one file without scripts that loads nothing; several runs are laid
over each other. It is written into the directory of the first run, as report.html, unless --output names a file.
Exit codes: 0, or 64 if there is no such run.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from megalite.atomic_files import require_output
from megalite.config.tool_arguments import POSITIONAL, parse_tool_arguments
from megalite.errors import ConfigurationError
from megalite.extras.report.figures import counted, figures
from megalite.extras.report.page import document, page
from megalite.extras.report.recorded import read_run
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say
from megalite.storage import AnyPath, open_directory, write_atomically

MOST_RUNS = 16


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    runs: tuple[str, ...] = field(metadata=POSITIONAL)
    """Run directories or metrics files."""
    output: str | None = None
    """File of the page; unset: report.html in the directory of the first run."""
    json: bool = False
    """Print every number of the page as JSON instead."""


def main() -> None:
    """Read the runs, and write their page or print its numbers."""
    arguments = parse_tool_arguments(Arguments, __doc__ or "")
    if len(arguments.runs) > MOST_RUNS:
        raise ConfigurationError(f"{len(arguments.runs)} runs: at most {MOST_RUNS} can be told apart in one page")
    output = _output(arguments)
    runs = [read_run(place) for place in arguments.runs]
    names = [run.name for run in runs]
    runs = [run if names.count(run.name) == 1 else replace(run, name=run.place) for run in runs]
    if arguments.json:
        say(json.dumps(strict(document(runs))), exact=True)
        return
    write_atomically(output, page(runs).encode())
    for run in runs:
        say(f"{run.name}: {figures(run)['state']}, {counted(len(run.steps), 'step')}", *run.problems, sep="\n  ")
    say(f"the page is {output}")


def _output(arguments: Arguments) -> AnyPath:
    """Return the file of the page."""
    if arguments.output is not None:
        require_output("--output", arguments.output)
        return Path(arguments.output)
    first = open_directory(arguments.runs[0])
    return (first.parent if first.is_file() else first) / "report.html"


def strict(value: Any) -> Any:
    """Return a value as strict JSON has it: numbers that are not finite are texts, as in metrics.jsonl."""
    if isinstance(value, float):
        return value if math.isfinite(value) else json.dumps(value)
    if isinstance(value, dict):
        return {str(key): strict(each) for key, each in value.items()}
    return [strict(each) for each in value] if isinstance(value, list | tuple) else value


command = partial(run_tool, main)
