"""A training on two nodes comes to its end, where a rank dies, too; or it says why not."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.end_to_end.campaign import FAULTY
from tests.end_to_end.runs import PRETRAIN
from tests.harness.fault import Fault
from tests.slurm.conftest import STEPS, Training
from tests.slurm.machine import host_name, with_variables

pytestmark = pytest.mark.slurm


def ranks_on(node: str, training: Training) -> list[int]:
    """Process numbers of the training's ranks on a node."""
    found = with_variables(f"SLURMD_NODENAME={node}", f"HOLD={training.hold}", "LOCAL_RANK=")
    return [number for number in found if b"paced.py" in Path(f"/proc/{number}/cmdline").read_bytes()]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_two_nodes_with_two_ranks_each_train_to_the_end(launcher: str, training: Training) -> None:
    training.hold.unlink()
    job = training.submit(LAUNCHER=launcher, RANKS_PER_NODE=2)
    job.wait()
    training.assert_whole(ranks=4)
    logs = training.logs(job)
    assert set(logs) == (set(training.cluster.nodes[:2]) if training.cluster.namespaces else {host_name()})
    assert sum(f"step {STEPS}/{STEPS}" in log for log in logs.values()) == 1


def test_a_killed_rank_costs_an_attempt(training: Training) -> None:
    job = training.submit(RANKS_PER_NODE=2)
    training.wait_for_checkpoint(job)
    rank, _ = ranks_on(training.cluster.nodes[1], training)
    os.kill(rank, signal.SIGKILL)
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2 after" in job.log
    training.assert_whole(ranks=4)


@pytest.mark.parametrize(
    ("phase", "rank", "launcher"),
    [("imports", 0, "torchrun"), ("imports", 1, "srun"), ("meeting", 0, "srun"), ("group", 1, "torchrun")],
)
def test_a_rank_that_is_killed_before_all_have_met_is_named_and_ends_the_attempt_within_a_minute(
    phase: str, rank: int, launcher: str, training: Training
) -> None:
    fault = Fault(phase, rank, 0, "kill")
    record = fault.record(training.directory)
    variables = {"FAULT": fault, "FAULT_RECORD": training.directory, "LAUNCHER": launcher, "RETRY_SECONDS": 999}
    if phase == "imports":
        program = f"""
            import runpy, signal, sys
            if os.environ["RANK"] == "{rank}":
                pathlib.Path({str(record)!r}).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            sys.argv[0] = {str(PRETRAIN)!r}
            runpy.run_path(sys.argv[0], run_name="__main__")
        """
        job = training.submit_instead(program, **variables)
    else:
        job = training.submit(PROGRAM=FAULTY, **variables)
    job.until(record.exists)
    began = time.monotonic()
    job.until(lambda: "the program ended" in job.log)
    assert time.monotonic() - began < 60
    said = "\n".join((job.log, *training.logs(job).values()))
    node = training.cluster.nodes[rank]
    by_the_run = rf"rank {rank} \(process \d+ on .*\) has ended without a message"
    by_srun = f"error: {node}: task {rank}: Killed"
    by_torchrun = rf"rank +: {rank} \(.*\)\n.*exitcode +: -9 "
    assert re.search(f"{by_the_run}|{by_torchrun if launcher == 'torchrun' else by_srun}", said), said


def test_a_node_on_which_ranks_die_twice_running_is_left_out(training: Training) -> None:
    job = training.submit("--nodes=3", NODES=2, LAUNCHER="srun")
    first, second, spare, _ = training.cluster.nodes
    for attempt in (1, 2):
        job.until(lambda attempt=attempt: f"attempt {attempt}" in job.log)  # type: ignore[misc]
        begun = training.newest_checkpoint()
        job.until(lambda begun=begun: training.newest_checkpoint() > begun)  # type: ignore[misc]
        (rank,) = ranks_on(second, training)
        os.kill(rank, signal.SIGKILL)
    job.until(lambda: f" on {first} {spare}," in job.log)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 0
    assert f"{second} is sick: ranks died on it in two attempts" in job.log
    training.assert_whole()


