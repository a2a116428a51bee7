"""A crash at any moment of a save: the last good checkpoint is still there, or the new one is, whole."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megalite import checkpoint
from megalite.checkpoint import TrainingState
from megalite.config import OptimizerConfig
from megalite.errors import CheckpointError
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import make_optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import Constant, LogicalTensor

MESH = ParallelMesh()
STATE = TrainingState(iteration=1, consumed_samples=4, optimizer_steps=1)


class Vector(nn.Module):
    def __init__(self, value: float, length: int = 100) -> None:
        super().__init__()
        tensor = LogicalTensor("vector", (length,), Constant(0.0), False)
        self.weight = Parameter(replicated(MESH, tensor, summed=False), torch.float32, torch.device("cpu"))
        self.weight.detach().fill_(value)


def save(directory: Path, value: float, iteration: int) -> Path:
    settings = OptimizerConfig(lr=0.1, optimizer="sgd", sgd_momentum=0.0)
    optimizer = make_optimizer([Vector(value)], MESH, settings, DataParallel(torch.float32))
    return checkpoint.save(directory, replace(STATE, iteration=iteration), optimizer, {"notes": "x" * 600})


def loaded(directory: Path) -> tuple[int, float] | None:
    """Iteration and value of the latest checkpoint."""
    path = checkpoint.latest(directory)
    if path is None:
        return None
    vector = Vector(float("nan"))
    state = checkpoint.load(path, vector, None, MESH)
    (value,) = set(vector.weight.tolist())
    return state.iteration, value


class PowerCut(BaseException):
    """What no `except Exception` catches."""


@contextmanager
def power_cut(directory: Path, at: int) -> Iterator[Callable[[], bool]]:
    """Stop everything at the operating-system call number `at`; what was not synced by then is lost by half.

    Gives a function that tells whether it came to that.
    """
    before = {path.stat().st_ino for path in directory.rglob("*")}
    synced: set[int] = set()
    calls = 0

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if calls == at:
                calls += 1
                for path in directory.rglob("*"):
                    if path.is_file() and path.stat().st_ino not in before | synced:
                        os.truncate(path, path.stat().st_size // 2)
                raise PowerCut
            calls += 1
            result = real(*args, **kwargs)
            if name == "fsync":
                synced.add(os.fstat(args[0]).st_ino)
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open"):
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield lambda: calls > at


@pytest.mark.parametrize(
    ("iteration", "before", "possible"),
    [
        (1, None, {None, (1, 2.0)}),
        (2, 1, {(1, 1.0), (2, 2.0)}),
        (1, 1, {(1, 1.0), (1, 2.0)}),  # the same iteration again
    ],
)
def test_whatever_the_moment_a_whole_checkpoint_is_the_latest(
    tmp_path: Path, iteration: int, before: int | None, possible: set[tuple[int, float] | None]
) -> None:
    seen = set()
    for at in range(100):
        directory = tmp_path / str(at)
        directory.mkdir()
        if before is not None:
            save(directory, 1.0, before)
        try:
            with power_cut(directory, at) as came:
                save(directory, 2.0, iteration)
        except PowerCut:
            pass
        seen.add(loaded(directory))
        assert seen <= possible, f"after a crash at call {at}"

        save(directory, 3.0, 3)
        assert loaded(directory) == (3, 3.0)
        left = {path.name for path in directory.iterdir()} - {"latest_checkpointed_iteration.txt"}
        assert left <= {f"iter_{n:07d}" for n in (1, 2, 3)}, f"left over from a crash at call {at}"
        if not came():
            assert at > 8
            assert seen == possible
            return
    pytest.fail("the save never ended")


def test_a_crash_leaves_what_the_run_saved_before_even_when_two_come_one_after_the_other(tmp_path: Path) -> None:
    """Replacing an iteration is cut off, the next save is cut off while it clears away, and so on."""
    for first in range(20):
        for second in range(12):
            directory = tmp_path / f"{first}.{second}"
            save(directory, 1.0, 1)
            for at, value in ((first, 2.0), (second, 3.0)):
                try:
                    with power_cut(directory, at):
                        save(directory, value, 1)
                except PowerCut:
                    pass
                found = loaded(directory)
                assert found is not None
                assert found in {(1, 1.0), (1, 2.0), (1, 3.0)}, (first, second)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past `size` bytes of a file fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("size", [0, 1, 100, 450, 700])
def test_a_full_disk_ends_in_one_message_and_leaves_nothing_behind(tmp_path: Path, size: int) -> None:
    """In the header of the tensors, in their bytes, in the manifest."""
    save(tmp_path, 1.0, 1)
    before = sorted(tmp_path.rglob("*"))
    with largest_file(size), pytest.raises(CheckpointError) as caught:
        save(tmp_path, 2.0, 2)
    assert f"saving iteration 2 to {tmp_path} failed: [Errno 27] File too large" in str(caught.value)
    assert "Free space, or give another folder with --save" in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before
    assert loaded(tmp_path) == (1, 1.0)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"saving iteration 1 to .*/file/run failed: .*Not a directory"):
        save(tmp_path / "file" / "run", 1.0, 1)
