"""Saving of checkpoints: each rank writes its boxes, then one rank writes the manifest and gives the final name."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from megalite.checkpoint import manifest, shard_file
from megalite.checkpoint.collective_error import raise_on_all_ranks
from megalite.checkpoint.file_layout import ByteRange, TensorBox
from megalite.checkpoint.formats import NATIVE, Format, Placed
from megalite.checkpoint.manifest import OPTIMIZER, Manifest, SavedBox, SavedFile, SavedTensor, TrainingState, covers
from megalite.checkpoint.plan import Plan, Region, saved_regions
from megalite.checkpoint.shard_file import Written
from megalite.checkpoint.staging import Staging
from megalite.checkpoint.storage import AnyPath, create, sizes
from megalite.checkpoint.transaction import SaveTransaction, new_transaction
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.sharding import Box

_ADVICE = "Checkpoints saved before are as they were. Free space, or give another folder with --save"


class Saver:
    """Saver of the checkpoints of a run, one after the other. All ranks call `save`, `begin` and `advance` together.

    `save` returns once the checkpoint is on disk. If `asynchronous`, there are also `begin`, which returns once the
    state has been copied, and `advance`, which is called between steps until it returns the new checkpoint. Ranks
    communicate only in these calls; the work between them only writes files.
    """

    def __init__(
        self,
        directory: AnyPath,
        optimizer: Optimizer,
        plan: Plan,
        *,
        file_format: Format = NATIVE,
        state: bool = True,
        asynchronous: bool = False,
    ) -> None:
        """Set up the saver; without `state` the optimizer's state is not saved."""
        self._directory, self._optimizer, self._plan, self._format = directory, optimizer, plan, file_format
        self._mesh, self._state = plan.mesh, state
        self.staging = Staging(self._regions(), plan.mesh.device) if asynchronous else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._save: _Save | None = None
        self.ended = 0.0
        """Time, by `time.perf_counter`, when this rank last finished a part of a save."""
        self._closed = Event()

    def close(self) -> None:
        """Stop writing in the background because the run ends; an incomplete checkpoint is never used."""
        self._closed.set()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def save(self, training: TrainingState, config: dict[str, Any]) -> AnyPath:
        """Write a checkpoint into the run directory, make it the latest and return its folder.

        `config`: the run's configuration by section, JSON values. A crash at any moment leaves the checkpoint that was
        the latest, or this one. One of the same iteration is replaced.

        Raises:
            CheckpointError: a rank could not write; the same on every rank, and what had been written is removed.
        """
        self.begin(training, config)
        while True:
            if (path := self.advance()) is not None:
                return path

    def begin(self, training: TrainingState, config: dict[str, Any]) -> None:
        """Begin a save of the present state, after the save that is under way. Raises as `save` does."""
        while self._save is not None:
            self.advance()
        self._optimizer.finish_parameter_gather()
        rank = self._mesh.rank
        transaction = new_transaction(self._directory, training.iteration, self._mesh)
        doing = f"saving iteration {training.iteration} to {self._directory}"
        try:
            with raise_on_all_ranks(self._mesh, doing, _ADVICE):
                if rank == 0:
                    transaction.begin()
            regions = self._regions()
            if self.staging is not None:
                regions = self.staging.take(regions)
            file = transaction.file(self._format.file.format(writer=rank))
            work = self._do(lambda: _write(file, self._format, regions, self._closed))
        except CheckpointError:
            self._abandon(transaction)
            raise
        self._save = _Save(transaction, training, config, doing, regions, work)

    def _regions(self) -> list[Region]:
        return [region for region in saved_regions(self._optimizer) if self._includes(region.part)]

    def _includes(self, part: TensorBox) -> bool:
        return self._state or not part.name.startswith(OPTIMIZER)

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        """Do the work now, or in the background."""

        def timed() -> Any:
            try:
                return work()
            finally:
                self.ended = time.perf_counter()

        if self._thread is not None:
            return self._thread.submit(timed)
        done: Future[Any] = Future()
        try:
            done.set_result(timed())
        except Exception as error:
            done.set_exception(error)
        return done

    @property
    def size(self) -> int:
        """Number of bytes that this rank writes."""
        return sum(region.part.size for region in self._regions())

    @property
    def under_way(self) -> bool:
        """Tell whether a save has begun and not ended."""
        return self._save is not None

    @property
    def busy(self) -> bool:
        """Tell whether this rank is still writing."""
        return self._save is not None and not self._save.work.done()

    @property
    def failed(self) -> bool:
        """Tell whether this rank has failed to write."""
        return self._save is not None and self._save.work.done() and self._save.work.exception() is not None

    def advance(self) -> AnyPath | None:
        """Take the save that is under way a stage further, waiting if a rank is busy; return its folder once it is
        there.

        Raises as `save` does.
        """
        save = self._save
        if save is None:
            raise ValueError("no save is under way")
        try:
            with raise_on_all_ranks(self._mesh, save.doing, _ADVICE):
                result = save.work.result()
            if save.committing:
                self._save = None
                return save.transaction.path
            written = self._gather(save, result)
        except CheckpointError:
            self._abandon(save.transaction)
            raise
        save.committing = True
        save.work = self._do(lambda: self._commit(save, written) if self._mesh.rank == 0 else None)
        return None

    def _abandon(self, transaction: SaveTransaction) -> None:
        self._save = None
        if self._mesh.rank == 0:
            transaction.abandon()

    def _gather(self, save: _Save, written: Written | None) -> list[list[int]]:
        """Gather on rank 0, per rank: a digest of its parts, its file's checksum and its blocks' checksums; elsewhere
        nothing."""
        numbers = [_digest(region.part for region in save.regions)]
        if written is not None:
            numbers += [written.file.checksum, *(checksum for box in written.checksums for checksum in box)]
        return collectives.gather_numbers(numbers, self._mesh.world(), self._mesh.device)

    def _commit(self, save: _Save, written: Sequence[list[int]]) -> None:
        """Make a checkpoint of the written files, which the plan describes."""
        file_format = self._format
        files: dict[str, SavedFile] = {}
        placed: dict[str, list[tuple[TensorBox, ByteRange]]] = {}
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        boxes: dict[str, list[SavedBox]] = {}
        for rank, numbers in enumerate(written):
            parts = [part for part in self._plan.saved(rank) if self._includes(part)]
            if numbers[0] != _digest(parts):
                raise CheckpointError(f"rank {rank} has other tensors than its plan says: a defect, please report it")
            if not parts:
                continue
            file = save.transaction.file(file_format.file.format(writer=rank)).name
            placed[file] = list(zip(parts, file_format.byte_ranges(parts), strict=True))
            checksums = iter(numbers[2:])
            for part, byte_range in placed[file]:
                sums = tuple(next(checksums) for _ in range(0, part.size, manifest.BLOCK))
                saved = SavedBox(part.name, part.dtype, part.box, file, byte_range.start, sums)
                boxes.setdefault(part.name, []).append(saved)
                kinds[part.name] = part.shape, manifest.dtype_name(part.dtype)
            files[file] = SavedFile(byte_range.stop + len(byte_range.after(0)), numbers[1])
        tensors = {name: SavedTensor(*kinds[name], tuple(boxes[name])) for name in sorted(boxes)}
        files |= write_index(save.transaction, file_format, placed)
        finish(save.transaction, Manifest(save.training, save.config, files, tensors))


