"""Selection of the checkpoint to load if some are damaged, retention, and the lock, on real files."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite import checkpoint
from megalite.checkpoint import manifest
from megalite.checkpoint.manifest import SavedFile
from megalite.config.optimizer import OptimizerConfig
from megalite.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from megalite.optim.optimizer import Optimizer
from tests.unit.test_checkpoint import ADAM, MESH, MODEL, STATE, bits, build, same, save

pytestmark = pytest.mark.costly

SGD = OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0)
FILES = ("manifest.json", "rank_00000.safetensors")


def save_each(directory: Path, *iterations: int) -> list[Path]:
    """Save a checkpoint of each iteration, each with its own values."""
    return [save(directory, *build(seed=n), replace(STATE, iteration=n)) for n in iterations]


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def add_a_byte(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: tuple[Callable[[Path], None], ...] = (flip_a_bit, cut_off, add_a_byte, empty, Path.unlink)


def load_newest(directory: Path) -> tuple[Path, int, tuple[str, ...]]:
    """Return the folder and seed of the loaded checkpoint, and the problems of newer ones."""
    network, optimizer = build(seed=99)

    def use(path: Path) -> None:
        checkpoint.check_whole(path, MESH)
        checkpoint.load(path, network, optimizer, MESH)

    path, _, damaged = checkpoint.newest_whole(checkpoint.find_candidates(directory, MESH).paths, use)
    seed = checkpoint.iteration_of(path)
    assert same(bits(network, optimizer), bits(*build(seed=seed))), "another's values"
    return path, seed, damaged


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("three")
    save_each(directory, 4, 8, 12)
    return directory


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        pytest.param(damage, file, id=f"{damage.__name__}-{file}", marks=[pytest.mark.wide] * ((i + j) % 2))
        for i, damage in enumerate(DAMAGES)
        for j, file in enumerate(FILES)
    ],
)
def test_the_newest_whole_one_is_loaded(three: Path, tmp_path: Path, damage: Callable[[Path], None], file: str) -> None:
    if (damage, file) == (add_a_byte, "manifest.json"):
        damage = empty  # JSON ends where it ends
    directory = tmp_path / "run"
    shutil.copytree(three, directory)
    assert load_newest(directory) == (directory / "iter_0000012", 12, ())
    for newest, older in ((12, 8), (8, 4)):
        damage(directory / f"iter_{newest:07d}" / file)
        before = contents(directory)
        path, seed, damaged = load_newest(directory)
        assert seed == older
        assert len(damaged) == (12 - older) // 4
        assert f"iter_{newest:07d}" in damaged[-1]
        lines = checkpoint.fall_back_notes(directory / "iter_0000012", path, damaged)
        assert f"fell back to {path}: {12 - older} steps are repeated from step {older} on" in lines[0]
        assert [line.strip() for line in lines[1:]] == list(damaged)
        assert contents(directory) == before, "what is damaged is evidence"
    damage(directory / "iter_0000004" / file)
    with pytest.raises(CheckpointError) as raised:
        load_newest(directory)
    assert all(f"iter_{n:07d}" in str(raised.value) for n in (4, 8, 12))


def test_damage_is_believed_when_it_is_seen_twice(three: Path) -> None:
    seen: list[Path] = []

    def fails_once(path: Path) -> str:
        seen.append(path)
        if len(seen) == 1:
            raise CorruptCheckpointError("a bit fell over on the way")
        return "loaded"

    newest = three / "iter_0000012"
    assert checkpoint.newest_whole([newest, three / "iter_0000008"], fails_once) == (newest, "loaded", ())
    assert seen == [newest, newest]


def test_what_is_not_damage_is_no_reason_to_fall_back(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = checkpoint.find_candidates(three, MESH).paths
    other = build(replace(MODEL, hidden_size=16))
    with pytest.raises(CheckpointError, match="has shape") as raised:
        checkpoint.newest_whole(paths, lambda path: checkpoint.load(path, *other, MESH))
    assert not isinstance(raised.value, CorruptCheckpointError)
    for number, damaged in ((errno.EACCES, False), (errno.EMFILE, False), (errno.EIO, True)):
        error = OSError(number, os.strerror(number))

        def fail(*_: object, error: OSError = error, **__: object) -> str:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(manifest, "read_small", fail)
            with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
                checkpoint.read_manifest(paths[0])
        assert isinstance(caught.value, CorruptCheckpointError) == damaged


def test_a_damaged_one_stands_aside_until_its_step_is_saved_again(tmp_path: Path) -> None:
    for file in FILES:
        directory = tmp_path / file
        (path,) = save_each(directory, 4)
        (path / file).unlink()
        save(directory, *build(seed=4), replace(STATE, iteration=4))
        assert load_newest(directory)[1] == 4


# ------------------------------------------------------------------------------------------------------ parts


def test_weights_alone_are_saved_and_loaded_under_any_optimizer(tmp_path: Path) -> None:
    network, optimizer = build(dtype=torch.bfloat16)
    path = save(tmp_path, network, optimizer, state=False)
    assert {name.split("/")[0] for name in checkpoint.read_manifest(path).tensors} == {"model"}
    full = save(tmp_path, network, optimizer, replace(STATE, iteration=8))
    for source in (path, full):
        other, made = build(dtype=torch.bfloat16, seed=1)
        assert checkpoint.load(source, other, made, MESH, state=False) == checkpoint.read_manifest(source).training
        assert same(bits(network, None), bits(other, None))
        assert made.steps == 0
        for part in made.slices():
            assert torch.equal(part.state.pop("master"), part.values.float())
            assert not any(values.any() for values in part.state.values()), "the optimizer begins anew"
    with pytest.raises(CheckpointError, match=r"only weights, .* --no-load-optim continues with a new optimizer"):
        checkpoint.load(path, *build(dtype=torch.bfloat16), MESH)


def masters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [part.state.get("master", part.values).clone() for part in optimizer.slices()]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("optimizer", "state"),
    [
        pytest.param(optimizer, state, id=f"{name}-{state}", marks=[pytest.mark.wide] * ((name == "adam") != state))
        for name, optimizer in (("adam", ADAM), ("sgd", SGD))
        for state in (True, False)
    ],
)
def test_casts_round_once_from_the_finest_values(tmp_path: Path, state: bool, optimizer: OptimizerConfig) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for before in dtypes:
        network, made = build(optimizer=optimizer, dtype=before)
        for part in made.slices():
            part.values.copy_(part.state.get("master", part.values))  # as after a step
        path = save(tmp_path / str(before), network, made)
        finest = masters(made)
        for after in dtypes:
            other, remade = build(optimizer=optimizer, dtype=after, seed=1)
            if before != after:
                with pytest.raises(CheckpointError):
                    checkpoint.load(path, other, remade, MESH, state=state)
            checkpoint.load(path, other, remade, MESH, state=state, casts=True)
            ours = masters(remade)
            exact = all(torch.equal(a.float(), b.float()) for a, b in zip(ours, finest, strict=True))
            assert exact, f"{before} to {after}"
            for part, fine in zip(remade.slices(), finest, strict=True):
                assert torch.equal(part.values, fine.to(after))
    with pytest.raises(CheckpointError, match=r"start the run with --fp16, or give --load-casts"):
        checkpoint.load(path, *build(optimizer=optimizer), MESH, state=False)


# ------------------------------------------------------------------------------------------------------ retention


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(1, 20), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sets(st.integers(1, 20)),
    st.integers(0, 7),
)
def test_the_newest_two_whole_ones_and_every_kth_stay(
    iterations: set[int], interval: int, damaged: set[int], back: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        source = _tiny(directory)
        for iteration in iterations:
            shutil.copytree(source, directory / f"iter_{iteration:07d}")
            if iteration in damaged:
                (directory / f"iter_{iteration:07d}" / "rank_00000.safetensors").unlink()
        shutil.rmtree(source)
        (directory / "iter_0000003.other").mkdir()
        named = sorted(iterations, reverse=True)[min(back, len(iterations) - 1)]
        (directory / "latest_checkpointed_iteration.txt").write_text(f"{named}\n")

        assert checkpoint.remove_old(directory, interval) == ()

        whole = [n for n in sorted(iterations, reverse=True) if n <= named and n not in damaged]
        removed = {n for n in whole[2:] if n % interval}
        left = {int(path.name[5:]) for path in directory.glob("iter_*[0-9]")}
        assert left == iterations - removed
        assert named in left
        assert (directory / "iter_0000003.other").is_dir()


def _tiny(directory: Path) -> Path:
    """Make a checkpoint with the files that retention reads: a manifest and its one file."""
    path = directory / "source"
    path.mkdir()
    (path / "rank_00000.safetensors").write_bytes(b"12345")
    tiny = checkpoint.Manifest(STATE, {}, {"rank_00000.safetensors": SavedFile(5, zlib.crc32(b"12345"))}, {})
    (path / "manifest.json").write_text(tiny.to_json())
    return path


def test_what_cannot_be_removed_is_told_and_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_each(tmp_path, 1, 2, 3, 4)

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        notes = checkpoint.remove_old(tmp_path, 100)
    assert [note.split("/")[-1] for note in notes] == [
        "iter_0000002 could not be removed (Permission denied): remove it by hand",
        "iter_0000001 could not be removed (Permission denied): remove it by hand",
    ]
    with monkeypatch.context() as patch:  # cut off between its two steps
        patch.setattr(shutil, "rmtree", refuse)
        assert len(checkpoint.remove_old(tmp_path, 100)) == 2
    assert [path.name for path in checkpoint.find_candidates(tmp_path, MESH).paths] == ["iter_0000004", "iter_0000003"]
    save_each(tmp_path, 5)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{n:07d}" for n in (3, 4, 5)]


# ------------------------------------------------------------------------------------------------------ the lock


def test_one_run_at_a_time(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    with checkpoint.only_run(directory, MESH) as notes:
        assert notes == ()
        with pytest.raises(ConfigurationError) as raised, checkpoint.only_run(directory, MESH):
            pytest.fail("two at once")
        assert f"--save {directory} (process {os.getpid()} on {os.uname().nodename}, since 20" in str(raised.value)
        assert str(os.getpid()) in (directory / "lock").read_text(), "the refused one leaves the name of the other"
    assert (directory / "lock").read_text() == ""
    with checkpoint.only_run(directory, MESH):
        pass


def test_what_a_killed_save_has_left_goes_before_anything_is_written(tmp_path: Path) -> None:
    """Remove leftover files first, since they may be the reason for a full disk."""
    whole, left = tmp_path / "iter_0000004.replaced", tmp_path / "iter_0000008.tmp"
    for folder in (whole, left):
        folder.mkdir()
        (folder / "manifest.json").write_text("{}")
    with checkpoint.only_run(tmp_path, MESH):
        assert not left.exists()
        assert (tmp_path / "iter_0000004").is_dir()


def test_a_dead_run_holds_nothing(tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        held = checkpoint.only_run(tmp_path, MESH)
        held.__enter__()
        os.kill(os.getpid(), 9)
    os.waitpid(process, 0)
    assert f"process {process} on" in (tmp_path / "lock").read_text()
    with checkpoint.only_run(tmp_path, MESH):
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()


def test_workers_of_a_dead_run_hold_nothing(tmp_path: Path) -> None:
    """Worker processes of a dataset live on for some seconds after a kill -9 of their parent."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        held = checkpoint.only_run(tmp_path, MESH)
        held.__enter__()
        worker = os.fork()
        if worker == 0:
            os.write(writing, b"%d" % os.getpid())
            time.sleep(60.0)
            os._exit(0)
        os.waitpid(worker, 0)
    worker = int(os.read(reading, 16))
    try:
        with pytest.raises(ConfigurationError), checkpoint.only_run(tmp_path, MESH):
            pytest.fail("the worker has released the lock of its parent")
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        with checkpoint.only_run(tmp_path, MESH):
            os.kill(worker, 0)  # it still runs
    finally:
        os.kill(worker, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_a_file_system_without_locks_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with checkpoint.only_run(tmp_path, MESH) as notes:
        assert "has no locks (No locks available): make sure that no other run saves there" in notes[0]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(CheckpointError, match=r"preparing the run directory --save .*/file/run failed"),
        checkpoint.only_run(tmp_path / "file" / "run", MESH),
    ):
        pytest.fail("there is none")


@pytest.mark.parametrize(("number", "advice"), [(errno.ENOSPC, "Free space there, or give"), (errno.EACCES, "Give")])
def test_a_run_directory_that_cannot_be_made_is_answered_with_what_helps(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(CheckpointError, match=f"\n{advice} another --save$"):
        checkpoint.only_run(tmp_path / "run", MESH).__enter__()
