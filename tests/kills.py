"""Kills ranks of small runs at random moments, saves included, and holds what remains to the runs' promises.

    python -m tests.kills [--count 200] [--seed 0] [--torchrun 5]

After each kill (SIGKILL of one rank) the others must end, resumable, by themselves, and name who is gone; the
next start goes on. In the end each run must be, to the bit, the run that was not disturbed. Printed are the seconds
from a kill to the end of the last process: of the ranks alone, and beside them, under torchrun, of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.watchdog import RANKS, TorchRun
from tests.end_to_end import campaign
from tests.end_to_end.campaign import LAYOUTS, Campaign, everything_said
from tests.harness.fork_server import wait_for_exit

KILLS_OF_A_RUN = 20


def kill_at_random(run: Campaign, generator: random.Random) -> float | None:
    """Start, kill a rank, and assert that the others end as they must. Returns the seconds that this takes them; None
    where the kill came too late."""
    victim, saving, before = generator.randrange(campaign.RANKS), generator.random() < 0.5, run.latest
    with run.start(steps=3, step_seconds=0.1) as job:
        job.wait_for_output(0, "  start  ")
        deadline = time.monotonic() + 2.0 * generator.random()
        while time.monotonic() < deadline and not (saving and list(run.directory.glob("iter_*.tmp"))):
            time.sleep(0.001)
        job.kill(victim)
        began = time.monotonic()
        left = wait_for_exit(job.ranks, 60.0)
        seconds = time.monotonic() - began
        codes, said = [rank.exit_code for rank in job.ranks], "".join(everything_said(job))
        if codes[victim] != -signal.SIGKILL or "stopped after" in job.stdout(0):
            return None
        named = f"rank {victim} (process {job.ranks[victim].process.pid} " in said
        if left or not named or run.latest < before or {*codes[:victim], *codes[victim + 1 :]} != {85}:
            raise SystemExit(f"rank {victim} was killed, in {job.directory}: {codes}\n{said}")
    return seconds


def under_torchrun(folder: Path) -> tuple[float, float]:
    """The seconds from a kill until no rank is left, and from then until torchrun has ended."""
    folder.mkdir()
    run = TorchRun(folder)
    run.wait_for("step +3/")
    processes = [run.rank(number) for number in range(RANKS)]
    os.kill(processes[2], signal.SIGKILL)
    began = time.monotonic()
    while any(Path(f"/proc/{process}/exe").exists() for process in processes):  # which a dead process has not
        time.sleep(0.005)
    gone = time.monotonic()
    run.process.wait()
    return gone - began, time.monotonic() - gone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--torchrun", type=int, default=5, help="kills of a run under torchrun")
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        number = 0
        while len(seconds) < arguments.count:
            layout = tuple(LAYOUTS)[number % len(LAYOUTS)]
            run = Campaign(Path(name) / f"run{number}", layout)
            number += 1
            for _ in range(KILLS_OF_A_RUN):
                if len(seconds) < arguments.count and run.latest < campaign.STEPS - 6:
                    taken = kill_at_random(run, generator)
                    seconds += [] if taken is None else [taken]
            run.assert_unbroken()
            print(
                f"{len(seconds)} kills; run {number}, {layout}, is the undisturbed one after {run.latest} steps",
                flush=True,
            )
        low, median, high = (f"{quartile:.2f}" for quartile in statistics.quantiles(seconds, n=4))
        print(f"ranks alone, from a kill to the last end: {median} s [{low}, {high}], at most {max(seconds):.2f}")
        trials = [under_torchrun(Path(name) / f"torchrun{trial}") for trial in range(arguments.torchrun)]
    if trials:
        ranks, own = (statistics.median(part) for part in zip(*trials, strict=True))
        print(f"under torchrun: {ranks:.2f} s, and {own:.2f} s more of its own")


if __name__ == "__main__":
    sys.exit(main())
