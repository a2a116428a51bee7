"""After any end of a run, the files on disk are complete, and the next start resumes from them."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.campaign import FAULTY
from tests.end_to_end.runs import (
    GPT2,
    LLAMA,
    MOCK,
    PRETRAIN,
    Run,
    Start,
    assert_same_checkpoint,
    contents,
    ended,
    iterations,
    latest_iteration,
    metrics,
    saved_tensors,
)
from tests.harness.fault import Fault
from tests.harness.job import Job

# The order of mock data and a constant learning rate do not depend on the length of the run.
ENDLESS = [*GPT2, "--lr-decay-style", "constant", "--tp", 2, "--sequence-parallel"]


MAY_BE = "it was changed, or could not be written. The run continues, and keeps what can be read of it"


def wait_for_step(job: Any, step: int) -> None:
    job.wait_for_output(0, f"step {step:5}/10000")


def assert_unbroken(directory: Path, run: Run, whole: Path) -> None:
    """Continue for two steps, and compare with a run that was never stopped."""
    last = latest_iteration(directory) + 2
    run(*ENDLESS, "--train-iters", last, "--save", directory, "--resume", "auto", world_size=2)
    run(*ENDLESS, "--train-iters", last, "--save", whole, world_size=2)
    assert_same_checkpoint(directory / f"iter_{last:07d}", whole / f"iter_{last:07d}")
    assert metrics(directory) == metrics(whole)
    assert iterations(directory) == list(range(1, last + 1))


@pytest.mark.parametrize(
    ("number", "rank", "times"),
    [
        pytest.param(signal.SIGTERM, None, 1, marks=pytest.mark.wide),
        pytest.param(signal.SIGINT, 1, 1, marks=pytest.mark.wide),
        pytest.param(signal.SIGUSR1, 0, 50, marks=pytest.mark.wide),
        (signal.SIGINT, None, 50),  # from the terminal and again through the launcher
    ],
    ids=str,
)
def test_a_signal_saves_and_ends_and_the_run_goes_on(
    number: signal.Signals, rank: int | None, times: int, start: Start, run: Run, tmp_path: Path
) -> None:
    directory = tmp_path / "broken"
    job = start(*ENDLESS, "--train-iters", 10000, "--save", directory, world_size=2)
    wait_for_step(job, 2)
    for _ in range(times):
        job.kill_all(number) if rank is None else job.kill(rank, number)
        time.sleep(0.01)
    assert "stopped after step" in ended(job, expected=85).stdout
    assert latest_iteration(directory) == iterations(directory)[-1]
    assert not (directory / "DONE").exists()
    assert_unbroken(directory, run, tmp_path / "whole")


def test_a_file_stops_the_run_and_one_from_before_does_not(start: Start, run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    directory.mkdir()
    for name in ("STOP", "SAVE"):
        (directory / name).touch()
    job = start(*ENDLESS, "--train-iters", 10000, "--save", directory, world_size=2)
    wait_for_step(job, 2)
    for name in ("STOP", "SAVE"):
        assert f"removed {directory / name}" in job.stdout(0)
        assert not (directory / name).exists()
    (directory / "STOP").touch()
    assert "stopped after step" in ended(job, expected=85).stdout
    assert (directory / "STOP").exists()
    assert [path.name for path in directory.glob("iter_*")] == [f"iter_{iterations(directory)[-1]:07d}"]
    assert_unbroken(directory, run, tmp_path / "whole")
    assert not (directory / "STOP").exists()


@pytest.mark.wide
def test_a_file_saves_the_run_once_and_it_goes_on(start: Start, tmp_path: Path) -> None:
    job = start(*ENDLESS, "--train-iters", 10000, "--save", tmp_path, world_size=2)
    wait_for_step(job, 2)
    for saves in (1, 2):
        (tmp_path / "SAVE").touch()
        while job.stdout(0).count("saved ") < saves:
            assert job.ranks[0].exit_code is None
            time.sleep(0.01)
        assert not (tmp_path / "SAVE").exists()
        wait_for_step(job, latest_iteration(tmp_path) + 2)
    (tmp_path / "STOP").touch()
    ended(job, expected=85)
    assert len(list(tmp_path.glob("iter_*"))) == 3


@pytest.mark.wide
@pytest.mark.parametrize("file", [True, False], ids=["file", "signal"])
def test_a_stop_breaks_an_evaluation_off_and_the_next_start_makes_up_for_it(
    file: bool, start: Start, run: Run, tmp_path: Path
) -> None:
    flags = [*ENDLESS, "--train-iters", 6, "--eval-interval", 2, "--log-interval", 1]
    directory, whole = tmp_path / "broken", tmp_path / "whole"
    job = start(*flags, "--eval-iters", 20000, "--save", directory, world_size=2)
    job.wait_for_output(0, "step 2/6")
    (directory / "STOP").touch() if file else job.kill(1, signal.SIGTERM)
    assert "stopped after step 2;" in ended(job, expected=85).stdout
    run(*flags, "--eval-iters", 2, "--save", directory, "--resume", "auto", world_size=2)
    run(*flags, "--eval-iters", 2, "--save", whole, world_size=2)
    assert metrics(directory) == metrics(whole)
    assert_same_checkpoint(directory / "iter_0000006", whole / "iter_0000006")


@pytest.mark.wide  # as above, in the last step
def test_an_evaluation_that_is_left_when_the_run_turns_out_to_end_there_is_made_up_for(
    start: Start, run: Run, tmp_path: Path
) -> None:
    flags = [*ENDLESS, "--eval-interval", 2]
    directory, whole = tmp_path / "broken", tmp_path / "whole"
    job = start(*flags, "--train-iters", 6, "--eval-iters", 20000, "--save", directory, world_size=2)
    job.wait_for_output(0, "step 2/6")
    job.kill(1, signal.SIGTERM)
    ended(job, expected=85)
    flags += ["--train-iters", 2, "--eval-iters", 2]
    run(*flags, "--save", directory, "--resume", "auto", world_size=2)
    run(*flags, "--save", whole, world_size=2)
    assert metrics(directory) == metrics(whole)
    assert_same_checkpoint(directory / "iter_0000002", whole / "iter_0000002")


@pytest.mark.wide
def test_a_run_killed_before_its_last_evaluation_is_over_finishes_it(
    spawn: Callable[..., Job], run: Run, tmp_path: Path
) -> None:
    flags = [*ENDLESS, "--train-iters", 2, "--eval-iters", 2, "--eval-interval", 2, "--resume", "auto"]
    directory, whole = tmp_path / "broken", tmp_path / "whole"
    run(*flags, "--save", whole, world_size=2)
    assert [*map(list, metrics(whole))][-1][-1] == "test_loss"
    for fault in (Fault("test", 1, 2, "kill"), Fault("test", 0, 0, "kill")):  # again, in the start that replaces it
        environment = {"FAULT": str(fault), "FAULT_RECORD": str(tmp_path)}
        job = spawn([FAULTY, *MOCK, *flags, "--save", directory], 2, **environment)
        assert job.wait()[fault.rank] == -signal.SIGKILL
        assert fault.record(tmp_path).exists()
        assert not (directory / "DONE").exists()
        assert metrics(directory) == metrics(whole)[:-1]
    before = contents(directory / "iter_0000002")
    assert "finished after step 2" in run(*flags, "--save", directory, world_size=2).stdout
    assert metrics(directory) == metrics(whole)
    assert contents(directory / "iter_0000002") == before
    (directory / "DONE").unlink()  # as if the run was killed before it could write that
    assert "already finished: " in run(*flags, "--save", directory, world_size=2).stdout
    assert (directory / "DONE").read_text() == "2\n"
    assert metrics(directory) == metrics(whole)


@pytest.mark.wide
def test_a_run_of_whose_end_a_power_loss_has_left_no_more_than_a_name_ends_again(run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = [*ENDLESS, "--train-iters", 2, "--eval-iters", 2, "--resume", "auto", "--save", directory]
    run(*flags, world_size=2)
    whole, path = metrics(directory), directory / "metrics.jsonl"
    (directory / "DONE").write_bytes(b"")
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert "finished after step 2" in run(*flags, world_size=2).stdout
    assert (directory / "DONE").read_text() == "2\n"
    assert metrics(directory) == whole


@pytest.mark.wide
def test_a_run_that_goes_on_says_what_its_metrics_have_lost(run: Run, tmp_path: Path) -> None:
    """There is one line at the start if somebody else has changed the file, otherwise none."""
    flags = [*GPT2, "--lr-decay-style", "constant", "--eval-iters", 1, "--eval-interval", 2]
    flags += ["--save", tmp_path / "run", "--resume", "auto", "--train-iters"]
    file = tmp_path / "run" / "metrics.jsonl"
    changes: list[tuple[Callable[[list[str]], list[str]], str]] = [
        (lambda lines: lines, ""),
        (lambda lines: lines[:3], "lacks steps 3, 4 and the evaluation after step 4"),
        (lambda lines: [*lines[:-1], lines[-1][:30]], "lacks steps 3, 4 and has 1 damaged line"),
        (lambda lines: [], "lacks steps 1-8 and the evaluation after step 8"),
    ]
    run(*flags, 2)
    for number, (change, expected) in enumerate(changes, start=2):
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))
        if expected.startswith("lacks steps 1-"):
            file.unlink()
        warnings = [line for line in run(*flags, 2 * number).stdout.splitlines() if "WARNING" in line]
        assert warnings == ([f"WARNING: {file} {expected}: {MAY_BE}"] if expected else [])


@pytest.mark.wide  # test_faults.py kills ranks in every phase
def test_a_killed_rank_leaves_the_last_checkpoint(start: Start, run: Run, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    generator = random.Random(0)
    for attempt in range(4):
        flags = [*ENDLESS, "--train-iters", 10000, "--save", directory, "--save-interval", 1, "--resume", "auto"]
        job = start(*flags, world_size=2)
        before = latest_iteration(directory) if attempt else 0
        wait_for_step(job, before + 2)
        time.sleep(0.1 * generator.random())
        killed = attempt % 2
        job.kill(killed)
        codes = job.wait()
        assert codes[killed] == -signal.SIGKILL
        assert codes[1 - killed] == 85
        errors = job.stderr(1 - killed)
        assert errors.startswith(f"error: rank {killed} (process {job.ranks[killed].process.pid} on ")
        assert len(errors.splitlines()) == 1
        last = latest_iteration(directory)
        assert last > before
        saved_tensors(directory / f"iter_{last:07d}")
    assert_unbroken(directory, run, tmp_path / "whole")
    assert not list(directory.glob("iter_*.*"))  # nothing half written is left behind by the next save


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.wide)], ids=str)
def test_a_rank_that_waits_for_the_others_can_be_ended(number: signal.Signals, start: Start) -> None:
    job = start(*ENDLESS, "--train-iters", 10, world_size=2)
    job.kill(1)  # before it has come to the rendezvous, most of the time
    time.sleep(1.0)
    job.kill(0, number)
    assert job.wait(timeout=30)[0] in (-number, 85)
    assert "Traceback" not in job.stderr(0)


def test_a_signal_while_the_program_starts_interrupts_it(spawn: Callable[..., Job], tmp_path: Path) -> None:
    entry = tmp_path / "entry.py"  # a program with a long start
    entry.write_text(
        "import time\nfrom megalite.lifecycle.failure import run_main\n"
        "run_main(lambda: [print('starting'), *(time.sleep(0.05) for _ in range(10**6))])"
    )
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        job = spawn([entry], 1)
        job.wait_for_output(0, "starting")
        job.kill(0, number)
        assert job.wait() == [85]
        assert job.stderr(0) == ("error: interrupted\n" if number == signal.SIGINT else "")


@pytest.mark.wide
def test_the_exit_interval_counts_on_over_starts(run: Run, tmp_path: Path) -> None:
    flags = [*LLAMA, "--train-iters", 5, "--exit-interval", 2, "--save", tmp_path, "--resume", "auto"]
    for last, code in ((2, 85), (4, 85), (5, 0)):
        run(*flags, expected=code)
        assert latest_iteration(tmp_path) == last
        assert (tmp_path / "DONE").exists() == (code == 0)
    assert iterations(tmp_path) == [1, 2, 3, 4, 5]


@pytest.mark.wide
def test_the_exit_duration_ends_the_run_on_all_ranks(run: Run, tmp_path: Path) -> None:
    flags = [*GPT2, "--train-iters", 100000, "--save", tmp_path, "--exit-duration-in-mins", 0.001]
    run(*flags, world_size=2, expected=85)
    assert 1 <= latest_iteration(tmp_path) == iterations(tmp_path)[-1] < 1000


def test_without_save_a_stop_does_not_promise_to_continue(run: Run) -> None:
    out = run(*GPT2, "--train-iters", 9, "--exit-interval", 2, expected=85).stdout
    assert "stopped after step 2" in out
    assert "nothing is saved without --save" in out
    assert "--resume" not in out


@pytest.mark.wide
def test_a_finished_run_is_done_at_once_and_goes_on_with_more_steps(run: Run, tmp_path: Path) -> None:
    flags = [*GPT2, "--lr-decay-style", "constant", "--save", tmp_path / "s", "--resume", "auto"]
    run(*flags, "--train-iters", 2)
    assert (tmp_path / "s" / "DONE").read_text() == "2\n"
    before = contents(tmp_path / "s")
    out = run(*flags, "--train-iters", 2, world_size=2).stdout
    assert "already" in out
    assert "step 2/2" not in out
    assert contents(tmp_path / "s") == before
    run(*flags, "--train-iters", 3)
    assert iterations(tmp_path / "s") == [1, 2, 3]
    assert (tmp_path / "s" / "DONE").read_text() == "3\n"
    run(*GPT2, "--lr-decay-style", "constant", "--train-iters", 3, "--save", tmp_path / "whole")
    assert_same_checkpoint(tmp_path / "s" / "iter_0000003", tmp_path / "whole" / "iter_0000003")


def test_a_new_run_in_a_used_folder_is_refused(run: Run, tmp_path: Path) -> None:
    run(*GPT2, "--train-iters", 2, "--save", tmp_path / "s")
    before = contents(tmp_path / "s")
    error = run(*GPT2, "--train-iters", 1, "--save", tmp_path / "s", world_size=2, expected=64).stderr
    assert error.count("error: ") == 1
    assert "--resume auto" in error
    assert contents(tmp_path / "s") == before


def test_a_run_without_a_folder_leaves_no_file(run: Run, tmp_path: Path) -> None:
    run(*GPT2, "--train-iters", 1, "--metrics-path", tmp_path / "m" / "metrics.jsonl")
    assert iterations(tmp_path / "m") == [1]
    assert not list(tmp_path.rglob("*iter*"))


def test_a_run_stops_before_its_job_ends(run: Run, start: Start, tmp_path: Path) -> None:
    flags = [*GPT2, "--train-iters", 10000]
    soon = str(int(time.time()) + 14)  # less than the margin
    out = run(*flags, world_size=2, expected=85, SLURM_JOB_END_TIME=soon).stdout
    assert "stopped after step 1; nothing is saved without --save: the job ends in " in out
    job = start(*flags, "--save", tmp_path, SLURM_JOB_END_TIME=str(int(time.time()) + 300))
    wait_for_step(job, 2)  # 300 seconds are enough
    (tmp_path / "STOP").touch()
    assert "the job ends" not in ended(job, expected=85).stdout
    over = run(*GPT2, "--train-iters", 2, SLURM_JOB_END_TIME="1000000000").stdout
    assert "SLURM_JOB_END_TIME=1000000000 is in the past: it is ignored" in over


SLOW_SAVE = """
import runpy, sys, time
from megalite.checkpoint import saving

