"""STOP and SAVE in a run directory, on a file system and on an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint import AnyPath, open_directory
from megalite.parallel.mesh import ParallelMesh
from megalite.training import control_files
from megalite.training.control_files import ControlFiles


@pytest.fixture(params=["files", "objects"])
def directory(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AnyPath:
    for name in ("_SECONDS_BETWEEN_LOOKS", "_SECONDS_BETWEEN_REQUESTS"):
        monkeypatch.setattr(control_files, name, 0.0)
    return tmp_path if request.param == "files" else open_directory(f"memory://{tmp_path.name}")


def put(path: AnyPath) -> None:
    path.touch() if isinstance(path, Path) else path.put(b"")


def test_a_stop_stays_and_a_save_asks_once(directory: AnyPath) -> None:
    files = ControlFiles(directory, ParallelMesh())
    assert (files.stop(), files.save()) == (False, False)
    for name in ("STOP", "SAVE"):
        put(directory / name)
    assert [files.stop() for _ in range(2)] == [True, True]
    assert [files.save() for _ in range(2)] == [True, False]
    assert (directory / "STOP").is_file()
    assert not (directory / "SAVE").is_file()
    put(directory / "SAVE")
    assert files.save()


def test_what_was_there_before_is_removed_and_told(directory: AnyPath) -> None:
    put(directory / "STOP")
    files = ControlFiles(directory, ParallelMesh())
    (note,) = files.clear()
    assert str(directory / "STOP") in note
    assert files.clear() == ()
    assert not files.stop()


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
    assert (files.clear(), files.stop(), files.save()) == ((), False, False)


def test_only_rank_0_looks(tmp_path: Path) -> None:
    files = ControlFiles(tmp_path, ParallelMesh(rank=1, world_size=2))
    (tmp_path / "STOP").touch()
    assert (files.clear(), files.stop()) == ((), False)
