"""STOP, SAVE and PROFILE in a run directory, on a file system and on an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.lifecycle import control_files
from megalite.lifecycle.control_files import ControlFiles
from megalite.lifecycle.startup import identity
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, open_directory


@pytest.fixture(params=["files", "objects"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnyPath:
    for name in ("SECONDS_BETWEEN_LOOKS", "SECONDS_BETWEEN_REQUESTS"):
        monkeypatch.setattr(control_files, name, 0.0)
    return tmp_path if request.param == "files" else open_directory(f"memory://{tmp_path.name}")


def put(path: AnyPath) -> None:
    path.touch() if isinstance(path, Path) else path.put(b"")


def test_a_stop_stays_and_the_others_ask_once(directory: AnyPath) -> None:
    files = ControlFiles(directory, ParallelMesh())
    assert (files.stop(), files.take("SAVE"), files.take("PROFILE")) == (False, False, False)
    for name in ("STOP", "SAVE", "PROFILE"):
        put(directory / name)
    assert [files.stop() for _ in range(2)] == [True, True]
    assert [files.take("SAVE") for _ in range(2)] == [True, False]
    assert [files.take("PROFILE") for _ in range(2)] == [True, False]
    assert (directory / "STOP").is_file()
    assert not (directory / "SAVE").is_file()
    assert not (directory / "PROFILE").is_file()
    put(directory / "PROFILE")
    assert (files.take("SAVE"), files.take("PROFILE")) == (False, True)


def test_what_was_there_before_is_removed_and_told(directory: AnyPath) -> None:
    for name in ("STOP", "SAVE", "PROFILE"):
        put(directory / name)
    files = ControlFiles(directory, ParallelMesh())
    notes = files.clear(identity(directory / "STOP"))
    assert [name in note for name, note in zip(("STOP", "SAVE", "PROFILE"), notes, strict=True)] == [True] * 3
    assert files.clear(None) == ()
    assert (files.stop(), files.take("SAVE"), files.take("PROFILE")) == (False, False, False)


@pytest.mark.parametrize("before", [False, True])
def test_a_stop_that_came_while_the_run_started_stays(before: bool, directory: AnyPath) -> None:
    if before:
        put(directory / "STOP")
    old = identity(directory / "STOP")
    while identity(directory / "STOP") == old:
        put(directory / "STOP")
    files = ControlFiles(directory, ParallelMesh())
    assert files.clear(old) == ()
    assert files.stop()


def test_a_stop_that_comes_while_old_ones_are_looked_for_stays(
    directory: AnyPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_files, "identity", lambda path: None)  # it is not there yet, or not seen
    put(directory / "STOP")
    files = ControlFiles(directory, ParallelMesh())
    assert files.clear(None) == ()
    assert files.stop()


def test_files_are_looked_for_at_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(control_files.time, "monotonic", lambda: now)
    files = ControlFiles(tmp_path, ParallelMesh())
    assert not files.stop()
    (tmp_path / "STOP").touch()
    assert not files.stop()
    now += 1.0
    assert files.stop()


def test_without_a_directory_there_are_none() -> None:
    files = ControlFiles(None, ParallelMesh())
    assert (files.clear(None), files.stop(), files.take("SAVE")) == ((), False, False)


def test_only_rank_0_looks(tmp_path: Path) -> None:
    files = ControlFiles(tmp_path, ParallelMesh(rank=1, world_size=2))
    (tmp_path / "STOP").touch()
    assert (files.clear(identity(tmp_path / "STOP")), files.stop()) == ((), False)
