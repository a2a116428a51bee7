"""Jobs of a cluster in tests: submitted, watched, and asked how they ended."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.slurm.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240.0
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "DEADLINE"}


def submit(cluster: Cluster, *arguments: object, directory: Path, **variables: object) -> SlurmJob:
    """Submit `sbatch OPTIONS SCRIPT FLAGS` with these variables from megalite's folder; its log goes to `directory`."""
    python = Path(sys.executable).parent
    environment = {
        "PATH": f"{python}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
        **{name: str(value) for name, value in variables.items()},
    }
    clean = ["env", f"--chdir={ROOT}", "--unset=GLOO_SOCKET_IFNAME", *(f"{k}={v}" for k, v in environment.items())]
    number = cluster.ask(*clean, "sbatch", "--parsable", f"--output={directory}/job_%A.log", *map(str, arguments))
    return SlurmJob(cluster, number.strip(), directory / f"job_{number.strip()}.log")


class SlurmJob:
    """A job by its number, or an array of jobs."""

    def __init__(self, cluster: Cluster, number: str, path: Path) -> None:
        self.cluster, self.number, self.path = cluster, number, path

    @property
    def log(self) -> str:
        """Output of the batch script."""
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def fields(self) -> list[dict[str, str]]:
        """Return SLURM's fields of the job, or of each job of an array."""
        found = self.cluster.ask("scontrol", "show", "job", "--oneliner", self.number)
        return [dict(re.findall(r"(\S+?)=(\S*)", line)) for line in found.splitlines()]

    @property
    def state(self) -> str:
        """The job's state."""
        return self.fields()[0]["JobState"]

    @property
    def restarts(self) -> int:
        """Number of times that the job was requeued."""
        return int(self.fields()[0]["Restarts"])

    def wait(self, *, exit_code: int | None = 0, seconds: float = SECONDS) -> None:
        """Return when it has ended, all of it. Asserts its exit code, or those of all jobs of an array."""
        self.until(self.ended, seconds)
        if exit_code is not None:
            assert {job["ExitCode"] for job in self.fields()} == {f"{exit_code}:0"}, self.report()

    def until(self, condition: Callable[[], bool], seconds: float = SECONDS) -> None:
        """Return when the condition holds. Fails, with all that is known, where it does not, or the job ends before."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = self.ended()  # asked first: what it did last is then known to the condition
            assert condition() or not (ended or time.monotonic() > deadline), self.report()
            time.sleep(0.2)

    def ended(self) -> bool:
        """Tell whether the job has ended, or all jobs of an array."""
        return all(job["JobState"] in ENDED for job in self.fields())

    def report(self) -> str:
        """Return all information about a job that is not in the expected state."""
        known = (self.cluster.ask(*command) for command in (("squeue",), ("sinfo", "--Node", "--long")))
        return "\n".join((str(self.fields()), self.log, *known))