def save(
    directory: AnyPath,
    training: TrainingState,
    optimizer: Optimizer,
    config: dict[str, Any],
    *,
    plan: Plan | None = None,
    file_format: Format = NATIVE,
    state: bool = True,
) -> AnyPath:
    """Save once, as `Saver.save` does. `plan`: the plan of all ranks; None if there is only one rank."""
    saver = Saver(directory, optimizer, plan or Plan.alone(optimizer), file_format=file_format, state=state)
    return saver.save(training, config)


@dataclass
class _Save:
    """Save that is under way."""

    transaction: SaveTransaction
    training: TrainingState
    config: dict[str, Any]
    doing: str
    regions: list[Region]
    work: Future[Any]
    """Part of the save that this rank is doing now."""
    committing: bool = False


def _write(path: AnyPath, file_format: Format, regions: Sequence[Region], closed: Event) -> Written | None:
    """Write a rank's file, unless it would be empty; stop at the next block once `closed` is set."""
    if not regions:
        return None
    byte_ranges = file_format.byte_ranges([region.part for region in regions])
    with create(path) as stream:
        return shard_file.write(stream, zip(byte_ranges, (region.values for region in regions), strict=True), closed)


def _digest(parts: Iterable[TensorBox]) -> int:
    return zlib.crc32("\n".join(f"{part.entry} {part.box.size} {part.dtype}" for part in parts).encode())


def write_index(transaction: SaveTransaction, file_format: Format, placed: Placed) -> dict[str, SavedFile]:
    """Write the files that other programs need to read the checkpoint."""
    files: dict[str, SavedFile] = {}
    for name, data in file_format.index(placed).items():
        with create(transaction.folder / name) as stream:
            files[name] = shard_file.write_bytes(stream, data)
    return files


def finish(transaction: SaveTransaction, made: Manifest) -> None:
    """Check that the checkpoint is whole, add its manifest and give it its final name."""
    for name, tensor in made.tensors.items():
        if not covers((saved.box for saved in tensor.boxes), Box.whole(tensor.shape)):
            raise CheckpointError(f"the ranks have not written each element of {name} once: a defect, please report it")
    found = sizes(transaction.folder, made.files)
    for file, saved in made.files.items():
        if found.get(file) != saved.size:
            raise CheckpointError(
                f"{transaction.folder / file}, written by another rank, cannot be seen from rank 0: the folder must be "
                "on a file system that all nodes share"
            )
    transaction.commit(made.to_json())
