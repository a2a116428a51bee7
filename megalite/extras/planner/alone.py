"""One rank without the others: what it would hold, and what it does."""

from __future__ import annotations

import json
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.config import RunConfig
from megalite.config.single_rank import SingleRank
from megalite.errors import EXIT_FINISHED
from megalite.extras.planner.as_rank import run_as_rank
from megalite.extras.planner.dry_run import dry_run
from megalite.extras.planner.dry_run_report import as_json, report
from megalite.process.output import say


def run_alone(alone: SingleRank, config: RunConfig) -> int:
    """Run one rank without the others, and print what it holds and does. Returns the exit code."""
    if alone.computes:
        say(*run_as_rank(config, alone.world_size, alone.rank).lines(), sep="\n")
        return EXIT_FINISHED
    found = dry_run(config, alone.world_size, alone.rank)
    say(*report(found), sep="\n")
    if alone.json is not None:
        write_atomically(Path(alone.json), json.dumps(as_json(found), indent=1).encode())
    return EXIT_FINISHED
