"""Fixtures of the tests on a real SLURM, and what they all train."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, ended, latest_iteration, metrics
from tests.harness.job import Job
from tests.slurm.cluster import Cluster, ClusterError, require_programs
from tests.slurm.jobs import SlurmJob, submit

STEPS = 120
FLAGS = (*MOCK, *GPT2, "--train-iters", STEPS, "--save-interval", 5, "--tp", 2, "--distributed-timeout-minutes", 1)
PROGRAM = "tests/slurm/paced.py"


class Training:
    """A training on the cluster, in a folder of its own, and how it must end."""

    def __init__(self, directory: Path, undisturbed: Path) -> None:
        self.directory, self.undisturbed = directory, undisturbed
        self.run = directory / "run"
        self.hold = directory / "hold"
        self.hold.touch()

    def submit(self, *options: object, flags: tuple[object, ...] = (), **variables: object) -> SlurmJob:
        """Submit it, on two nodes with a rank each, and slow as long as `hold` is there."""
        settings = {"RUN": self.run, "HOLD": self.hold, "PROGRAM": PROGRAM, "RANKS_PER_NODE": 1} | variables
        script = "slurm/pretrain_gpt.sbatch"
        return submit("--nodes=2", *options, script, *FLAGS, *flags, directory=self.directory, **settings)

    def wait_for_checkpoint(self, job: SlurmJob) -> None:
        """Return when the first one is there."""
        job.until((self.run / "latest_checkpointed_iteration.txt").exists)

    def logs(self, job: SlurmJob) -> dict[str, str]:
        """What the program has written on each node."""
        return {path.stem: path.read_text() for path in (self.run / "slurm" / job.number).glob("*.log")}

    def assert_whole(self) -> None:
        """Asserts that the run came to its end, by the same losses, bit for bit, as one that nothing disturbed."""
        assert (self.run / "DONE").read_text() == f"{STEPS}\n"
        assert latest_iteration(self.run) == STEPS
        assert metrics(self.run) == metrics(self.undisturbed)

    def assert_goes_on(self) -> None:
        """Asserts that the same, submitted again, comes to that end."""
        self.hold.unlink()
        self.submit().wait()
        self.assert_whole()


@pytest.fixture(scope="module")
def whole_cluster() -> Iterator[Cluster]:
    """Four nodes for the tests of a file."""
    try:
        require_programs()
    except ClusterError as error:
        pytest.fail(str(error))
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(whole_cluster: Cluster) -> Iterator[Cluster]:
    """Four nodes that are well and idle, and are so again afterwards."""
    whole_cluster.wait_until_idle()
    yield whole_cluster
    whole_cluster.restore()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory of the training on two ranks of this machine, without SLURM."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Job([PRETRAIN, *FLAGS, "--save", folder / "run"], 2, folder / "job") as job:
        ended(job)
    return folder / "run"


@pytest.fixture
def training(tmp_path: Path, undisturbed: Path) -> Training:
    """A training to submit."""
    return Training(tmp_path, undisturbed)