write = saving._write

def slow(*arguments):
    print("now saving", flush=True)
    time.sleep(1.0)
    return write(*arguments)

saving._write = slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.wide
@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.wide), ("--async-save",)], ids=["at once", "in the background"]
)
def test_signals_that_come_while_a_checkpoint_is_saved_break_nothing(
    flags: tuple[str, ...], spawn: Callable[..., Job], tmp_path: Path
) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(SLOW_SAVE)
    course = [*MOCK, *ENDLESS, "--train-iters", 10000, "--save-interval", 2, *flags]
    job = spawn([entry, PRETRAIN, *course, "--save", tmp_path / "run"], 2)
    job.wait_for_output(0, "now saving")
    for number in 20 * (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        job.kill_all(number)
        time.sleep(0.01)
    assert job.wait(timeout=60) == [85, 85]
    assert "stopped after step" in job.stdout(0)
    last = latest_iteration(tmp_path / "run")
    assert last == iterations(tmp_path / "run")[-1]
    saved_tensors(tmp_path / "run" / "iter_0000002")
    saved_tensors(tmp_path / "run" / f"iter_{last:07d}")


@pytest.mark.wide
def test_figures_and_progress_that_are_asked_for(run: Run, tmp_path: Path) -> None:
    flags = [*GPT2, "--lr-decay-style", "constant", "--save", tmp_path, "--resume", "auto", "--log-progress"]
    more = ["--eval-iters", 1, "--eval-interval", 2, "--log-validation-ppl-to-tensorboard"]
    run(*flags, *more, "--train-iters", 3, "--exit-interval", 2, "--log-world-size-to-tensorboard", expected=85)
    run(*flags, "--train-iters", 3, SLURM_JOB_ID="7")
    assert [line.get("world_size") for line in metrics(tmp_path)] == [1, 1, None, None]
    (evaluated,) = [line for line in metrics(tmp_path) if "valid_loss" in line]
    assert evaluated["valid_perplexity"] == pytest.approx(math.exp(evaluated["valid_loss"]))
    lines = [line.split("\t")[1:] for line in (tmp_path / "progress.txt").read_text().splitlines()]
    assert lines == [
        ["job none", "1 ranks", "begins after step 0"],
        ["job none", "1 ranks", "saved iter_0000002"],
        ["job none", "1 ranks", "stopped after step 2"],
        ["job 7", "1 ranks", "continues after step 2"],
        ["job 7", "1 ranks", "saved iter_0000003"],
        ["job 7", "1 ranks", "finished after step 3"],
    ]
