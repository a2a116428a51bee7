"""A training on two nodes, through whatever happens to it, ends as one that nothing disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, ask
from tests.slurm.conftest import Training

pytestmark = pytest.mark.slurm


def ranks_on(node: str) -> list[int]:
    """Process numbers of the ranks that run on a node."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        rank = any(variable.startswith(b"LOCAL_RANK=") for variable in variables)
        if rank and f"SLURMD_NODENAME={node}".encode() in variables and b"paced.py" in command:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_two_nodes_train_to_the_end(launcher: str, cluster: Cluster, training: Training) -> None:
    training.hold.unlink()
    job = training.submit(LAUNCHER=launcher)
    job.wait()
    training.assert_whole()
    logs = training.logs(job)
    assert len(logs) == 2
    assert sum("step 120/120" in log for log in logs.values()) == 1


def test_at_the_time_limit_the_job_saves_and_is_requeued(cluster: Cluster, training: Training) -> None:
    job = training.submit("--time=60", "--signal=B:USR1@60", PAUSE=1)
    training.wait_for_checkpoint(job)
    minutes = int(ask("squeue", "--noheader", f"--job={job.number}", "--format=%M").split(":")[0]) + 2
    ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")
    job.until(lambda: "requeued" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    assert "exit code 85" in job.log
    training.assert_whole()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_killed_rank_costs_an_attempt(launcher: str, cluster: Cluster, training: Training) -> None:
    job = training.submit(LAUNCHER=launcher)
    training.wait_for_checkpoint(job)
    (rank,) = ranks_on("n1")
    os.kill(rank, signal.SIGKILL)
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2 after" in job.log
    training.assert_whole()


def test_a_spare_takes_the_place_of_a_node_without_power(cluster: Cluster, training: Training) -> None:
    job = training.submit("--nodes=3", NODES=2)
    training.wait_for_checkpoint(job)
    cluster.kill("n1")
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert " on n0 n2," in job.log
    training.assert_whole()
