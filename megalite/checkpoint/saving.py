"""Save checkpoints: each rank writes its boxes; then rank 0 writes the manifest and makes the checkpoint visible."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from threading import Event
from typing import Any

import torch

from megalite.checkpoint import manifest, shard_file
from megalite.checkpoint.formats import NATIVE, Format
from megalite.checkpoint.integrity import covers
from megalite.checkpoint.manifest import Manifest, TrainingState, is_optimizer_state
from megalite.checkpoint.plan import Plan, Region, saved_regions
from megalite.checkpoint.shard_file import Checksums, records, write_index
from megalite.checkpoint.tensors import ByteRange, TensorBox
from megalite.checkpoint.transaction import SaveTransaction, new_transaction
from megalite.errors import CheckpointError
from megalite.optim.optimizer import Optimizer
from megalite.parallel import collectives, device
from megalite.parallel.collective_error import raise_on_all_ranks
from megalite.parallel.sharding import Box
from megalite.storage import AnyPath, create, sizes

_ADVICE = "Earlier checkpoints are unchanged. Free space, or give another folder with --save"
_ALIGNMENT = 64  # bytes


class Staging:
    """Host memory for copies of the regions that a rank saves. It is allocated once and used for every save."""

    def __init__(self, regions: Sequence[Region], place: torch.device) -> None:
        """Allocate memory with the sizes of `regions`, whose values are on the device `place`."""
        self._device = place
        rooms = [math.ceil(region.part.size / _ALIGNMENT) * _ALIGNMENT for region in regions]
        self._memory = device.host_memory(sum(rooms), place)
        self._copies = [
            room[: region.part.size].view(region.part.dtype)
            for region, room in zip(regions, self._memory.split(rooms), strict=True)
        ]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._memory.nbytes

    @torch.no_grad()
    def take(self, regions: Sequence[Region]) -> list[Region]:
        """Copy the values of the regions, wait for the copies, and return the regions with the copies."""
        for region, copy in zip(regions, self._copies, strict=True):
            copy.copy_(region.values.flatten(), non_blocking=True)
        device.synchronize(self._device)
        return [replace(region, kept=copy) for region, copy in zip(regions, self._copies, strict=True)]


class Saver:
    """Saver of a run's checkpoints, one at a time. All ranks call `save`, `begin` and `advance` together.

    `save` returns after the checkpoint is on disk. An `asynchronous` saver writes in the background: `begin` returns
    after the state has been copied, and `advance` is called between steps until it returns the new checkpoint. Ranks
    communicate only in these three calls; the background thread only writes files.
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
        """Create the saver. Without `state`, the optimizer's state is not saved."""
        self._directory, self._optimizer, self._plan, self._format = directory, optimizer, plan, file_format
        self._mesh, self._state = plan.mesh, state
        self.staging = Staging(self._regions(), plan.mesh.device) if asynchronous else None
        self._asynchronous = asynchronous
        self._thread: ThreadPoolExecutor | None = None
        self._phases: Iterator[AnyPath | None] | None = None
        """Remaining phases of the save in progress."""
        self._work: Future[Any] = Future()
        """Work of the latest phase on this rank."""
        self.ended = 0.0
        """Time (`time.perf_counter`) at which this rank last completed the work of a phase."""
        self._closed = Event()

    def close(self) -> None:
        """Stop background writing until the next save begins. An incomplete checkpoint is never used."""
        self._closed.set()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None

    def save(self, training: TrainingState, config: dict[str, Any]) -> AnyPath:
        """Write a checkpoint into the run directory, make it the latest, and return its folder.

        `config`: the run's configuration by section, as JSON values. A checkpoint of the same iteration is replaced.
        After a crash at any moment, the latest checkpoint is either the previous one or this one.

        Raises:
            CheckpointError: a rank could not write. It is the same error on every rank, and the files of this save are
                removed.
        """
        self.begin(training, config)
        while True:
            if (path := self.advance()) is not None:
                return path

    def begin(self, training: TrainingState, config: dict[str, Any]) -> None:
        """Complete the save in progress, if any, and begin a save of the current state. Raises as `save` does."""
        while self.under_way:
            self.advance()
        if self._closed.is_set():  # a program may train on after the end of a training
            self._closed = Event()
        if self._asynchronous and self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._optimizer.finish_parameter_gather()
        transaction = new_transaction(self._directory, training.iteration, self._mesh)
        self._phases = self._save(transaction, training, config)
        self.advance()

    def advance(self) -> AnyPath | None:
        """Wait until all ranks have completed the current phase of the save in progress, and begin the next phase.

        Returns the checkpoint's folder after the last phase, otherwise None. Raises as `save` does.
        """
        if self._phases is None:
            raise ValueError("no save is under way")
        try:
            path = next(self._phases)
        except BaseException:
            self._phases = None
            raise
        if path is not None:
            self._phases = None
        return path

    def _save(
        self, transaction: SaveTransaction, training: TrainingState, config: dict[str, Any]
    ) -> Iterator[AnyPath | None]:
        """Save in phases. Yield None after the work of a phase has begun, and finally the checkpoint's folder."""
        rank = self._mesh.rank
        all_or_none = partial(
            raise_on_all_ranks, self._mesh, f"saving iteration {training.iteration} to {self._directory}", _ADVICE
        )
        try:
            with all_or_none():
                if rank == 0:
                    transaction.begin()
            regions = self._regions()
            if self.staging is not None:
                regions = self.staging.take(regions)
            file = transaction.file(self._format.file.format(writer=rank))
            self._work = self._do(lambda: _write(file, self._format, regions, self._closed))
            yield None
            with all_or_none():
                written = self._work.result()
            numbers = [_digest(region.part for region in regions), *chain.from_iterable(written)]
            of_all = collectives.gather_numbers(numbers, self._mesh.world(), self._mesh.device)  # on rank 0
            self._work = self._do(lambda: self._commit(transaction, training, config, of_all) if rank == 0 else None)
            yield None
            with all_or_none():
                self._work.result()
        except CheckpointError:
            if rank == 0:
                transaction.abandon()
            raise
        yield transaction.path

    def _regions(self) -> list[Region]:
        regions = saved_regions(self._optimizer, frozen=self._plan.saves_frozen)
        return [region for region in regions if self._includes(region.part)]

    def _includes(self, part: TensorBox) -> bool:
        return self._state or not is_optimizer_state(part.name)

    def _do(self, work: Callable[[], Any]) -> Future[Any]:
        """Run the work: in the background if the saver is asynchronous, otherwise now."""

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

    @cached_property
    def size(self) -> int:
        """Number of bytes that this rank writes."""
        return sum(region.part.size for region in self._regions())

    @property
    def under_way(self) -> bool:
        """Return whether a save is in progress."""
        return self._phases is not None

    @property
    def busy(self) -> bool:
        """Return whether this rank is still writing."""
        return self.under_way and not self._work.done()

    @property
    def failed(self) -> bool:
        """Return whether this rank has failed to write."""
        return self.under_way and self._work.done() and self._work.exception() is not None

    def _commit(
        self,
        transaction: SaveTransaction,
        training: TrainingState,
        config: dict[str, Any],
        written: Sequence[list[int]],
    ) -> None:
        """Make the written files a checkpoint. The plan describes the files.

        `written`: for each rank, a digest of its parts and the checksums of its blocks.
        """
        file_format = self._format
        placed: dict[str, list[tuple[TensorBox, ByteRange]]] = {}
        checksums: dict[tuple[str, int], Checksums] = {}
        for rank, (digest, *numbers) in enumerate(written):
            parts = [part for part in self._plan.saved(rank) if self._includes(part)]
            if digest != _digest(parts):
                raise CheckpointError(f"rank {rank} has other tensors than its plan says: a defect, please report it")
            if not parts:
                continue
            file = transaction.file(file_format.file.format(writer=rank)).name
            placed[file] = list(zip(parts, file_format.byte_ranges(parts), strict=True))
            sums = iter(numbers)
            for part, byte_range in placed[file]:
                checksums[file, byte_range.start] = tuple(next(sums) for _ in range(0, part.size, manifest.BLOCK))
        files, tensors = records(placed, checksums)
        files |= write_index(transaction.folder, file_format, placed)
        finish(transaction, Manifest(training, config, files, dict(sorted(tensors.items()))))


def _write(path: AnyPath, file_format: Format, regions: Sequence[Region], closed: Event) -> list[Checksums]:
    """Write the file of a rank, if it has any regions. Stop at the next block after `closed` is set."""
    if not regions:
        return []
    byte_ranges = file_format.byte_ranges([region.part for region in regions])
    with create(path) as stream:
        return shard_file.write(stream, zip(byte_ranges, (region.values for region in regions), strict=True), closed)


def _digest(parts: Iterable[TensorBox]) -> int:
    return zlib.crc32("\n".join(f"{part.entry} {part.box.size} {part.dtype}" for part in parts).encode())


def finish(transaction: SaveTransaction, made: Manifest) -> None:
    """Check that the checkpoint is complete, add its manifest, and make it visible under its final name."""
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
