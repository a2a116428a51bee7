"""A starting run is ended by DIR/STOP and by signals, in each of its phases, with exit code 85."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.end_to_end.runs import GPT2, MOCK, PRETRAIN, Run, iterations, latest_iteration
from tests.harness.job import Job
from tests.harness.token_files import add_document

COURSE = (*GPT2, "--train-iters", "3")
NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "60")

# `function` of `owner` waits, on `rank` (on all, if None), until HERE/go is there, once it has done its work.
HELD = """
import importlib, os, runpy, sys, time
from pathlib import Path

here = Path(__file__).parent

def hold():
    print("held", flush=True)
    while not (here / "go").exists():
        time.sleep(0.05)

from megalite.lifecycle import rendezvous

rendezvous.PATIENCE = 0.5
owner, _, name = {function!r}.rpartition(".")
if {rank!r} in (os.environ["RANK"], "None"):
    if not owner:
        hold()
    else:
        module, _, kind = owner.partition(":")
        owner = importlib.import_module(module)
        owner = getattr(owner, kind) if kind else owner
        function = getattr(owner, name)

        def held(*arguments, **named):
            result = function(*arguments, **named)
            hold()
            return result

        setattr(owner, name, held)
sys.argv[0] = {program!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INDICES = "numpy.save"  # the first of several files
THE_WHOLE = ""
LOADING = "megalite.checkpoint.load"
FIRST_STEP = "megalite.training.trainer:Trainer.step"

Hold = Callable[..., Job]


@pytest.fixture
def hold(spawn: Callable[..., Job], tmp_path: Path) -> Hold:
    """Start a run on two ranks, one of which halts in a function, and wait until it has."""

    def start(function: str, rank: int | None, directory: Path, *flags: Any, data: tuple[Any, ...] = MOCK) -> Job:
        entry = tmp_path / "entry.py"
        entry.write_text(HELD.format(function=function, rank=str(rank), program=str(PRETRAIN)))
        job = spawn([entry, *data, *COURSE, "--save", directory, *flags], 2, MEGALITE_EXIT_FILE=str(tmp_path / "code"))
        deadline = time.monotonic() + 120
        while not any("held" in job.stdout(number) for number in ((0, 1) if rank is None else (rank,))):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return job

    return start


def wait_until_others_are_missed(job: Job) -> None:
    deadline = time.monotonic() + 120
    while "waiting for rank 1 of 2, for " not in job.stderr(0):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def assert_stopped_by_file(job: Job, directory: Path) -> None:
    """Touch a STOP that already exists, as slurm/pretrain_gpt.sbatch does, and wait as a launcher does.

    Touch it repeatedly, because a rank that has just begun takes an existing file for an old one.
    """
    assert (directory / "STOP").exists()
    deadline = time.monotonic() + 120
    while all(rank.exit_code is None for rank in job.ranks):
        (directory / "STOP").touch()
        time.sleep(0.2)
        assert time.monotonic() < deadline
    assert job.wait_as_launcher(timeout=60) == 85
    assert job.ranks[0].exit_code == 85
    told = f"stopped while the run was starting, by {directory / 'STOP'}: nothing is lost"
    assert told in job.stdout(0).splitlines()
    assert "error" not in job.stderr(0)
    assert (directory.parent / "code").read_text() == "85\n"
    assert (directory / "STOP").exists()


def preexisting_stop(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "STOP").touch()
    return directory


def test_while_indices_are_built_and_none_is_left_half_written(hold: Hold, run: Run, tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "corpus", np.uint16) as writer:
        for _ in range(40):
            add_document(writer, [*range(50), 60])
        writer.finish()
    data = (*NULL, "--data-path", tmp_path / "corpus", "--split", 1)
    job = hold(INDICES, None, preexisting_stop(tmp_path / "run"), data=data)
    assert_stopped_by_file(job, tmp_path / "run")
    folders = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert [path for path in folders if not path.name.endswith(".megalite.tmp")] == []
    run(*COURSE, "--save", tmp_path / "run", data=data, world_size=2)


def test_while_a_rank_does_not_come(hold: Hold, tmp_path: Path) -> None:
    job = hold(THE_WHOLE, 1, preexisting_stop(tmp_path / "run"))
    wait_until_others_are_missed(job)
    assert_stopped_by_file(job, tmp_path / "run")


@pytest.mark.wide
def test_while_a_checkpoint_is_loaded(hold: Hold, run: Run, tmp_path: Path) -> None:
    run(*COURSE, "--exit-interval", 2, "--save", tmp_path / "run", world_size=2, expected=85)
    job = hold(LOADING, 1, preexisting_stop(tmp_path / "run"), "--resume", "auto")
    deadline = time.monotonic() + 60
    while (tmp_path / "run" / "STOP").exists():  # it is of an earlier run
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert_stopped_by_file(job, preexisting_stop(tmp_path / "run"))
    assert latest_iteration(tmp_path / "run") == 2


def test_in_the_first_step_as_in_any_other(hold: Hold, tmp_path: Path) -> None:
    job = hold(FIRST_STEP, 0, tmp_path / "run")
    (tmp_path / "run" / "STOP").touch()
    (tmp_path / "go").touch()
    assert job.wait(timeout=60) == [85, 85]
    assert "stopped after step 1;" in job.stdout(0)
    assert latest_iteration(tmp_path / "run") == iterations(tmp_path / "run")[-1] == 1


def test_a_stop_of_an_earlier_run_that_nobody_touches_stops_nothing(run: Run, tmp_path: Path) -> None:
    assert "which was there before this run" in run(*COURSE, "--save", preexisting_stop(tmp_path)).stdout
    assert iterations(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize(
    ("function", "rank", "numbers"),
    [
        (THE_WHOLE, 1, (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)),
        ("megalite.training.data.open_data", 0, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)),
    ],
    ids=["rendezvous", "data"],
)
def test_signals_that_come_many_times_end_a_start_once(
    function: str, rank: int, numbers: tuple[signal.Signals, ...], hold: Hold, tmp_path: Path
) -> None:
    job = hold(function, rank, tmp_path / "run")
    if not function:
        wait_until_others_are_missed(job)
    for number in 20 * numbers:
        job.kill(0, number)
        time.sleep(0.002)
    assert job.wait_as_launcher(timeout=60) == 85
    assert job.ranks[0].exit_code == 85
    assert (tmp_path / "code").read_text() == "85\n"
    told = [line for line in job.stderr(0).splitlines() if not line.startswith("waiting for ")]
    assert told in ([], ["error: interrupted"])
