"""--async-save: the same checkpoints as without it, even with faults while they are written."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.end_to_end.runs import (
    GPT2,
    MOCK,
    PRETRAIN,
    Run,
    assert_same_checkpoint,
    ended,
    iterations,
    latest_iteration,
    metrics,
    saved_tensors,
)
from tests.harness.close import assert_bits_equal
from tests.harness.job import Job

Spawn = Callable[..., Job]

CONSTANT = (*GPT2, "--lr-decay-style", "constant", "--use-distributed-optimizer")

FAULTY = """
import errno, os, runpy, sys, time
from pathlib import Path
from tests.harness.file_faults import FileFaults

def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

def fault(moment):
    path, name = moment.operation.path, moment.operation.name
    if name in ("open", "write", "pwrite") and {concerned}:
        {happens}
    return moment.perform()

FileFaults(Path({directory!r}), 0, fault, lasting=True).__enter__()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def faulty(spawn: Spawn, tmp_path: Path) -> Callable[..., Job]:
    """Start two ranks with --async-save; `happens` runs before files that `concerned` selects are opened or written
    to."""

    def start(directory: Path, *flags: Any, concerned: str, happens: str) -> Job:
        entry = tmp_path / "entry.py"
        entry.write_text(FAULTY.format(directory=str(directory), concerned=concerned, happens=happens))
        return spawn([entry, PRETRAIN, *MOCK, *CONSTANT, "--save", directory, "--async-save", *flags], 2)

    return start


def step(directory: Path, iteration: int) -> Path:
    return directory / f"iter_{iteration:07d}"


def order(text: str, parts: Sequence[str]) -> list[int]:
    """Return the positions of the parts; assert that each is there."""
    for part in parts:
        assert part in text, f"{part!r} is missing in:\n{text}"
    return [text.index(part) for part in parts]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of 7 steps that saves each step without --async-save."""
    folder = tmp_path_factory.mktemp("whole")
    flags = ["--train-iters", 7, "--save", folder / "run", "--save-interval", 1]
    with Job([PRETRAIN, *MOCK, *CONSTANT, *map(str, flags)], 2, folder / "job") as job:
        ended(job)
    return folder / "run"


def test_what_is_saved_in_the_background_is_what_is_saved_at_once(run: Run, whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = [*CONSTANT, "--save", directory, "--async-save", "--resume", "auto", "--save-interval", 2]
    out = run(*flags, "--train-iters", 7, "--exit-interval", 3, world_size=2, expected=85).stdout
    assert "asynchronous saves: " in out
    run(*flags, "--train-iters", 7, world_size=2)
    for iteration in (2, 3, 4, 6, 7):
        assert_same_checkpoint(step(directory, iteration), step(whole, iteration))
    assert metrics(directory) == metrics(whole)


@pytest.mark.wide
def test_so_are_files_for_torch(run: Run, whole: Path, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = [*CONSTANT, "--save", directory, "--async-save", "--resume", "auto", "--save-interval", 2]
    run(*flags, "--ckpt-format", "torch_dist", "--train-iters", 4, world_size=2)
    for iteration in (2, 4):
        dcp_to_torch_save(step(directory, iteration), tmp_path / "tensors.pt")
        tensors, expected = torch.load(tmp_path / "tensors.pt"), saved_tensors(step(whole, iteration))
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            assert_bits_equal(tensors[name], tensor, name)
    run(*flags, "--train-iters", 5, world_size=2)
    assert_same_checkpoint(step(directory, 5), step(whole, 5))


def test_a_failure_in_the_background_is_told_while_training_goes_on(
    faulty: Callable[..., Job], whole: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    flags = ["--train-iters", 7, "--save-interval", 3]
    concerned = "'iter_0000003.tmp' in path and os.environ['RANK'] == '1'"
    out = ended(faulty(directory, *flags, concerned=concerned, happens="full()")).stdout
    places = order(out, ["step 3/7", "failed on rank 1: ", "step 6/7", f"saved {step(directory, 6)}"])
    assert places == sorted(places)
    assert "Training continues, unsaved: failure 1 of 2" in out
    assert sorted(path.name for path in directory.glob("iter_*")) == ["iter_0000006", "iter_0000007"]
    assert_same_checkpoint(step(directory, 6), step(whole, 6))
    assert_same_checkpoint(step(directory, 7), step(whole, 7))


@pytest.mark.wide
def test_the_last_save_is_not_tolerated_to_fail(faulty: Callable[..., Job], tmp_path: Path) -> None:
    directory = tmp_path / "run"
    flags = ["--train-iters", 4, "--save-interval", 3, "--tolerated-save-failures", 9]
    job = faulty(directory, *flags, concerned="'iter_0000004.tmp' in path", happens="full()")
    error = ended(job, expected=93).stderr
    assert f"error: saving iteration 4 to {directory} failed on " in error
    assert "No space left on device" in error
    assert "Traceback" not in error
    assert latest_iteration(directory) == 3
    assert sorted(path.name for path in directory.glob("iter_*")) == ["iter_0000003"]
    assert not (directory / "DONE").exists()


@pytest.mark.wide
def test_a_stop_while_one_is_written_leaves_two_that_are_whole(
    faulty: Callable[..., Job], run: Run, tmp_path: Path
) -> None:
    directory, whole = tmp_path / "run", tmp_path / "whole"
    flags = ["--train-iters", 100000, "--save-interval", 3]
    job = faulty(directory, *flags, concerned="'iter_0000003.tmp' in path", happens="time.sleep(0.2)")
    job.wait_for_output(0, "step      4/100000")
    assert not step(directory, 3).exists()
    job.kill_all(signal.SIGTERM)
    out = ended(job, expected=85).stdout
    last = latest_iteration(directory)
    places = order(out, ["step      4/100000", f"saved {step(directory, 3)}", f"saved {step(directory, last)}"])
    assert places == sorted(places)
    assert iterations(directory) == list(range(1, last + 1))
    run(*CONSTANT, "--train-iters", last, "--save", whole, "--save-interval", 3, world_size=2)
    for iteration in (3, last):
        assert_same_checkpoint(step(directory, iteration), step(whole, iteration))


@pytest.mark.wide
def test_a_disk_that_is_full_until_the_failed_save_is_removed_does_not_end_the_run(
    faulty: Callable[..., Job], whole: Path, tmp_path: Path
) -> None:
    """The checkpoint takes the disk space that metrics need, too."""
    directory = tmp_path / "run"
    flags = ["--train-iters", 7, "--save-interval", 3, "--tensorboard-dir", directory / "events"]
    concerned = f"os.path.exists({str(step(directory, 3))!r} + '.tmp')"
    slow = "if '.safetensors' in path: time.sleep(0.3)\n        full()"
    out = ended(faulty(directory, *flags, concerned=concerned, happens=slow)).stdout
    places = order(out, ["step 4/7", "WARNING: saving iteration 3 to", f"saved {step(directory, 6)}"])
    assert places == sorted(places)
    assert "WARNING: writing metrics to" in out
    assert metrics(directory) == metrics(whole)
    assert_same_checkpoint(step(directory, 7), step(whole, 7))
