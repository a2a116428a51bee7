"""Faults and who loses what: megalite, and two plain trainings, each with the same faults, as a table for a page.

    python -m benchmarks.chaos_table [--torchft PYTHON] [--write]

Two ranks on this machine, twelve steps, a checkpoint every three. `dcp` is torch.distributed.checkpoint under torchrun,
`replicas` is torchft (both in `benchmarks/recovery_baselines/`); the latter needs an interpreter that has torchft.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.recovery import ROOT
from benchmarks.results import write_results
from megalite.extras.chaos.faults import Fault
from megalite.extras.chaos.plan import SITES, Sites, read_sites
from megalite.extras.chaos.trial import RUN, Limits, Running, Trial
from megalite.extras.chaos.verdict import Verdict, judge

LIMITS = Limits(90.0)
FLAGS = shlex.split(
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 60 --num-layers 2 --hidden-size 16 --num-attention-heads 4"
    " --seq-length 16 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --eval-iters 0 "
    "--log-interval 1 --train-iters 12 --save-interval 3 --use-distributed-optimizer --lr-decay-style constant "
    "--watchdog-min-seconds 10"
)
FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "kill in a forward": (Fault("kill", 1, "forward", 8),),
    "kill while a checkpoint is written": (Fault("kill", 0, "save.write", 2),),
    "kill between the files and the commit": (Fault("kill", 0, "save.commit", 2),),
    "kill, and kill again while it loads": (Fault("kill", 1, "forward", 8), Fault("kill", 0, "loading", 1, after=0)),
    "exception in a step": (Fault("exception", 1, "optimizer", 8),),
    "stop (SIGSTOP)": (Fault("stop", 1, "forward", 8),),
    "bit flipped in the newest checkpoint": (Fault("bit-in-file", 0, "forward", 8, seed=7),),
    "power loss in a save, syncs lied": (Fault("lying-fsync", 0, "save.begin", 2, seconds=0.3),),
    "disk full for two seconds": (Fault("full-disk", 1, "save.begin", 2, seconds=2.0),),
    "bit flipped in a weight in memory": (Fault("bit-in-memory", 0, "forward", 8, seed=1),),
}
"""Faults of each row. Sites have the same names in all three programs, and each has one forward a step and rank."""


@dataclass(frozen=True)
class System:
    """Program that is disturbed."""

    sites: Sites
    command: list[str]


def systems(torchft: str | None) -> dict[str, System]:
    """Return the programs by their column. `torchft`: an interpreter that has it."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=5"]
    folder = ROOT / "benchmarks" / "recovery_baselines"
    baseline = ["-m", "benchmarks.recovery_baselines"]
    rest = ["--directory", RUN, "--step-seconds", "0.1"]
    found = {
        "megalite": System(
            read_sites(SITES), [*torchrun, "pretrain_gpt.py", *FLAGS, "--save", RUN, "--resume", "auto"]
        ),
        "dcp": System(read_sites(folder / "dcp.toml"), [*torchrun, *baseline, "dcp", *rest]),
    }
    if torchft is not None:
        # Long enough for a replica to come back while another trains.
        command = [torchft, *baseline, "replicas", *rest, "--steps", "200"]
        found["replicas"] = System(read_sites(folder / "replicas.toml"), command)
    return found


def lost(verdict: Verdict) -> str:
    """Return what a run has lost, for a cell of the table."""
    if verdict.hung:
        return "**hangs**"
    if not all(fault["occurred"] for fault in verdict.faults):
        return "(the fault did not occur)"
    if not verdict.finished:
        return "**does not finish**"
    found = [
        *(["other weights"] if not verdict.same_weights else []),
        *(["steps twice or missing in the log"] if not verdict.every_step_once else []),
        *(["other losses"] if not verdict.same_records and verdict.every_step_once else []),
        *(["processes left"] if verdict.processes_left else []),
        *(["shared memory left"] if verdict.memory_left else []),
    ]
    seconds = [fault["recovery"] for fault in verdict.faults if fault["recovery"] is not None]
    rest = f"{verdict.repeated} steps again, {sum(seconds):.1f} s"
    return f"{', '.join(found) or 'nothing'} ({rest})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--torchft", help="interpreter that has torchft")
    parser.add_argument("--rows", nargs="+", default=list(FAULTS), choices=list(FAULTS))
    parser.add_argument("--systems", nargs="+", default=["megalite", "dcp", "replicas"])
    parser.add_argument("--write", action="store_true", help="leave the table in benchmarks/results")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    programs = {name: each for name, each in systems(arguments.torchft).items() if name in arguments.systems}
    cells: dict[str, dict[str, str]] = {row: {} for row in arguments.rows}
    with tempfile.TemporaryDirectory() as name:
        for column, system in programs.items():

            def run(row: str, faults: tuple[Fault, ...], system: System = system, column: str = column) -> Trial:
                folder = Path(name) / f"{column} {row}".replace(" ", "_")
                return Running(system.command, folder, faults, system.sites, LIMITS, cut=False).run_to_its_end()

            undisturbed = run("undisturbed", ())
            if undisturbed.codes != [0]:
                raise SystemExit(f"{column}: {(undisturbed.folder / 'start0.log').read_text()[-2000:]}")
            for row in arguments.rows:
                faults = FAULTS[row]
                if any(fault.site not in system.sites.sites for fault in faults):
                    cells[row][column] = "has no such moment"
                else:
                    cells[row][column] = lost(judge(run(row, faults), undisturbed, system.sites.results))
                print(f"{column:<10}{row:<40}{cells[row][column]}", flush=True)
    print("\n".join(["", *table(cells, list(programs))]))
    if arguments.write:
        found: dict[str, Any] = {"date": f"{datetime.date.today()}", "load": os.getloadavg()[0], "cells": cells}
        if arguments.torchft is not None:
            asked = "import importlib.metadata as m; print(m.version('torchft'))"
            found["torchft"] = subprocess.run(
                [arguments.torchft, "-c", asked], capture_output=True, text=True
            ).stdout.strip()
        print(write_results("chaos_table", found))


def table(cells: Mapping[str, Mapping[str, str]], columns: list[str]) -> list[str]:
    """Return the table as Markdown."""
    names = {"megalite": "megalite", "dcp": "torch.distributed.checkpoint", "replicas": "torchft"}
    head = ["fault", *(names[column] for column in columns)]
    rows = [head, ["---"] * len(head), *([row, *(cells[row][c] for c in columns)] for row in cells)]
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    main()
