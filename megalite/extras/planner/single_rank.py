"""One rank without the others: what it would hold, and what it does."""

from __future__ import annotations

import json
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.config import RunConfig
from megalite.config.single_rank import SingleRank
from megalite.errors import EXIT_FINISHED, ConfigurationError
from megalite.extras.planner.as_rank import run_as_rank
from megalite.extras.planner.dry_run import dry_run
from megalite.extras.planner.dry_run_report import as_json, report
from megalite.process.output import say


def run_single_rank(single: SingleRank, config: RunConfig) -> int:
    """Run one rank without the others, and print what it holds and does. Returns the exit code."""
    if config.data.preference_data:
        raise ConfigurationError(
            "a rank without the others does not count the reference of --preference-data: try the same flags with "
            "pretrain_gpt.py and --mock-data"
        )
    if single.computes:
        say(*run_as_rank(config, single.world_size, single.rank).lines(), sep="\n")
        return EXIT_FINISHED
    found = dry_run(config, single.world_size, single.rank)
    say(*report(found), sep="\n")
    if config.parallel.device_classes is not None:
        from megalite.extras.planner.device_classes import classes_of

        say(classes_of(config.parallel).of(single.rank).room_line(found.peak_blocks))
    if single.json is not None:
        write_atomically(Path(single.json), json.dumps(as_json(found), indent=1).encode())
    return EXIT_FINISHED