def test_a_node_that_runs_out_of_memory_costs_an_attempt(training: Training) -> None:
    if not training.cluster.limits_memory:
        pytest.skip("this machine has no cgroup version 1 that limits memory")
    job = training.submit("--mem=2G", LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    training.hold.write_text(training.cluster.nodes[1])
    job.until(lambda: "the program ended" in job.log)
    training.hold.unlink()
    job.wait()
    assert "Out Of Memory" in job.log or "oom" in job.log
    assert "attempt 2 after" in job.log
    training.assert_whole()


def test_a_program_that_ends_while_no_controller_answers_is_begun_again(training: Training) -> None:
    started, go = training.run / "started", training.run / "go"
    job = training.submit_instead(
        f"""
        import time
        pathlib.Path({str(started)!r}).touch()
        if pathlib.Path({str(go)!r}).exists():
            code.write_text("0")
        while not pathlib.Path({str(go)!r}).exists():
            time.sleep(0.1)
        """,
        "--nodes=1",
        RETRY_SECONDS=3,
    )
    job.until(started.exists)
    cluster = training.cluster
    cluster.ask("scontrol", "shutdown", "slurmctld")
    while (cluster.folder / "slurmctld.pid").exists():
        time.sleep(0.1)
    go.touch()
    while "the program ended" not in job.log:
        time.sleep(0.1)
    cluster.start_controller()
    job.wait()
    assert job.restarts == 0
    assert "attempt 2 after" in job.log


def test_what_surrounds_a_job_does_not_get_in_its_way(training: Training) -> None:
    """A shell's start-up file that prints, as a prolog of tasks does; variables that `sbatch` is to leave out of steps;
    and a container on several lines."""
    start_up = training.directory / "start_up"
    start_up.write_text("echo\necho this is a cluster\n")
    given = "PATH,PYTHONPATH,RUN,PROGRAM,HOLD,RANKS_PER_NODE,RETRY_SECONDS,LAUNCHER,CONTAINER,BASH_ENV"
    program = "code.write_text('0' if os.environ['IN_CONTAINER'] == '1' else '64')"
    variables = {"BASH_ENV": start_up, "CONTAINER": "\n  env\n  IN_CONTAINER=1"}
    job = training.submit_instead(program, f"--export={given}", **variables)
    job.wait()
    assert "attempt 2" not in job.log


def test_a_job_without_progress_is_given_up(training: Training) -> None:
    job = training.submit_instead("raise SystemExit(1)")
    job.wait(exit_code=93)
    assert job.log.count("the program ended after step 0, exit code unknown") == 3


def test_a_job_whose_run_directory_is_full_is_given_up(training: Training) -> None:
    (training.run / "slurm" / "attempts").mkdir(parents=True)  # to which nothing can be written, either
    job = training.submit()
    job.wait(exit_code=93)
    assert "cannot write to" in job.log


def test_a_second_job_does_not_disturb_the_run_of_the_first(training: Training) -> None:
    first = training.submit(LAUNCHER="srun")
    training.wait_for_checkpoint(first)
    second = training.submit("--nodes=1", flags=("--tp", 1), LAUNCHER="srun")
    second.wait(exit_code=64)
    assert any("another run is saving" in log for log in training.logs(second).values())
    training.hold.unlink()
    first.wait()
    assert "attempt 2" not in first.log
    training.assert_whole()


def test_programs_are_told_when_the_job_ends_and_none_is_begun_soon_before(training: Training) -> None:
    """In a chain, whose last job has the number of the chain."""
    seen, now = training.directory / "seen", time.time()
    job = training.submit_instead(
        f"""
        import subprocess
        if os.environ["RANK"] == "0":
            with open({str(seen)!r}, "a") as file:
                print(os.environ["SLURM_JOB_END_TIME"], file=file)
            if os.environ["SLURM_ARRAY_TASK_ID"] == "2" and "SLURM_RESTART_COUNT" not in os.environ:
                job = os.environ["SLURM_ARRAY_JOB_ID"] + "_2"
                subprocess.run(["scontrol", "update", "JobId=" + job, "TimeLimit=5"], check=True)
            else:
                code.write_text("0")
        """,
        "--array=1-2%1",
        "--time=60",
    )
    job.wait()
    assert {each["ArrayTaskId"]: each["Restarts"] for each in job.fields()} == {"1": "0", "2": "1"}
    first, second, third = (int(line) for line in seen.read_text().split())
    assert now + 3500 < first <= second
    assert third < now + 900
    assert "requeue after step 0: the time limit is near" in job.log


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        (("--nodes=3", "--gpus=6"), ["0,1"] * 4),
        (("--gpus-per-node=2",), ["0,1"] * 4),
        (("--gpus-per-node=1",), ["0"] * 2),
        (("--gpus-per-task=1", "--ntasks-per-node=2"), ["0,1"] * 4),
    ],
    ids=["in sum, with a spare", "all of a node", "half of a node", "by tasks"],
)
def test_there_is_a_rank_for_each_gpu_and_it_sees_those_of_its_node(
    options: tuple[str, ...], gpus: list[str], training: Training
) -> None:
    seen = training.directory / "seen"
    job = training.submit_instead(
        f"""
        with open({str(seen)!r}, "a") as file:
            file.write(os.environ["CUDA_VISIBLE_DEVICES"] + "\\n")
        code.write_text("0")
        """,
        *options,
        RANKS_PER_NODE="",
        NODES=2,
    )
    job.wait()
    assert seen.read_text().splitlines() == gpus


def test_bad_flags_are_not_tried_again(training: Training) -> None:
    job = training.submit(flags=("--no-such-flag",), LAUNCHER="srun")
    job.wait(exit_code=64)
    assert "attempt 2" not in job.log
    assert any("--no-such-flag" in log for log in training.logs(job).values())
