"""Find out why a run hung, from the files of its ranks: who held it up, in which collective, and where each rank was.

    python tools/hang_report.py run/small-llama/hangs/20260314T021500
    python tools/hang_report.py run/small-llama/hangs/20260314T021500 --json

The folder has a file of each rank that could still write one, and perhaps files of NCCL's own watchdog.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megalite.config.tool_arguments import POSITIONAL, parse_tool_arguments
from megalite.lifecycle.failure import run_tool
from megalite.process.output import say


@dataclass(frozen=True)
class Arguments:
    """The flags."""

    folder: str = field(metadata=POSITIONAL)
    """The folder with the files of the ranks."""
    json: bool = False
    """Print one JSON object."""


def main() -> None:
    """Parse the flags, read the files, and print the report."""
    arguments = parse_tool_arguments(Arguments, description=__doc__ or "")
    from megalite.watchdog.hang_dump import read_dumps
    from megalite.watchdog.hang_report import hang_report

    report = hang_report(read_dumps(Path(arguments.folder)))
    say(json.dumps(report.as_json(), indent=1) if arguments.json else report.as_text(), exact=arguments.json)


command = partial(run_tool, main)
