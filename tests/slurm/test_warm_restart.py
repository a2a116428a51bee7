"""Ranks that fail are started again within a step of SLURM, and a spare node takes the place of a lost one."""

from __future__ import annotations

import os
import signal

import pytest

from tests.slurm.conftest import Training
from tests.slurm.jobs import SlurmJob
from tests.slurm.machine import with_variables

pytestmark = pytest.mark.slurm
WARM = ("--warm-restart", "--memory-checkpoint-interval", 1)


def ranks_on(job: SlurmJob, node: str) -> list[int]:
    """Return the ranks that the agent of a node has forked, without those that call the store for it."""
    found = list(with_variables(f"SLURMD_NODENAME={node}", f"SLURM_JOB_ID={job.number}"))
    agents = [process for process in found if b"recovery.agent" in command_of(process)]
    (agent,) = [process for process in agents if parent_of(process) not in agents]
    return [process for process in agents if parent_of(process) == agent]


def command_of(process: int) -> bytes:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


def parent_of(process: int) -> int:
    with open(f"/proc/{process}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def generations(training: Training, job: SlurmJob) -> list[str]:
    """Return what is said of generations after the first."""
    lines = [line.partition(": ")[2] for log in training.logs(job).values() for line in log.splitlines()]
    return [line for line in lines if line.startswith("generation ")]


def test_a_rank_that_dies_goes_on_in_the_same_step(training: Training) -> None:
    """The job is preempted while ranks start again for the second time."""
    second = training.cluster.nodes[1]
    job = training.submit(LAUNCHER="srun", flags=WARM)
    training.wait_for_checkpoint(job)
    os.kill(ranks_on(job, second)[-1], signal.SIGKILL)
    job.until(lambda: len(generations(training, job)) == 1)
    assert generations(training, job)[0].startswith(f"generation 2: rank 1 on {second} was killed by SIGKILL; went on")
    os.kill(ranks_on(job, second)[-1], signal.SIGKILL)
    training.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    assert "attempt 2" not in job.log
    training.assert_whole()


def test_a_spare_node_takes_the_place_of_a_lost_one_within_the_step(training: Training) -> None:
    """Its ranks live on, and must end by themselves, if the node is cut off."""
    _, second, spare, _ = training.cluster.nodes
    job = training.submit("--nodes=3", "--no-kill", LAUNCHER="srun", flags=(*WARM, "--spare-nodes", 1))
    training.wait_for_checkpoint(job)
    (training.cluster.fail if training.cluster.namespaces else training.cluster.kill)(second)
    job.until(lambda: len(generations(training, job)) == 1)
    assert f"{spare} takes the place of {second} (rank 1), which is lost; went on" in generations(training, job)[0]
    job.until(lambda: not any(with_variables(f"SLURMD_NODENAME={second}", "MASTER_PORT=")))
    job.until(lambda: training.cluster.states().get(second, "").startswith("down"))  # SLURM knows, too
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2" not in job.log
    training.assert_whole()
