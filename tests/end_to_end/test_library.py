"""Programs of one's own on several ranks: any end of theirs is as safe as that of pretrain_gpt.py."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.runs import ROOT, assert_same_checkpoint, ended, latest_iteration, metrics, saved_tensors
from tests.harness.job import Job
from tests.harness.wide import wide_except

PROGRAM = ROOT / "tests" / "end_to_end" / "own_program.py"
Start = Callable[..., Job]


@pytest.fixture
def program(spawn: Callable[..., Job]) -> Start:
    """Start the program: `program("--save", directory, world_size=2)`."""

    def start(*arguments: Any, world_size: int = 2, **environment: str) -> Job:
        return spawn([PROGRAM, *map(str, arguments)], world_size, **environment)

    return start


def wait_for_step(job: Job, step: int) -> None:
    job.wait_for_output(0, f"step {step:5}/10000", timeout=60.0)


def assert_goes_on(directory: Path, program: Start, layout: tuple[Any, ...]) -> None:
    """Continue for two steps, and compare with a run that was never stopped."""
    last, whole = latest_iteration(directory) + 2, directory.with_name("whole")
    for each in (directory, whole):
        assert "the program goes on" in ended(program("--save", each, "--steps", last, *layout), timeout=60.0).stdout
    assert_same_checkpoint(directory / f"iter_{last:07d}", whole / f"iter_{last:07d}")
    assert metrics(directory) == metrics(whole)
    assert [line["iteration"] for line in metrics(directory)] == list(range(1, last + 1))


ZERO3, TWO_STAGES = ("--zero", 3), ("--pp", 2)


@pytest.mark.parametrize(
    ("how", "layout", "loop"),
    [
        ("SIGTERM", ZERO3, ()),
        pytest.param("SIGTERM", TWO_STAGES, ("--loop",), marks=pytest.mark.wide),
        pytest.param("Ctrl-C", TWO_STAGES, ("--loop",), marks=pytest.mark.wide),
        pytest.param("Ctrl-C", ZERO3, (), marks=pytest.mark.wide),
        pytest.param("STOP", TWO_STAGES, (), marks=pytest.mark.wide),
        pytest.param("STOP", ZERO3, ("--loop",), marks=pytest.mark.wide),
    ],
)
def test_a_stop_saves_with_code_85_and_the_program_goes_on(
    how: str, layout: tuple[Any, ...], loop: tuple[str, ...], program: Start, tmp_path: Path
) -> None:
    directory = tmp_path / "broken"
    job = program("--save", directory, "--steps", 10000, *layout, *loop)
    wait_for_step(job, 2)
    if how == "STOP":
        (directory / "STOP").touch()
    else:
        for _ in range(3):  # a terminal signals each process, and so does the launcher
            job.kill_all(signal.SIGTERM if how == "SIGTERM" else signal.SIGINT)
            time.sleep(0.01)
    output = ended(job, expected=85, timeout=60.0).stdout
    assert "stopped after step" in output
    assert "the program goes on" not in output
    assert latest_iteration(directory) == metrics(directory)[-1]["iteration"]
    assert_goes_on(directory, program, layout)


@pytest.mark.wide
def test_a_killed_program_goes_on_from_its_last_checkpoint(program: Start, tmp_path: Path) -> None:
    directory = tmp_path / "broken"
    job = program("--save", directory, "--steps", 10000, "--save-interval", 2, *ZERO3)
    wait_for_step(job, 5)
    job.kill(1)
    codes = job.wait(60.0)
    assert codes[1] == -signal.SIGKILL
    assert codes[0] == 85  # a restart continues from the checkpoint
    assert job.stderr(0).startswith("error: rank 1 (process ")
    assert "--resume auto continues from its last checkpoint" in job.stderr(0)
    assert_goes_on(directory, program, ZERO3)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("before", "after"),
    [((4, ("--zero", 2)), (1, ())), pytest.param((2, TWO_STAGES), (2, ZERO3), marks=pytest.mark.wide)],
    ids=["four ranks and one", "stages and ZeRO 3"],
)
def test_a_program_goes_on_under_another_layout(before: Any, after: Any, program: Start, tmp_path: Path) -> None:
    for steps, (ranks, layout) in ((3, before), (3, after), (5, after)):
        job = program("--save", tmp_path, "--steps", steps, *layout, world_size=ranks)
        ended(job, timeout=60.0)
        if steps == 3 and (ranks, layout) == before:
            saved = saved_tensors(tmp_path / "iter_0000003")
    assert [line["iteration"] for line in metrics(tmp_path)] == [1, 2, 3, 4, 5]
    now = saved_tensors(tmp_path / "iter_0000005")
    assert now.keys() == saved.keys()
    (counter,) = (name for name in now if name.endswith("1.num_batches_tracked"))
    assert now[counter].item() > saved[counter].item()


def test_an_end_on_one_rank_neither_saves_nor_hangs(program: Start, tmp_path: Path) -> None:
    """The other ranks go on: their step would meet the save of the rank that ends."""
    job = program("--save", tmp_path, "--steps", 10000, "--loop", "--end", 3, 1, "--wait", 2)
    assert job.wait(60.0) == [70, 70]
    stderr = job.stderr(0) + job.stderr(1)
    assert stderr.count("the program ended on this rank after step 3, before it ended on the others") == 1, stderr
    assert stderr.count("error") == 1, stderr
    assert not list(tmp_path.glob("iter_*"))


def test_an_end_on_all_ranks_saves(program: Start, tmp_path: Path) -> None:
    job = program("--save", tmp_path, "--steps", 10000, "--loop", "--end", 3, 0, 1)
    assert job.wait(60.0) == [1, 1]
    assert {job.stderr(rank) for rank in range(2)} == {"the program has seen enough\n"}
    assert latest_iteration(tmp_path) == 3


ERRORS = {
    "point": (("--broken-point", 7), 64, "(index 7 of epoch 0) of the dataset failed: OSError: point 7 cannot be read"),
    "loss": (("--broken-loss", 1, 2), 70, "ZeroDivisionError: the loss is broken"),
    "layout": (("--zero", 4), 64, "Layout(zero=4): ZeRO has the stages 0 to 3"),
    "unlike": (("--unlike",), 93, "4.weight has other values on rank 1 than on rank 0: build the same module on every"),
}


@pytest.mark.wide
@pytest.mark.parametrize("what", wide_except(ERRORS, ["point"]))
def test_an_error_is_reported_once_with_its_code(what: str, program: Start, tmp_path: Path) -> None:
    arguments, code, message = ERRORS[what]
    job = program("--save", tmp_path / "run", "--steps", 20, *arguments, MEGALITE_EXIT_FILE=str(tmp_path / "code"))
    assert job.wait_as_launcher(60.0) == code
    stderr = "".join(job.stderr(rank) for rank in range(2))
    assert stderr.count(message) == 1, stderr
    assert stderr.count("error: ") + stderr.count("error on rank") == 1, stderr
    assert (tmp_path / "code").read_text() == f"{code}\n"
    assert "the program goes on" not in job.stdout(0)
