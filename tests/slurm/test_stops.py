"""A training that is stopped, by a person, by the clock or for a more important job, goes on as if nothing had been."""

from __future__ import annotations

import pytest

from tests.end_to_end.runs import iterations, latest_iteration
from tests.slurm.conftest import STOPS_BY_FILE, Training
from tests.slurm.jobs import submit

pytestmark = pytest.mark.slurm


def test_at_the_time_limit_the_job_saves_and_is_requeued(training: Training) -> None:
    def set_limit(minutes: int) -> None:
        training.cluster.ask("scontrol", "update", f"JobId={job.number}", f"TimeLimit={minutes}")

    job = training.submit("--time=60", "--signal=B:USR1@90", PAUSE=1, LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    _, run_minutes, _ = job.fields()[0]["RunTime"].split(":")
    set_limit(int(run_minutes) + 2)
    job.until(lambda: "requeue after" in job.log and job.state == "PENDING")
    set_limit(60)
    training.hold.unlink()
    job.wait()
    assert job.restarts == 1
    assert "exit code 85" in job.log
    training.assert_whole()


def test_a_preempted_job_saves_and_is_requeued(training: Training) -> None:
    job = training.submit()
    training.wait_for_checkpoint(job)
    other = ("--partition=high", "--nodes=4", "--wrap=sleep 1")
    more_important = submit(training.cluster, *other, directory=training.directory)
    job.until(lambda: "requeue after" in job.log)
    training.hold.unlink()
    more_important.wait()
    job.wait()
    assert job.restarts == 1
    assert "preempted" in job.log
    assert job.fields()[0]["PreemptTime"] == "None"  # so that what comes later is not taken for it
    assert "exit code 85" in job.log
    training.assert_whole()


def test_a_cancelled_job_saves_and_stays_cancelled(training: Training) -> None:
    job = training.submit(LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    training.cluster.ask("scancel", job.number)
    job.wait(exit_code=None)
    assert (job.state, job.restarts) == ("CANCELLED", 0)
    assert "requeue" not in job.log
    training.assert_goes_on()


def test_a_file_ends_the_job_for_good(training: Training) -> None:
    job = training.submit(LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    (training.run / "STOP").touch()
    job.wait(exit_code=85)
    assert job.restarts == 0
    assert latest_iteration(training.run) == iterations(training.run)[-1]
    training.assert_goes_on()


def test_a_persons_stop_counts_beside_the_one_of_the_script(training: Training) -> None:
    job = training.submit_instead(STOPS_BY_FILE)
    job.until((training.run / "started").exists)
    training.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.until((training.run / "STOP").exists)
    (training.run / "STOP").touch()
    job.wait(exit_code=85)
    assert job.restarts == 0
    assert "stopped by" in job.log


def test_a_stop_while_the_job_waits_again_ends_it_before_it_trains(training: Training) -> None:
    job = training.submit_instead(STOPS_BY_FILE)
    job.until((training.run / "started").exists)
    training.cluster.ask("scancel", "--batch", "--signal=USR1", job.number)
    job.until(lambda: job.state == "PENDING")
    assert not (training.run / "STOP").exists()
    (training.run / "STOP").touch()
    job.wait(exit_code=85)
    assert job.restarts == 1
    assert job.log.count("attempt 1 after") == 1


def test_a_file_ends_a_chain_of_jobs(training: Training) -> None:
    job = training.submit_instead(STOPS_BY_FILE, "--array=1-3%1", "--no-requeue", "--nodes=1")
    job.until((training.run / "started").exists)
    (training.run / "STOP").touch()
    job.wait(exit_code=85)
    assert job.log.count("attempt 1 after") == 1


def test_a_chain_of_jobs_goes_on_where_one_has_stopped(training: Training) -> None:
    job = training.submit("--array=1-3%1", "--no-requeue", LAUNCHER="srun")
    training.wait_for_checkpoint(job)
    first = f"{job.number}_1"
    training.cluster.ask(
        "scancel", "--batch", "--signal=USR1", first, check=False
    )  # it fails, and signals all the same
    job.until(lambda: "cannot be requeued" in job.log)
    training.hold.unlink()
    job.wait(exit_code=None)
    codes = {each["ArrayTaskId"]: each["ExitCode"] for each in job.fields()}
    assert codes == {"1": "85:0", "2": "0:0", "3": "0:0"}
    assert job.log.count("attempt 1 after") == 2
    training.assert_whole()
