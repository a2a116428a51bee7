"""Files that each rank writes for a checkpoint, and failures that every rank reports alike."""

from __future__ import annotations

import re
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from megalite import checkpoint
from megalite.checkpoint import Saver, TrainingState, directory, shard_file
from megalite.checkpoint.plan import saved_regions
from megalite.checkpoint.transaction import FolderTransaction
from megalite.config import CheckpointConfig
from megalite.errors import CheckpointError, CorruptCheckpointError
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.mesh import ParallelMesh
from megalite.training.checkpoints import Checkpoints
from megalite.training.display import Display
from tests.distributed.layout_cell import Cell
from tests.distributed.layout_run import Training, initialized_chunks, make_meshes
from tests.harness.checkpoints import counted_bytes
from tests.harness.rank_pool import RankPools


def trained(cell: Cell) -> Training:
    """Return a training after one step."""
    (mesh,) = make_meshes([cell]).values()
    training = Training(mesh, cell, initialized_chunks(mesh, cell))
    training.step(0)
    return training


def save(cell: Cell, path: Path, iteration: int = 1) -> None:
    trained(cell).save(path, iteration)


@pytest.mark.wide_except("dp=4, zero=3, instances=2")
@pytest.mark.parametrize(
    "cell",
    [
        Cell(dp=4, zero=1),
        Cell(dp=4, zero=3, instances=2),
        *(pytest.param(cell, marks=pytest.mark.wide) for cell in (Cell(dp=4), Cell(dp=2, tp=2))),
    ],
    ids=str,
)
def test_writing_is_shared_equally(rank_pools: RankPools, tmp_path: Path, cell: Cell) -> None:
    rank_pools(4).run(save, cell, tmp_path)
    files = checkpoint.read_manifest(tmp_path / "iter_0000001").files.values()
    sizes = [file.size for file in files]
    assert len(sizes) == 4
    assert max(sizes) < 1.3 * min(sizes)  # in so small a model, headers and padding matter


