"""A disk that fails during a save, at each operation in turn: the error is reported, and earlier saves stay intact."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from megalite.errors import CheckpointError
from tests.harness.file_faults import Fault, FileFaults, Moment, Operation, fail_with, write_less
from tests.harness.saved_run import KINDS, Saved, SavedRun, contents, litter

pytestmark = pytest.mark.costly

TAKES_NO_SPACE = ("rename", "replace", "unlink", "remove", "rmdir")


@pytest.fixture(scope="module")
def run() -> SavedRun:
    return SavedRun()


def stay_full(moment: Moment) -> Any:
    """Fail operations that need space."""
    return moment.perform() if moment.operation.name in TAKES_NO_SPACE else fail_with(errno.ENOSPC)(moment)


def failure(run: SavedRun, directory: Path, saved: Saved, kind: str) -> str:
    """Return the message of a save that fails, or an empty one."""
    try:
        run.save(directory, *saved, kind)
    except CheckpointError as error:
        return str(error)
    return ""


def failing_saves(run: SavedRun, folder: Path, saved: Saved, kind: str, fault: Fault, lasting: bool) -> list[Operation]:
    """Let the save fail at each operation in turn; return the operations without an error, whose save must be
    complete."""
    run.save(folder / "before", 1, 1)
    before = contents(folder / "before")
    directory = folder / "failing"

    def attempt(at: int | None) -> tuple[FileFaults, str]:
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(folder / "before", directory)
        with FileFaults(directory, at, fault, lasting=lasting) as faults:
            return faults, failure(run, directory, saved, kind)

    whole = attempt(None)[0].operations
    silent: list[Operation] = []
    for at in itertools.count():
        faults, message = attempt(at)
        if not faults.struck:
            return silent
        moment = f"{faults.operations[at]}, number {at}: {message}"
        found, passed_over = run.newest(directory)
        assert not passed_over, moment
        if message:
            assert f"saving iteration {saved[0]} to {directory} failed: " in message, moment
            assert os.strerror(errno.ENOSPC) in message or os.strerror(errno.EIO) in message, moment
            assert "Free space, or give another folder with --save" in message, moment
            done = faults.operations == whole  # all but the last sync
            assert done or contents(directory) == before, moment
            assert found == (saved if done else (1, 1)), moment
            assert not litter(directory), moment
        else:
            silent.append(faults.operations[at])
            assert found == saved, moment
        run.save(directory, 3, 3, kind)
        assert run.newest(directory) == ((3, 3), ()), moment
        assert not litter(directory), moment
    raise AssertionError


FAULTS = {
    "ENOSPC": (fail_with(errno.ENOSPC), False),
    "EIO": (fail_with(errno.EIO), False),
    "the disk stays full": (stay_full, True),
}
NEXT, AGAIN = (2, 2), (1, 2)
CASES = [
    *itertools.product(["synchronous"], [AGAIN], FAULTS),
    ("asynchronous", AGAIN, "EIO"),
    ("torch_dist", AGAIN, "ENOSPC"),
]
FEW = (("synchronous", AGAIN, "the disk stays full"), ("asynchronous", AGAIN, "EIO"))


@pytest.mark.wide_except("asynchronous-saved3-EIO")
@pytest.mark.parametrize(
    ("kind", "saved", "fault"),
    [
        *(pytest.param(*case, marks=[pytest.mark.wide] * (case not in FEW)) for case in CASES),
        *(pytest.param("synchronous", NEXT, fault, marks=pytest.mark.wide) for fault in FAULTS),
    ],
)
def test_a_failing_disk_is_told_and_costs_nothing(
    run: SavedRun, tmp_path: Path, saved: Saved, kind: str, fault: str
) -> None:
    silent = failing_saves(run, tmp_path, saved, kind, *FAULTS[fault])
    assert {operation.name for operation in silent} <= {"unlink", "rmdir"}, "only clearing away may fail unheard"


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_is_named(run: SavedRun, tmp_path: Path, kind: str) -> None:
    for at in itertools.count():
        with FileFaults(tmp_path, at, fail_with(errno.EIO)) as faults:
            if not (message := failure(run, tmp_path, (1, 1), kind)):
                return
        assert faults.operations[at].path in message


@pytest.mark.wide
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.wide] * (kind != "asynchronous")) for kind in KINDS]
)
def test_a_write_that_writes_less_than_it_was_given_is_gone_on_with(run: SavedRun, tmp_path: Path, kind: str) -> None:
    """The system may write less at any time; it is not an error."""
    for at in itertools.count():
        with FileFaults(tmp_path, at, write_less) as faults:
            run.save(tmp_path, 1, at, kind)
        assert run.newest(tmp_path) == ((1, at), ()), faults.operations[at]
        if not faults.struck:
            return


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_only_folder_is_told_and_stays_as_it_is(run: SavedRun, tmp_path: Path, kind: str) -> None:
    run.save(tmp_path, 1, 1)
    before = contents(tmp_path)
    for iteration in (1, 2):
        with (
            FileFaults(tmp_path, 0, fail_with(errno.EROFS), lasting=True),
            pytest.raises(
                CheckpointError, match=f"saving iteration {iteration} to {tmp_path} failed: .*Read-only file"
            ),
        ):
            run.save(tmp_path, iteration, 2, kind)
        assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_named(run: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"saving iteration 1 to .*/file/run failed: .*Not a directory"):
        run.save(tmp_path / "file" / "run", 1, 1)
