"""Saving: each rank writes the boxes that are its to save, then one rank writes the manifest and names the whole."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Event
from typing import Any

from megalite.checkpoint import box_file, manifest
from megalite.checkpoint.agreement import together
from megalite.checkpoint.attempt import Attempt, new_attempt
from megalite.checkpoint.box_file import Written
from megalite.checkpoint.container import Part, Place
from megalite.checkpoint.formats import NATIVE, Format, Placed
from megalite.checkpoint.manifest import OPTIMIZER, Manifest, SavedBox, SavedFile, SavedTensor, TrainingState, covers
from megalite.checkpoint.plan import Plan, Region, saved_regions
from megalite.checkpoint.staging import Staging
from megalite.checkpoint.storage import AnyPath, create, sizes
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives
from megalite.parallel.sharding import Box

_ADVICE = "Checkpoints saved before are as they were. Free space, or give another folder with --save"


class Saver:
    """Saves the checkpoints of a run, one after the other. `save`, `begin` and `advance` are for all ranks together.

    `save` is back once the checkpoint is on disk. Where it is `asynchronous` there are also `begin`, which is back once
    the state has been copied, and `advance`, to be called between steps until it gives the new checkpoint. All that
    ranks tell each other they tell in these calls; what runs in between only writes files.
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
        """Without `state` the optimizer's is not saved."""
        self._directory, self._optimizer, self._plan, self._format = directory, optimizer, plan, file_format
        self._mesh, self._state = plan.mesh, state
        self.staging = Staging(self._regions(), plan.mesh.device) if asynchronous else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._save: _Save | None = None
        self.ended = 0.0
        """When this rank last came to the end of a part of a save, by `time.perf_counter`."""
        self._closed = Event()

    def close(self) -> None:
        """Stop what is being written in the background, for a run that ends: what is not whole is never used."""
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
        """Begin a save, behind the one that is under way. What it saves is what there is now. Raises as `save` does."""
        while self._save is not None:
            self.advance()
        self._optimizer.finish_parameter_gather()
        rank = self._mesh.rank
        attempt = new_attempt(self._directory, training.iteration, self._mesh)
        doing = f"saving iteration {training.iteration} to {self._directory}"
        try:
            with together(self._mesh, doing, _ADVICE):
                if rank == 0:
                    attempt.begin()
            regions = self._regions()
            if self.staging is not None:
                regions = self.staging.take(regions)
            file = attempt.file(self._format.file.format(writer=rank))
            work = self._do(lambda: _write(file, self._format, regions, self._closed))
        except CheckpointError:
            self._abandon(attempt)
            raise
        self._save = _Save(attempt, training, config, doing, regions, work)

    def _regions(self) -> list[Region]:
        return [region for region in saved_regions(self._optimizer) if self._includes(region.part)]

    def _includes(self, part: Part) -> bool:
        return self._state or not part.name.startswith(OPTIMIZER)

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        """Now, or in the background."""

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
        """Bytes that this rank writes."""
        return sum(region.part.size for region in self._regions())

    @property
    def under_way(self) -> bool:
        """Whether a save has begun and not come to its end."""
        return self._save is not None

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._save is not None and not self._save.work.done()

    @property
    def failed(self) -> bool:
        """Whether this rank has failed to write."""
        return self._save is not None and self._save.work.done() and self._save.work.exception() is not None

    def advance(self) -> AnyPath | None:
        """Take the save that is under way a stage further; waits where a rank is busy. Its folder, once it is there.

        Raises as `save` does.
        """
        save = self._save
        if save is None:
            raise ValueError("no save is under way")
        try:
            with together(self._mesh, save.doing, _ADVICE):
                result = save.work.result()
            if save.committing:
                self._save = None
                return save.attempt.path
            written = self._gather(save, result)
        except CheckpointError:
            self._abandon(save.attempt)
            raise
        save.committing = True
        save.work = self._do(lambda: self._commit(save, written) if self._mesh.rank == 0 else None)
        return None

    def _abandon(self, attempt: Attempt) -> None:
        self._save = None
        if self._mesh.rank == 0:
            attempt.abandon()

    def _gather(self, save: _Save, written: Written | None) -> list[list[int]]:
        """On rank 0, of each rank: what tells its parts, its file's checksum, and those of its blocks; else nothing."""
        numbers = [_digest(region.part for region in save.regions)]
        if written is not None:
            numbers += [written.file.checksum, *(checksum for box in written.checksums for checksum in box)]
        return collectives.gather_numbers(numbers, self._mesh.world(), self._mesh.device)

    def _commit(self, save: _Save, written: Sequence[list[int]]) -> None:
        """Make the checkpoint out of what is written. The plan says what that is."""
        file_format = self._format
        files: dict[str, SavedFile] = {}
        placed: dict[str, list[tuple[Part, Place]]] = {}
        kinds: dict[str, tuple[tuple[int, ...], str]] = {}
        boxes: dict[str, list[SavedBox]] = {}
        for rank, numbers in enumerate(written):
            parts = [part for part in self._plan.saved(rank) if self._includes(part)]
            if numbers[0] != _digest(parts):
                raise CheckpointError(f"rank {rank} has other tensors than its plan says: a defect, please report it")
            if not parts:
                continue
            file = save.attempt.file(file_format.file.format(writer=rank)).name
            placed[file] = list(zip(parts, file_format.places(parts), strict=True))
            checksums = iter(numbers[2:])
            for part, place in placed[file]:
                sums = tuple(next(checksums) for _ in range(0, part.size, manifest.BLOCK))
                saved = SavedBox(part.name, part.dtype, part.box, file, place.start, sums)
                boxes.setdefault(part.name, []).append(saved)
                kinds[part.name] = part.shape, manifest.dtype_name(part.dtype)
            files[file] = SavedFile(place.stop + len(place.after(0)), numbers[1])
        tensors = {name: SavedTensor(*kinds[name], tuple(boxes[name])) for name in sorted(boxes)}
        files |= write_index(save.attempt, file_format, placed)
        finish(save.attempt, Manifest(save.training, save.config, files, tensors))


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
    """`Saver.save`, once. `plan`: of all ranks; None where there is but one."""
    saver = Saver(directory, optimizer, plan or Plan.alone(optimizer), file_format=file_format, state=state)
    return saver.save(training, config)


