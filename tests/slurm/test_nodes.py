"""A training on nodes that are lost, cut off or sick ends, on others, as one that nothing disturbed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.slurm.conftest import STOPS_BY_FILE, Training
from tests.slurm.jobs import SlurmJob
from tests.slurm.machine import with_variables

pytestmark = pytest.mark.slurm


def set_state(training: Training, node: str, state: str) -> None:
    training.cluster.ask("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=test")


def test_the_loss_of_the_node_of_the_script_moves_the_job(training: Training) -> None:
    job = training.submit(LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    training.cluster.kill(training.cluster.nodes[0])
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    training.assert_whole()


def test_a_job_with_spares_moves_too_on_as_many_nodes_as_are_left(training: Training) -> None:
    """Lose the node that monitors the job first, and then drain the node of the script."""
    job = training.submit("--nodes=2-3", "--no-kill", NODES=2, LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    first, second, last, other = training.cluster.nodes
    training.cluster.kill(last)
    set_state(training, last, "DOWN")
    job.until(lambda: any(with_variables(f"SLURMD_NODENAME={second}", f"RUN={training.run}", "SLURM_STEP_NUM_TASKS=1")))
    set_state(training, first, "DRAIN")
    training.cluster.kill(first)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    assert f" on {second} {other}," in job.log
    training.assert_whole()


def assert_the_spare_takes_over(training: Training, job: SlurmJob, harm: Callable[[str], None]) -> None:
    """Harms the second of three nodes, on which the job has begun; asserts that it ends on the two others."""
    training.wait_for_checkpoint(job)
    first, second, spare, _ = training.cluster.nodes
    harm(second)
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert f" on {first} {spare}," in job.log
    training.assert_whole()


def test_a_spare_takes_the_place_of_a_node_without_power(training: Training) -> None:
    job = training.submit("--nodes=3", "--no-kill", NODES=2)
    assert_the_spare_takes_over(training, job, training.cluster.kill)
    if training.cluster.namespaces:  # else all nodes have one log, by the machine's name
        log = training.logs(job)[training.cluster.nodes[0]]
        assert all(line.startswith("0: ") for line in log.splitlines())  # one task on a node


def test_a_node_that_is_cut_off_is_left_out(training: Training) -> None:
    if not training.cluster.namespaces:
        pytest.skip("nodes that share one address cannot be cut off")
    job = training.submit("--nodes=3", "--no-kill", NODES=2, LAUNCHER="srun")
    assert_the_spare_takes_over(training, job, training.cluster.fail)


def test_a_node_whose_prolog_fails_is_drained_and_the_job_moves(training: Training) -> None:
    """Ignore the STOP of an earlier run, too: the job has not started when SLURM requeues it."""
    training.hold.unlink()
    first = training.cluster.nodes[0]
    training.cluster.sicken(first)
    training.run.mkdir()
    (training.run / "STOP").touch()
    job = training.submit(LAUNCHER="srun")
    job.wait()
    assert "drain" in training.cluster.states()[first]
    assert job.restarts == 1
    assert f" on {first}" not in job.log
    training.assert_whole()


@pytest.mark.parametrize(("failure", "why"), [("false", "fails its check"), ("sleep 60", "did not answer")])
def test_a_node_that_fails_its_check_is_left_out(failure: str, why: str, training: Training) -> None:
    first, second, spare, _ = training.cluster.nodes
    check = f'test "$SLURMD_NODENAME" != {first} || {failure}'
    settings = {"NODES": 2, "HEALTH_CHECK": check, "HEALTH_SECONDS": 5}
    job = training.submit_instead("code.write_text('0')", "--nodes=3", **settings)
    job.wait()
    assert job.restarts == 0
    assert f"{first} is sick: {why}" in job.log
    assert f" on {second} {spare}," in job.log


def test_a_node_that_the_job_loses_while_it_is_asked_is_left_out(training: Training) -> None:
    """Take the second node down after the nodes were listed, before SLURM starts the check on them."""
    first, second, spare, _ = training.cluster.nodes
    srun = training.directory / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(
        f"""#!/usr/bin/env bash
        if [[ " $* " == *" --label "* ]] && mkdir {training.directory}/lost 2>/dev/null; then
            scontrol update NodeName={second} State=DOWN Reason=test
        fi
        exec {shutil.which("srun")} "$@"
        """
    )
    srun.chmod(0o755)
    path = f"{srun.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = training.submit_instead("code.write_text('0')", "--nodes=3", "--no-kill", NODES=2, PATH=path)
    job.wait()
    assert job.restarts == 0
    assert f" on {first} {spare}," in job.log


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_a_node_that_was_sick_is_taken_where_no_other_is_left(launcher: str, training: Training) -> None:
    first, second, *_ = training.cluster.nodes
    file = training.run / "slurm" / "sick_nodes"
    file.parent.mkdir(parents=True)
    file.write_text(f"{datetime.now(UTC):%FT%TZ} {first} why\n")
    job = training.submit_instead(
        """
        import socket
        if os.environ["RANK"] == "0":  # the others look for it here
            socket.create_server((os.environ["MASTER_ADDR"], 0))
            code.write_text("0")
        """,
        LAUNCHER=launcher,
    )
    job.wait()
    assert f" on {first} {second}," in job.log
    assert "attempt 2" not in job.log


def test_no_node_is_left_out_where_a_reservation_has_no_other(training: Training) -> None:
    first, second, *_ = training.cluster.nodes
    nodes = (f"Nodes={first},{second}", "StartTime=now", "Duration=60", "Users=root")
    training.cluster.ask("scontrol", "create", "reservation", "ReservationName=ours", *nodes)
    try:
        check = f'test "$SLURMD_NODENAME" != {first}'
        job = training.submit_instead("", "--reservation=ours", HEALTH_CHECK=check)
        job.wait(exit_code=93)
    finally:
        training.cluster.ask("scancel", "--user=root")
        training.cluster.ask("scontrol", "delete", "ReservationName=ours")
    assert job.restarts == 2
    assert "SLURM will leave out" not in job.log


def test_a_job_moves_away_from_a_node_that_fails_its_check(training: Training) -> None:
    training.hold.unlink()
    first = training.cluster.nodes[0]
    check = f'echo sound; test "$SLURMD_NODENAME" != {first} || {{ echo no GPU here; exit 1; }}'
    job = training.submit(HEALTH_CHECK=check, LAUNCHER="srun")
    job.wait()
    assert job.restarts == 1
    assert job.fields()[0]["ExcNodeList"] == first
    assert f"{first} is sick: no GPU here" in job.log
    assert f" on {first}" not in job.log
    (line,) = (training.run / "slurm" / "sick_nodes").read_text().splitlines()
    assert line.endswith(f" {first} no GPU here")
    training.assert_whole()


def test_a_job_moves_away_from_a_node_on_which_ranks_die_twice_running(training: Training) -> None:
    first, second, *_ = training.cluster.nodes
    job = training.submit_instead(
        f"""
        if os.environ["SLURMD_NODENAME"] == "{second}":
            print(f"rank 1 (process {{os.getpid()}} on {second}) has ended without a message, in step 1")
        elif "SLURM_RESTART_COUNT" in os.environ:
            code.write_text("0")
        """
    )
    job.wait()
    assert job.restarts == 1
    assert job.log.count(f" on {first} {second},") == 2
    assert job.log.count(f" {second},") == 2
    assert job.fields()[0]["ExcNodeList"] == second


def test_a_node_is_sick_for_hours_or_until_its_line_is_removed(training: Training) -> None:
    forgotten, sick, _, excluded = training.cluster.nodes
    file, started = training.run / "slurm" / "sick_nodes", training.run / "started"
    file.parent.mkdir(parents=True)
    hours_ago = datetime.now(UTC) - timedelta(hours=7)
    file.write_text(f"{hours_ago:%FT%TZ} {forgotten} why\n{datetime.now(UTC):%FT%TZ} {sick} why\n")
    job = training.submit_instead(STOPS_BY_FILE, "--nodes=1", f"--exclude={excluded}")

    def excluded_after_a_requeue() -> set[str]:
        job.until(started.exists)
        started.unlink()
        training.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
        job.until(lambda: job.state == "PENDING")
        names = job.fields()[0]["ExcNodeList"]
        return set(training.cluster.ask("scontrol", "show", "hostnames", names).split())

    assert excluded_after_a_requeue() == {sick, excluded}
    file.write_text("")
    assert excluded_after_a_requeue() == {excluded}


def test_a_job_that_finds_no_healthy_nodes_is_given_up(training: Training) -> None:
    job = training.submit(HEALTH_CHECK="false")
    job.wait(exit_code=93)
    assert job.restarts == 2
    assert job.log.count("only 0 of 2 nodes are healthy") == 2