def test_the_copies_of_a_tied_weight_share_in_writing_it(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools(2).run(save, Cell(pp=2), tmp_path)
    boxes = checkpoint.read_manifest(tmp_path / "iter_0000001").tensors["model/embedding.word"].boxes
    by_file = {file: sum(saved.box.numel for saved in boxes if saved.file == file) for file in {b.file for b in boxes}}
    assert len(by_file) == 2
    assert max(by_file.values()) - min(by_file.values()) <= 64  # parameters are aligned


# ------------------------------------------------------------------------------------------------------ reading


def count_what_is_read(cell: Cell, path: Path, *, own_nodes: bool) -> int:
    """Return the bytes of tensors that this rank reads in a load."""
    training = trained(cell)
    with counted_bytes() as read, pytest.MonkeyPatch.context() as patch:
        if own_nodes:
            patch.setenv("SLURMD_NODENAME", f"node-{training.mesh.rank}")
        training.load(path)
    return sum(read)


@pytest.mark.wide_except("tp=2, dp=2, zero=1")
@pytest.mark.parametrize(
    "cell",
    [
        Cell(dp=2),
        Cell(tp=2, dp=2, zero=1),
        *(pytest.param(cell, marks=pytest.mark.wide) for cell in (Cell(tp=2), Cell(pp=2, dp=2))),
    ],
    ids=str,
)
def test_each_byte_is_read_once_a_node(rank_pools: RankPools, tmp_path: Path, cell: Cell) -> None:
    save(Cell(), tmp_path)
    path = tmp_path / "iter_0000001"
    tensors = checkpoint.read_manifest(path).tensors.values()
    everything = sum(saved.stop - saved.start for tensor in tensors for saved in tensor.boxes)
    pool = rank_pools(cell.world_size)
    assert sum(pool.run(partial(count_what_is_read, own_nodes=False), cell, path)) == everything
    assert sum(pool.run(partial(count_what_is_read, own_nodes=True), cell, path)) > everything


# ------------------------------------------------------------------------------------------------ in the background


def save_in_the_background(cell: Cell, path: Path) -> list[str]:
    """Save twice, the second time with a full disk on the last rank; return the result of each save."""
    training = trained(cell)
    last = training.mesh.rank == cell.world_size - 1
    saver = Saver(path, training.optimizer, training.plan, asynchronous=True)
    assert saver.staging is not None
    memory = saver.staging.size
    told = []
    for iteration in (1, 2, 3, 4):
        with _largest_file(500 if last and iteration == 2 else resource.RLIM_INFINITY):
            saver.begin(TrainingState(iteration, 4 * iteration, 1), {"model": {}})
            training.step(iteration)
            told.append(str(directory.latest(path)))
            if iteration == 3:
                continue  # the next save begins after it
            try:
                while (saved := saver.advance()) is None:
                    pass
                told.append(str(saved))
            except CheckpointError as error:
                told.append(str(error).splitlines()[0])
    assert saver.staging.size == memory
    saver.close()
    return told


def test_saves_in_the_background_come_one_after_the_other_and_fail_on_all(
    rank_pools: RankPools, tmp_path: Path
) -> None:
    answers = rank_pools(2).run(save_in_the_background, Cell(dp=2, zero=1), tmp_path)
    first, third, fourth = (str(tmp_path / f"iter_{n:07d}") for n in (1, 3, 4))
    failure = f"saving iteration 2 to {tmp_path} failed on rank 1: [Errno 27] File too large"
    for before, saved, during, failed, later, much_later, at_last in answers:
        assert (before, saved) == ("None", first)
        assert (during, later) == (first, first)
        assert failed.startswith(failure)
        assert (much_later, at_last) == (third, fourth)
    assert {path.name for path in tmp_path.glob("iter_*")} == {f"iter_{n:07d}" for n in (1, 3, 4)}


def bits(training: Training) -> dict[str, bytes]:
    """Return the bits of everything that this rank saves, by name."""
    return {
        region.part.entry: bytes(shard_file.bytes_of(region.values)) for region in saved_regions(training.optimizer)
    }


def test_a_save_in_the_background_is_of_the_moment_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer waits until a step has changed everything."""
    training, state = trained(Cell()), TrainingState(1, 4, 1)
    at_the_start = bits(training)
    may_write, real = Event(), shard_file.write

    def late(*arguments: Any) -> list[shard_file.Checksums]:
        assert may_write.wait(timeout=20)
        return real(*arguments)

    monkeypatch.setattr(shard_file, "write", late)
    saver = Saver(tmp_path, training.optimizer, training.plan, asynchronous=True)
    saver.begin(state, {"model": {}})
    training.step(1)
    changed = bits(training)
    assert all(changed[name] != values for name, values in at_the_start.items())
    assert saver.busy
    may_write.set()
    while (path := saver.advance()) is None:
        pass
    saver.close()

    assert isinstance(path, Path)
    loaded = Training(training.mesh, Cell(), initialized_chunks(training.mesh, Cell()))
    assert loaded.load(path) == state
    found = bits(loaded)
    assert found.keys() == at_the_start.keys()
    assert [name for name, values in at_the_start.items() if found[name] != values] == []


def test_the_tracker_moves_once_the_checkpoint_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trained(Cell())
    saver = Saver(tmp_path, training.optimizer, training.plan, asynchronous=True)
    saver.begin(TrainingState(1, 4, 1), {"model": {}})
    may_commit, real = Event(), FolderTransaction.commit
    monkeypatch.setattr(FolderTransaction, "commit", lambda *arguments: (may_commit.wait(), real(*arguments)))
    assert saver.advance() is None  # everything is written
    assert saver.busy
    assert directory.latest(tmp_path) is None
    assert not list(tmp_path.glob("iter_*[0-9]"))
    may_commit.set()
    assert saver.advance() == tmp_path / "iter_0000001"
    assert not saver.under_way
    saver.close()


def test_a_run_that_ends_does_not_wait_for_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = trained(Cell())
    saver = Saver(tmp_path, training.optimizer, training.plan, asynchronous=True)
    opened, real = Event(), shard_file.blocks_of

    def slow(values: Tensor) -> Iterator[memoryview]:
        opened.set()
        time.sleep(0.2)
        yield from real(values)

    monkeypatch.setattr(shard_file, "blocks_of", slow)
    saver.begin(TrainingState(1, 4, 1), {"model": {}})
    opened.wait()
    began = time.monotonic()
    saver.close()
    assert time.monotonic() - began < 10  # a hundred writes take 20
    assert directory.latest(tmp_path) is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_does_not_wait_for_old_checkpoints_to_be_removed(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    training = trained(Cell())
    may_end = Event()
    monkeypatch.setattr(checkpoint, "remove_old", lambda *_: (str(may_end.wait(timeout=20)),))
    settings = CheckpointConfig(save=str(tmp_path), save_interval=1, save_retain_interval=2, async_save=asynchronous)
    saves = Checkpoints(settings, tmp_path, training.optimizer, training.plan)
    with Display(2, 1) as display:
        saves.save(TrainingState(1, 4, 1), {"model": {}}, display, last=False)
        while "saved" not in capsys.readouterr().out:
            saves.advance(busy=False, failed=False, display=display)
        may_end.set()
        saves.save(TrainingState(2, 8, 2), {"model": {}}, display, last=True)
        saves.settle(display)
    saves.close()
    told = capsys.readouterr().out.splitlines()
    assert [line for line in told if line in ("True", "False")] == ["True", "True"]


def test_what_passes_before_the_end_of_a_save_is_noticed_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that knows the end of its job stops two saves before it."""
    training = trained(Cell())
    settings = CheckpointConfig(save=str(tmp_path), save_interval=1, async_save=True)
    saves = Checkpoints(settings, tmp_path, training.optimizer, training.plan)
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    with Display(2, 1) as display:
        saves.save(TrainingState(1, 4, 1), {"model": {}}, display, last=False)
        now += 7.0
        saves.advance(busy=True, failed=False, display=display)  # another rank is busy
        while saves.flags[0]:
            pass
        for _ in range(2):  # to the files' end, and to the manifest's; an hour of evaluation before each
            now += 3600.0
            saves.advance(busy=False, failed=False, display=display)
            while saves.flags[0]:
                pass
    saves.close()
    assert saves.seconds == 7.0
    assert "in 7.0 s" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ failures


def fail_alone(cell: Cell, path: Path, kind: str) -> tuple[str, str]:
    """Save once, then again with a fault on the last rank; return each rank's error, and the loadable checkpoint."""
    training = trained(cell)
    training.save(path, 1)
    last = training.mesh.rank == cell.world_size - 1
    try:
        if kind == "damaged file":
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


def run_out_of_memory(cell: Cell, path: Path) -> str:
    """Load while the last rank cannot read a block; return the error of each rank."""
    training = trained(cell)

    def fail(*_: object) -> None:
        raise MemoryError("no room for a block")

    with pytest.MonkeyPatch.context() as patch:
        if training.mesh.rank == cell.world_size - 1:
            patch.setattr(shard_file, "read_block", fail)
        try:
            training.load(path)
        except (CheckpointError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def test_no_rank_waits_for_one_that_fails_in_a_way_nobody_expects(rank_pools: RankPools, tmp_path: Path) -> None:
    save(Cell(), tmp_path)
    first, last = rank_pools(2).run(run_out_of_memory, Cell(dp=2), tmp_path / "iter_0000001")
    assert first.endswith("failed on rank 1: MemoryError: no room for a block")
    assert last == "MemoryError: no room for a block"


def fails_twice() -> str:
    """Fail on rank 0 because of damage, on rank 1 because of a file that it must not read."""
    rank = dist.get_rank()
    try:
        with raise_on_all_ranks(ParallelMesh(rank=rank, world_size=dist.get_world_size()), "loading"):
            raise PermissionError(13, "Permission denied") if rank else CorruptCheckpointError("bytes changed")
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"


def test_what_is_not_damage_is_told_before_damage(rank_pools: RankPools) -> None:
    """Otherwise the run would fall back to an older checkpoint because of a file without read permission."""
    found = rank_pools(2).run(fails_twice)
    assert found == ["CheckpointError: loading failed on rank 1: [Errno 13] Permission denied"] * 2
