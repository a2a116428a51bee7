"""Check whether nodes are fit for a run, before it begins: prints a verdict, and which nodes to leave out.

    python tools/doctor.py --node
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 8 tools/doctor.py \\
        --config 7b.yaml --save /shared/runs/7b

With --node only this node is checked, within a second or two. Without it, start this program as the run would be
started, on all its ranks: all other flags are pretrain_gpt.py's, and may be omitted to check the nodes without a run.
Exit codes: 0 well, perhaps with warnings; 93 sick; 64 flags, files or data are wrong. docs/operations.md lists the
checks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from megalite.atomic_files import write_atomically
from megalite.config.command_line import split_flags
from megalite.config.parse import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.tool_arguments import parse_tool_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError, MegaliteError
from megalite.extras.doctor.findings import SMALLEST, Options, Verdict
from megalite.extras.doctor.node import examine_node
from megalite.lifecycle.failure import run_main
from megalite.process.host import host_name
from megalite.process.output import say
from megalite.process.place import place_from_environment


def main() -> int:
    """Check this node, or all nodes together with the other ranks."""
    own, others = split_flags(Options, sys.argv[1:])
    options = parse_tool_arguments(Options, description=__doc__ or "", argv=own)
    check(options, others)
    if options.node:
        return look_at_node(options)
    place = place_from_environment()
    config, problem = read_run(others, place.world_size)

    from megalite.extras.doctor.examination import examine

    return examine(options, config, problem, place)


def check(options: Options, others: Sequence[str]) -> None:
    """Raise ConfigurationError for flags with invalid values, or that contradict each other."""
    if options.node and others:
        raise ConfigurationError(f"--node checks a node without a run: leave {others[0]} out")
    if 0 < options.max_bytes < SMALLEST:
        raise ConfigurationError(f"--max-bytes {options.max_bytes}: must be at least {SMALLEST}, or 0 to time none")


def look_at_node(options: Options) -> int:
    """Print one line on the state of this node, to standard error if the node is not healthy.

    Returns:
        The exit code.
    """
    gpus = options.gpus
    if gpus is None and os.environ.get("SLURM_GPUS_ON_NODE", "").isdigit():
        gpus = int(os.environ["SLURM_GPUS_ON_NODE"])
    state, findings = examine_node(gpus)
    name, verdict = host_name(), Verdict(findings)
    line = "; ".join(f"{each.severity}: {each.text}" for each in verdict.findings) or "well"
    say(f"node {name}: {line}", to_error=bool(verdict.exit_code))
    if options.json is not None:
        found = {"exit_code": verdict.exit_code, "node": name, "findings": [asdict(each) for each in findings]}
        write_atomically(Path(options.json), (json.dumps(found | asdict(state), indent=2) + "\n").encode())
    return verdict.exit_code


def read_run(flags: Sequence[str], world_size: int) -> tuple[RunConfig | None, str]:
    """Return the run's configuration and an empty text; or None, with the reason if the run's flags are wrong."""
    if not flags:
        return None, ""
    from megalite.training.resume import saved_fields

    try:
        return resolve(parse_arguments(flags, saved_fields).config, world_size), ""
    except MegaliteError as error:
        return None, str(error)


command = partial(run_main, main)
