"""Ranks that fail are started again within a step of SLURM, and a spare node takes the place of a lost one."""

from __future__ import annotations

import os
import signal

import pytest

from tests.end_to_end.runs import metrics
from tests.slurm.conftest import STEPS, Training
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


def said(training: Training, job: SlurmJob, number: int) -> str:
    """Wait for as many generations after the first, and return what is said of the last one."""
    job.until(lambda: len(generations(training, job)) == number)
    return generations(training, job)[-1]


def assert_same_losses(training: Training) -> None:
    """Asserts that a run that had fewer ranks for a while has the undisturbed losses, up to rounding.

    They are sums of float32, in another order: some 1e-7, which 60 steps at a high learning rate enlarge.
    """
    assert (training.run / "DONE").read_text() == f"{STEPS}\n"
    ours, theirs = (
        [(line["iteration"], line["lm_loss"]) for line in metrics(run) if "lm_loss" in line]
        for run in (training.run, training.undisturbed(2))
    )
    assert [step for step, _ in ours] == list(range(1, STEPS + 1))
    assert [loss for _, loss in ours] == pytest.approx([loss for _, loss in theirs], rel=1e-4)


def test_two_nodes_are_lost_and_two_spare_ones_take_their_place(training: Training) -> None:
    """The second one is the node that took the place of the first."""
    _, second, third, fourth = training.cluster.nodes
    job = training.submit("--nodes=4", "--no-kill", LAUNCHER="srun", flags=(*WARM, "--spare-nodes", 2))
    training.wait_for_checkpoint(job)
    training.cluster.kill(second)
    assert f"{third} takes the place of {second} (rank 1)" in said(training, job, 1)
    training.cluster.kill(third)
    assert f"{fourth} takes the place of {third} (rank 1)" in said(training, job, 2)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2" not in job.log
    training.assert_whole()


def test_after_the_spare_node_fewer_nodes_go_on(training: Training) -> None:
    """Nodes have a replica of two ranks each."""
    first, second, third, _ = training.cluster.nodes
    flags = (*WARM, "--spare-nodes", 1, "--elastic")
    job = training.submit("--nodes=3", "--no-kill", LAUNCHER="srun", RANKS_PER_NODE=2, flags=flags)
    training.wait_for_checkpoint(job)
    training.cluster.kill(second)
    assert f"{third} takes the place of {second} (ranks 2, 3)" in said(training, job, 1)
    training.cluster.kill(third)
    assert f"2 ranks instead of 4, on {first}; went on" in said(training, job, 2)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2" not in job.log
    assert_same_losses(training)


def test_a_node_that_was_cut_off_for_some_seconds_trains_again(training: Training) -> None:
    """SLURM, which waits for it for longer, does not notice."""
    if not training.cluster.namespaces:
        pytest.skip("nodes that share one address cannot be cut off")
    first, second, *_ = training.cluster.nodes
    job = training.submit("--no-kill", LAUNCHER="srun", RANKS_PER_NODE=2, flags=(*WARM, "--elastic"))
    training.wait_for_checkpoint(job)
    training.cluster.fail(second)
    assert f"2 ranks instead of 4, on {first}; went on" in said(training, job, 1)
    training.cluster.heal(second)
    assert f"{second} is back; 4 ranks instead of 2, on {first}, {second}; went on" in said(training, job, 2)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2" not in job.log
    assert_same_losses(training)


@pytest.mark.parametrize("asked", ["requeue", "stop"])
def test_a_job_is_preempted_before_its_lost_node_is_replaced(asked: str, training: Training) -> None:
    _, second, *_ = training.cluster.nodes
    job = training.submit("--nodes=3", "--no-kill", LAUNCHER="srun", flags=(*WARM, "--spare-nodes", 1))
    training.wait_for_checkpoint(job)
    os.kill(ranks_on(job, second)[0], signal.SIGKILL)
    training.cluster.kill(second)
    if asked == "requeue":
        training.cluster.ask("scontrol", "requeue", job.number)
    else:
        training.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.until(lambda: job.restarts == 1)
    training.cluster.restart(second)
    training.hold.unlink()
    job.wait()
    assert "attempt 2" not in job.log
    training.assert_whole()