@dataclass
class _Save:
    """One that is under way."""

    attempt: Attempt
    training: TrainingState
    config: dict[str, Any]
    doing: str
    regions: list[Region]
    work: Future[Any]
    """This rank's present part of it."""
    committing: bool = False


def _write(path: AnyPath, file_format: Format, regions: Sequence[Region], closed: Event) -> Written | None:
    """Write a rank's file, unless there is nothing in it; no further than to the next block once `closed`."""
    if not regions:
        return None
    places = file_format.places([region.part for region in regions])
    with create(path) as stream:
        return box_file.write(stream, zip(places, (region.values for region in regions), strict=True), closed)


def _digest(parts: Iterable[Part]) -> int:
    return zlib.crc32("\n".join(f"{part.entry} {part.box.size} {part.dtype}" for part in parts).encode())


def write_index(attempt: Attempt, file_format: Format, placed: Placed) -> dict[str, SavedFile]:
    """Write what others need to read the files."""
    files: dict[str, SavedFile] = {}
    for name, data in file_format.index(placed).items():
        with create(attempt.folder / name) as stream:
            files[name] = box_file.write_bytes(stream, data)
    return files


def finish(attempt: Attempt, made: Manifest) -> None:
    """Check that the checkpoint is whole, add its manifest and make it one."""
    for name, tensor in made.tensors.items():
        if not covers((saved.box for saved in tensor.boxes), Box.whole(tensor.shape)):
            raise CheckpointError(f"the ranks have not written each element of {name} once: a defect, please report it")
    found = sizes(attempt.folder, made.files)
    for file, saved in made.files.items():
        if found.get(file) != saved.size:
            raise CheckpointError(
                f"{attempt.folder / file}, written by another rank, cannot be seen from rank 0: the folder must be on "
                "a file system that all nodes share"
            )
    attempt.commit(made.to_json())
