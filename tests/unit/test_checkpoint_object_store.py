"""Checkpoints on an object store: no rename, no append; a crash at any moment, a store that fails, and left-overs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

from megalite import checkpoint, storage
from megalite.checkpoint import directory
from megalite.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from megalite.parallel.mesh import ParallelMesh
from megalite.storage import AnyPath, ObjectPath, open_directory
from tests.harness.object_store import ObjectStore
from tests.harness.saved_run import SavedRun

TRACKER = "latest_checkpointed_iteration.txt"
REPLACED = [
    (1, None, {None, (1, 2.0)}),
    (2, 1, {(1, 1.0), (2, 2.0)}),
    (1, 1, {(1, 1.0), (1, 2.0)}),  # the same iteration again
]


MESH = ParallelMesh()


class PowerCut(BaseException):
    """Exception that no `except Exception` catches."""


@cache
def small_run() -> SavedRun:
    return SavedRun()


def save(directory: AnyPath, value: float, iteration: int) -> None:
    small_run().save(directory, iteration, int(value))


def loaded(directory: AnyPath) -> tuple[int, float] | None:
    """Return iteration and value of the latest checkpoint."""
    path = checkpoint.latest(directory)
    return None if path is None else small_run().load(path)


def objects(folder: Path) -> ObjectPath:
    path = open_directory(f"objects://{folder}")
    assert isinstance(path, ObjectPath)
    return path


@contextmanager
def failing(at: int, error: type[BaseException]) -> Iterator[Callable[[], bool]]:
    """Fail every change from number `at` on. Yields a function that tells whether it was reached."""
    changes = 0

    def before_change(what: str, name: str) -> None:
        nonlocal changes
        changes += 1
        if changes > at:
            raise error(f"{what} {name}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ObjectStore, "before_change", staticmethod(before_change))
        yield lambda: changes > at


def assert_nothing_left_over(folder: Path) -> None:
    for path in folder.glob("iter_*"):
        named = json.loads((path / "manifest.json").read_text())["files"]
        assert {file.name for file in path.iterdir()} == {"manifest.json", *named}
    assert {path.name for path in folder.iterdir() if not path.name.startswith("iter_")} == {TRACKER}


@pytest.mark.wide_except("2-1-possible1-PowerCut", "2-1-possible1-RuntimeError")
@pytest.mark.parametrize("error", [PowerCut, RuntimeError])
@pytest.mark.parametrize(("iteration", "before", "possible"), REPLACED)
def test_whatever_the_moment_a_whole_checkpoint_is_the_latest(
    tmp_path: Path,
    iteration: int,
    before: int | None,
    possible: set[tuple[int, float] | None],
    error: type[BaseException],
) -> None:
    """The machine stops, or the store fails with an error of its client."""
    seen = set()
    for at in range(10):
        folder = tmp_path / str(at)
        run = objects(folder)
        if before is not None:
            save(run, 1.0, before)
        with failing(at, error) as came, suppress(PowerCut, CheckpointError):
            save(run, 2.0, iteration)
        seen.add(loaded(run))
        assert seen <= possible, f"after a failure of change {at}"

        save(run, 3.0, iteration if at % 2 else 3)
        assert loaded(run) == (iteration if at % 2 else 3, 3.0)
        assert_nothing_left_over(folder)
        if not came():
            assert at >= 3
            assert seen == possible
            return
    pytest.fail("the save never ended")


def test_a_failure_ends_in_one_message_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run = objects(tmp_path / "run")
    save(run, 1.0, 1)

    def no_more_tensors(what: str, name: str) -> None:
        if name.endswith(".safetensors") and what == "put":
            raise RuntimeError("SlowDown")

    before = sorted(tmp_path.rglob("*"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as caught:
        patch.setattr(ObjectStore, "before_change", staticmethod(no_more_tensors))
        save(run, 2.0, 2)
    problem = f"saving iteration 2 to {run} failed: [Errno 71] RuntimeError: SlowDown: '{run}/iter_0000002/rank_00000."
    assert str(caught.value).startswith(problem)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_that_the_store_has_but_says_it_has_not_stays_whole(tmp_path: Path) -> None:
    """The answer to the last request is lost: the objects that the manifest names must not be removed."""
    run = objects(tmp_path / "run")
    save(run, 1.0, 1)
    put = ObjectStore.pipe_file

    def put_and_fail(store: ObjectStore, path: str, data: bytes) -> None:
        put(store, path, data)
        raise TimeoutError("no answer")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="no answer"):
        patch.setattr(ObjectStore, "pipe_file", put_and_fail)
        save(run, 2.0, 1)
    assert loaded(run) == (1, 2.0)
    save(run, 3.0, 2)
    assert loaded(run) == (2, 3.0)
    assert_nothing_left_over(tmp_path / "run")


def test_what_comes_late_from_a_dead_save_changes_nothing(tmp_path: Path) -> None:
    run, folder = objects(tmp_path / "run"), tmp_path / "run/iter_0000001"
    with failing(1, PowerCut), suppress(PowerCut):
        save(run, 1.0, 1)
    (late,) = folder.iterdir()
    content = late.read_bytes()
    save(run, 2.0, 1)
    assert not late.exists()
    late.write_bytes(content)
    assert loaded(run) == (1, 2.0)
    save(run, 3.0, 2)
    assert not late.exists()
    assert_nothing_left_over(tmp_path / "run")


def test_a_copy_of_a_folder_is_loaded_and_replaced(tmp_path: Path) -> None:
    """Checkpoints may be copied between a file system and a store, in both directions."""
    save(tmp_path / "run", 1.0, 1)
    run = objects(tmp_path / "run")
    assert loaded(run) == (1, 1.0)
    save(run, 2.0, 1)
    assert loaded(run) == loaded(tmp_path / "run") == (1, 2.0)
    assert_nothing_left_over(tmp_path / "run")
    save(tmp_path / "run", 3.0, 1)
    assert loaded(run) == loaded(tmp_path / "run") == (1, 3.0)
    assert_nothing_left_over(tmp_path / "run")


@pytest.mark.parametrize("name", ["notes.txt", "__0_0.distcp"])
def test_what_is_not_ours_is_not_touched(tmp_path: Path, name: str) -> None:
    """A Megatron checkpoint has such a folder, too."""
    for iteration in (1, 2):
        path = tmp_path / f"run/iter_000000{iteration}" / name
        path.parent.mkdir(parents=True)
        path.write_text("precious")
    with pytest.raises(CheckpointError, match="iter_0000001 already exists and is not a checkpoint of this program"):
        save(objects(tmp_path / "run"), 1.0, 1)
    save(objects(tmp_path / "run"), 1.0, 3)
    assert path.read_text() == "precious"


def test_retention_takes_the_manifest_first(tmp_path: Path) -> None:
    run = objects(tmp_path / "run")
    for iteration in range(1, 6):
        save(run, float(iteration), iteration)
    with failing(1, RuntimeError):
        (note, *_) = checkpoint.remove_old(run, 2)
    assert "iter_0000003 could not be removed (RuntimeError: remove" in note
    assert directory.iterations(run) == [1, 2, 4, 5]
    assert checkpoint.remove_old(run, 2) == ()
    assert directory.iterations(run) == [2, 4, 5]
    save(run, 6.0, 6)
    assert sorted(path.name for path in (tmp_path / "run").glob("iter_*")) == [f"iter_000000{n}" for n in (2, 4, 5, 6)]


# ------------------------------------------------------------------------------------------------------ reading


def newest(run: ObjectPath) -> tuple[int, tuple[str, ...]]:
    def use(path: AnyPath) -> None:
        checkpoint.check_whole(path, MESH)
        checkpoint.load(path, small_run().network, small_run().optimizer, MESH)

    path, _, damaged = checkpoint.newest_whole(checkpoint.find_candidates(run, MESH).paths, use)
    return checkpoint.iteration_of(path), damaged


def test_damage_falls_back_and_a_store_that_does_not_answer_does_not(tmp_path: Path) -> None:
    run = objects(tmp_path / "run")
    for iteration in (1, 2):
        save(run, 1.0, iteration)
    assert newest(run) == (2, ())
    assert directory.resolve(run) == run / "iter_0000002"
    assert directory.resolve(run / "iter_0000001") == run / "iter_0000001"
    (found,) = checkpoint.find_iteration(run, 1, MESH, "--ckpt-step 1").paths
    assert found.url == f"{run}/iter_0000001"
    for method in ("ls", "info", "_open", "cat_file"):

        def fail(*_: object, **__: object) -> None:
            raise ConnectionError("no route")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ObjectStore, method, fail)
            with pytest.raises(CheckpointError, match="no route") as caught:
                newest(run)
            if method in ("ls", "info"):
                with pytest.raises(CheckpointError, match="no route"):
                    directory.iterations(run)
        assert not isinstance(caught.value, CorruptCheckpointError), method
    (file,) = (tmp_path / "run/iter_0000002").glob("rank_*")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    iteration, (problem,) = newest(run)
    assert iteration == 1
    assert f"{file.name}: it has {size - 1} bytes of {size}" in problem
    file.unlink()
    assert f"{file.name}: it is missing" in newest(run)[1][0]
    (tmp_path / "run/iter_0000002/manifest.json").unlink()
    assert "has no manifest.json" in newest(run)[1][0], "the tracker names it"


def test_an_object_is_read_as_a_file_is(tmp_path: Path) -> None:
    path = objects(tmp_path / "bucket") / "object"
    data = bytes(range(256))
    with storage.create(path) as file:
        for start in range(0, 256, 64):
            file.write(memoryview(data)[start : start + 64])
    assert path.stat().st_size == 256
    assert path.read_bytes() == data
    for start, stop in ((0, 8), (200, 256), (3, 103), (250, 260)):
        assert path.read_bytes(start, stop) == data[start:stop]
    assert path.parent.listing() == {"object": 256}


@pytest.mark.parametrize("error", [PowerCut, RuntimeError])
def test_what_fails_while_it_is_written_is_no_object(tmp_path: Path, error: type[BaseException]) -> None:
    path = objects(tmp_path / "bucket") / "object"
    with suppress(error), storage.create(path) as file:
        file.write(b"half of")
        raise error
    del file  # with what a client would upload when it is collected
    assert path.parent.listing() == {}
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        path.read_bytes()


def test_the_store_of_one_process_that_comes_with_fsspec() -> None:
    run = open_directory("memory://bucket/run/")
    assert str(run) == "memory://bucket/run"
    assert directory.latest(run) is None
    for iteration, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        save(run, value, iteration)
    assert loaded(run) == (2, 3.0)
    assert directory.iterations(run) == [1, 2]
    assert len(list((run / "iter_0000002").iterdir())) == 2


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file:///tmp/run", "give the path itself, /tmp/run"),
        ("nosuch://bucket/run", "cannot be used: Protocol not known: nosuch"),
        ("simplecache::s3://bucket/run", "a URL here is one protocol"),
        ("memory://bucket/run[1]", "without any of"),
    ],
)
def test_urls_that_cannot_be(url: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{problem}"):
        open_directory(url)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "adlfs", None)  # as if it were not installed
    with pytest.raises(ConfigurationError, match=r"abfs://container/run needs .* not installed: pip install adlfs"):
        open_directory("abfs://container/run")


def test_a_note_says_that_nothing_locks_it(tmp_path: Path) -> None:
    run = objects(tmp_path)
    with checkpoint.only_run(run, MESH) as notes:
        assert notes == (f"note: {run} is an object store, without locks: make sure that no other run saves there",)
