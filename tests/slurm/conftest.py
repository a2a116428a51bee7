"""Fixtures of the tests on a real SLURM, and what they all train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ended, latest_iteration, metrics
from tests.harness.job import Job
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SlurmJob, submit
from tests.slurm.machine import ClusterError, require_programs

STEPS = 60
FLAGS = (*MOCK, *GPT2, "--train-iters", STEPS, "--save-interval", 5, "--tp", 2, "--distributed-timeout-minutes", 1)
PROGRAM = "tests/slurm/paced.py"


class Training:
    """A training on the cluster, in a folder of its own, and how it must end."""

    def __init__(self, cluster: Cluster, directory: Path, undisturbed: Callable[[int], Path]) -> None:
        self.cluster, self.directory, self.undisturbed = cluster, directory, undisturbed
        self.run = directory / "a run"
        self.hold = directory / "hold"
        self.hold.touch()

    def submit(self, *options: object, flags: tuple[object, ...] = (), **variables: object) -> SlurmJob:
        """Submit it, on two nodes with a rank each, and slow as long as `hold` is there."""
        settings = {
            "RUN": self.run,
            "HOLD": self.hold,
            "PROGRAM": PROGRAM,
            "RANKS_PER_NODE": 1,
            "RETRY_SECONDS": 1,
        } | variables
        arguments = ("--nodes=2", *options, "slurm/pretrain_gpt.sbatch", *FLAGS, *flags)
        return submit(self.cluster, *arguments, directory=self.directory, **settings)

    def submit_instead(self, program: str, *options: object, **variables: object) -> SlurmJob:
        """Submit another program, which starts at once: its text. It has `code`, a file, to write its exit code to."""
        path = self.directory / "program.py"
        path.write_text(f"import os, pathlib\ncode = pathlib.Path(os.environ['MEGALITE_EXIT_FILE'])\n{dedent(program)}")
        return self.submit(*options, PROGRAM=path, **({"LAUNCHER": "srun"} | variables))

    def wait_for_checkpoint(self, job: SlurmJob) -> None:
        """Return when the first one is there."""
        job.until(lambda: self.newest_checkpoint() > 0)

    def newest_checkpoint(self) -> int:
        """The step that it was written after; 0 where there is none."""
        tracker = self.run / "latest_checkpointed_iteration.txt"
        return latest_iteration(self.run) if tracker.exists() else 0

    def logs(self, job: SlurmJob) -> dict[str, str]:
        """Return the output of the program on each node."""
        return {path.stem: path.read_text() for path in (self.run / "slurm" / job.number).glob("*.log")}

    def assert_whole(self, ranks: int = 2) -> None:
        """Asserts that the run came to its end, by the same losses, bit for bit, as one that nothing disturbed."""
        assert (self.run / "DONE").read_text() == f"{STEPS}\n"
        assert latest_iteration(self.run) == STEPS
        assert metrics(self.run) == metrics(self.undisturbed(ranks))

    def assert_goes_on(self) -> None:
        """Asserts that the same, submitted again, comes to that end."""
        self.hold.unlink()
        self.submit(LAUNCHER="srun").wait()
        self.assert_whole()


STOPS_BY_FILE = """
    import time
    run = code.parents[2]
    (run / "started").touch()
    while not (run / "STOP").exists():
        time.sleep(0.1)
    time.sleep(3)
    code.write_text("85")
"""
"""Program for `submit_instead` that stops correctly on request, but slowly."""


@pytest.fixture(scope="session")
def worker() -> int:
    """Return the number of this process among those that share the tests; each has its own cluster. The variable
    FIRST_CLUSTER sets the tests apart from others that run on this machine."""
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return int(os.environ.get("FIRST_CLUSTER", "0")) + own


@pytest.fixture(scope="session")
def whole_cluster(worker: int) -> Iterator[Cluster]:
    """Four nodes; all on one address where the variable ONE_ADDRESS is set, as where namespaces are refused."""
    try:
        require_programs()
    except ClusterError as error:
        pytest.fail(str(error))
    with Cluster(number=worker, namespaces=False if "ONE_ADDRESS" in os.environ else None) as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """Four nodes that are well and idle, and are so again afterwards."""
    whole_cluster.wait_until_idle()
    yield whole_cluster
    whole_cluster.restore()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Run directories of the training on as many ranks of this machine, without SLURM."""

    @cache
    def train(ranks: int) -> Path:
        folder = tmp_path_factory.mktemp(f"undisturbed_{ranks}")
        with Job([PRETRAIN, *FLAGS, "--save", folder / "run"], ranks, folder / "job") as job:
            ended(job)
        return folder / "run"

    return train


@pytest.fixture
def training(cluster: Cluster, tmp_path: Path, undisturbed: Callable[[int], Path]) -> Training:
    """A training to submit."""
    return Training(cluster, tmp_path, undisturbed)
