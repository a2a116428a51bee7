"""A training on two nodes, through whatever happens to it, ends as one that nothing disturbed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.end_to_end.runs import iterations, latest_iteration
from tests.slurm.cluster import Cluster, ask
from tests.slurm.conftest import Training
from tests.slurm.jobs import submit

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
    job.until(lambda: "requeue after" in job.log)
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
    job = training.submit("--nodes=3", "--no-kill", NODES=2)
    training.wait_for_checkpoint(job)
    cluster.kill("n1")
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert " on n0 n2," in job.log
    assert all(line.startswith("0: ") for line in training.logs(job)["n0"].splitlines())  # one task on a node
    training.assert_whole()


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_preempted_job_saves_and_is_requeued(launcher: str, cluster: Cluster, training: Training) -> None:
    job = training.submit(LAUNCHER=launcher)
    training.wait_for_checkpoint(job)
    other = submit("--partition=high", "--nodes=4", "--wrap=sleep 1", directory=training.directory)
    job.until(lambda: "requeue after" in job.log)
    training.hold.unlink()
    other.wait()
    job.wait()
    assert job.restarts == 1
    assert "preempted" in job.log
    assert "exit code 85" in job.log
    training.assert_whole()


def test_a_cancelled_job_saves_and_stays_cancelled(cluster: Cluster, training: Training) -> None:
    job = training.submit()
    training.wait_for_checkpoint(job)
    ask("scancel", job.number)
    job.wait(exit_code=None)
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    assert "requeue" not in job.log
    training.assert_goes_on()


def test_a_file_ends_the_job_for_good(cluster: Cluster, training: Training) -> None:
    job = training.submit(LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    (training.run / "STOP").touch()
    job.wait(exit_code=85)
    assert job.restarts == 0
    assert latest_iteration(training.run) == iterations(training.run)[-1]
    training.assert_goes_on()


def test_a_node_that_is_cut_off_is_left_out(cluster: Cluster, training: Training) -> None:
    if not cluster.namespaces:
        pytest.skip("nodes that share one address cannot be cut off")
    job = training.submit("--nodes=3", "--no-kill", NODES=2)
    training.wait_for_checkpoint(job)
    cluster.fail("n1")
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert " on n0 n2," in job.log
    training.assert_whole()


@pytest.mark.parametrize("options", [("--nodes=2",), ("--nodes=3", "--no-kill")], ids=["by SLURM", "by the guard"])
def test_the_loss_of_the_node_of_the_script_moves_the_job(
    options: tuple[str, ...], cluster: Cluster, training: Training
) -> None:
    job = training.submit(*options, NODES=2, LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    cluster.kill("n0")
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    training.assert_whole()


def test_a_node_whose_prolog_fails_is_drained_and_the_job_moves(cluster: Cluster, training: Training) -> None:
    training.hold.unlink()
    cluster.sicken("n0")
    job = training.submit(LAUNCHER="srun")
    job.wait()
    assert "drain" in cluster.states()["n0"]
    assert job.restarts == 1
    assert " on n0" not in job.log
    training.assert_whole()


def test_a_node_that_fails_its_check_is_left_out(cluster: Cluster, training: Training) -> None:
    training.hold.unlink()
    job = training.submit("--nodes=3", NODES=2, HEALTH_CHECK='test "$SLURMD_NODENAME" != n0', LAUNCHER="srun")
    job.wait()
    assert " on n1 n2," in job.log
    training.assert_whole()


def test_a_node_that_runs_out_of_memory_costs_an_attempt(cluster: Cluster, training: Training) -> None:
    if not cluster.limits_memory:
        pytest.skip("this machine has no cgroup version 1 that limits memory")
    job = training.submit("--mem=2G", LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    training.hold.write_text("n1")
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert "Out Of Memory" in job.log or "oom" in job.log
    assert "attempt 2 after" in job.log
    training.assert_whole()


def test_a_chain_of_jobs_goes_on_where_one_has_stopped(cluster: Cluster, training: Training) -> None:
    job = training.submit("--array=1-3%1", "--no-requeue", LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    ask("scancel", "--batch", "--signal=USR1", f"{job.number}_1", check=False)  # it fails, and signals all the same
    job.until(lambda: "cannot be requeued" in job.log)
    training.hold.unlink()
    job.wait(exit_code=None)
    codes = {each["ArrayTaskId"]: each["ExitCode"] for each in job.fields()}
    assert codes == {"1": "85:0", "2": "0:0", "3": "0:0"}
    assert job.log.count("attempt 1 after") == 2
    training.assert_whole()


def test_a_job_without_progress_is_given_up(cluster: Cluster, training: Training) -> None:
    program = training.directory / "program.py"
    program.write_text("raise SystemExit(1)")
    job = training.submit(PROGRAM=program, LAUNCHER="srun")
    job.wait(exit_code=93)
    assert job.log.count("the program ended after step 0, exit code unknown") == 3


def test_bad_flags_are_not_tried_again(cluster: Cluster, training: Training) -> None:
    job = training.submit(flags=("--no-such-flag",))
    job.wait(exit_code=64)
    assert job.log.count("attempt") == 1
    assert any("--no-such-flag" in log for log in training.logs(job).values())


def test_a_job_that_finds_no_healthy_nodes_is_given_up(cluster: Cluster, training: Training) -> None:
    job = training.submit(HEALTH_CHECK="false")
    job.wait(exit_code=93)
    assert job.restarts == 2
    assert job.log.count("only 0 of 2 nodes are well") == 2
