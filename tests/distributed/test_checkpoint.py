"""What each rank writes of a checkpoint, and failures that every rank sees alike."""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite import checkpoint
from megalite.checkpoint import box_file, directory
from megalite.errors import CheckpointError
from tests.distributed.layout_cell import Cell
from tests.distributed.layout_run import Training, initialized_chunks, make_meshes
from tests.harness.fork_server import RankFailure
from tests.harness.rank_pool import RankPools


def trained(cell: Cell) -> Training:
    """After a step."""
    (mesh,) = make_meshes([cell]).values()
    training = Training(mesh, cell, initialized_chunks(mesh, cell))
    training.step(0)
    return training


def save(cell: Cell, path: Path, iteration: int = 1) -> None:
    trained(cell).save(path, iteration)


@pytest.mark.parametrize("cell", [Cell(dp=4), Cell(dp=4, zero=1), Cell(dp=2, tp=2)], ids=str)
def test_writing_is_shared_equally(rank_pools: RankPools, tmp_path: Path, cell: Cell) -> None:
    rank_pools(4).run(save, cell, tmp_path)
    files = checkpoint.read_manifest(tmp_path / "iter_0000001").files.values()
    sizes = [file.size for file in files]
    assert len(sizes) == 4
    assert max(sizes) < 1.5 * min(sizes)


# ------------------------------------------------------------------------------------------------------ failures


def fail_alone(cell: Cell, path: Path, kind: str) -> tuple[str, str]:
    """Save once, then again with a fault on the last rank; the error of each rank, and what can still be loaded."""
    training = trained(cell)
    training.save(path, 1)
    last = training.mesh.rank == cell.world_size - 1
    try:
        if kind == "full disk":
            with _largest_file(500 if last else resource.RLIM_INFINITY):
                training.save(path, 2)
        elif kind == "damaged file":
            if last:
                shard = path / "iter_0000001" / "rank_00000.safetensors"
                shard.write_bytes(shard.read_bytes()[:-1])
            dist.barrier()
            training.load(path / "iter_0000001")
        elif kind == "another folder":
            checkpoint.find_candidates(path / "elsewhere" if last else path, training.mesh)
        else:
            training.save(path / "elsewhere" if last else path, 2)
    except CheckpointError as error:
        return str(error), str(directory.latest(path))
    return "no error", ""


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("full disk", r"saving iteration 2 to .* failed on rank 3: \[Errno 27\] File too large\nCheckpoints saved"),
        ("damaged file", r"loading .*/iter_0000001 failed on rank 0: .*rank_00000.safetensors: it has"),
        ("another folder", "the ranks do not see the same files in"),
        ("another folder to save", "failed on rank 3: .*No such file or directory"),
    ],
)
def test_a_fault_of_one_rank_is_the_same_error_on_all(
    rank_pools: RankPools, tmp_path: Path, kind: str, message: str
) -> None:
    answers = rank_pools(4).run(fail_alone, Cell(tp=2, dp=2, zero=1), tmp_path, kind)
    if kind != "another folder":
        assert len({error for error, _ in answers}) == 1
    for error, latest in answers:
        assert re.search(message, error), error
        assert latest == str(tmp_path / "iter_0000001")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def die_while_saving(cell: Cell, path: Path) -> None:
    training = trained(cell)
    training.save(path, 1)
    if training.mesh.rank == 1:
        real = box_file.write

        def write_and_die(stream: Any, boxes: Any, closed: Any) -> box_file.Written:
            boxes = list(boxes)
            real(stream, boxes[: len(boxes) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        box_file.write = write_and_die
    training.step(1)
    training.save(path, 2)


def test_a_rank_killed_while_it_writes_costs_only_what_it_wrote(rank_pools: RankPools, tmp_path: Path) -> None:
    cell = Cell(dp=2, zero=1)
    with pytest.raises(RankFailure, match="rank 1 of 2 was killed by SIGKILL"):
        rank_pools(2).run(die_while_saving, cell, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000001"
    assert (tmp_path / "iter_0000002.tmp").exists()

    rank_pools(2).run(load_and_save, cell, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "iter_0000002"
    assert not (tmp_path / "iter_0000002.tmp").exists()


def load_and_save(cell: Cell, path: Path) -> None:
    training = trained(cell)
    training.load(path / "iter_0000001")
    training.save(path, 2)
