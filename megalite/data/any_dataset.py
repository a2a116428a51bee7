"""Micro-batches of any dataset for one data-parallel rank, read ahead by worker processes."""

from __future__ import annotations

import atexit
import os
import signal
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing import RawValue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from megalite.data.sample_source import OF_COLLATE, SampleSource, in_words, random_state_kept, seed_generators
from megalite.data.sampler import Deal, drawn, equal_deal
from megalite.errors import DataError
from megalite.process.signals import STOP_SIGNALS

__all__ = ["AnyDatasetLoader", "Batch", "SampleSource", "check", "checksum_of_start"]

PROBES = 4
_PROBE = equal_deal(0, 1, 1)


@dataclass(frozen=True)
class Batch:
    """Collated samples of a micro-batch.

    Attributes:
        values: what `collate` returned, on the CPU.
        sample_ids: global number of each sample: its position in the order in which the run consumes samples.
    """

    values: Any
    sample_ids: Sequence[int]


@dataclass(frozen=True)
class _Request:
    """Micro-batch to read: its samples, those of all ranks in its turn, and its places in a map-style dataset."""

    samples: Sequence[int]
    of_all_ranks: range
    indices: list[int]


@dataclass
class _Requests:
    """Requests for a rank's micro-batches of the step that begins at `first`, and of the steps after it, without end.

    `number`: the micro-batch of that step to begin with, counted on this rank.
    """

    source: SampleSource
    micro_batch_size: int
    deal: Deal = _PROBE
    first: int = 0
    number: int = 0

    def begin_at(self, first: int, deal: Deal, number: int) -> None:
        self.first, self.deal, self.number = first, deal, number

    def of_step(self, first: int, deal: Deal) -> Iterator[_Request]:
        """Yield the requests for a step that begins at this sample."""
        size, ends = self.micro_batch_size, deal.turns[1:]
        for samples, turn, end in zip(deal.samples(first, size), deal.turns, ends, strict=False):
            indices = [] if self.source.is_stream else [self.source.index(sample) for sample in samples]
            turns = range(first + turn * size, first + end * size)
            if deal.left_out:
                turns = range(drawn(turns[0], deal.left_out, None), drawn(turns[-1], deal.left_out, None) + 1)
            yield _Request(samples, turns, indices)

    def __iter__(self) -> Iterator[_Request]:
        first, number = self.first, self.number
        while True:
            yield from islice(self.of_step(first, self.deal), number, None)
            first, number = first + self.deal.total * self.micro_batch_size, 0


@dataclass(frozen=True)
class _Read:
    """Micro-batch, the checksum of its first sample, and the starts of epochs on the way."""

    batch: Batch
    checksum: int
    starts: list[tuple[int, int]]


class _Reader(torch.utils.data.Dataset[Any]):
    """Reader of micro-batches, in the process of the run or in a worker process."""

    def __init__(self, source: SampleSource) -> None:
        self._source = source
        self._stream: Iterator[tuple[int, int, int, Any]] | None = None
        self._next = 0

    def __getitem__(self, request: _Request) -> _Read | DataError:
        """Read in a worker process. Errors are returned: torch would put a traceback into their messages."""
        try:
            return self.read(request)
        except DataError as error:
            if error.__cause__ is not None:
                error.add_note("".join(traceback.format_exception(error.__cause__)))
            return error

    def read(self, request: _Request) -> _Read:
        """Read and collate the samples of a request, with random numbers that depend only on seed and samples.

        Raises:
            DataError: the dataset or its collate function failed.
        """
        samples, source = request.samples, self._source
        with random_state_kept():
            if source.is_stream:
                rows, starts = self._from_stream(request)
            else:
                rows, starts = [source.item(*place) for place in zip(samples, request.indices, strict=True)], []
            first = _checksum(rows[0])
            seed_generators(OF_COLLATE, source.seed, samples[0])
            try:
                values = source.collate(rows)
            except Exception as error:
                raise DataError(
                    f"collate failed for samples {samples[0]} to {samples[-1]}: {in_words(error)}: "
                    "give a collate function that takes a list of such samples"
                ) from error
        return _Read(Batch(values, samples), first, starts)

    def _from_stream(self, request: _Request) -> tuple[list[Any], list[tuple[int, int]]]:
        """Read the samples of all ranks and return this rank's, so that all ranks find the same ends and errors."""
        wanted, rows, starts = request.of_all_ranks, [], set()
        # After an error the stream has ended; it begins again then, and for samples that have passed.
        stream, self._stream = self._stream, None
        if stream is None or wanted.start < self._next:
            stream = self._source.stream(wanted.start)
        for number, first, epoch, item in stream:
            if number in request.samples:
                rows.append(item)
            if number in wanted:
                starts.add((first, epoch))
            if number + 1 == wanted.stop:
                break
        self._stream, self._next = stream, wanted.stop
        return rows, sorted(starts)


class AnyDatasetLoader:
    """Loader of one rank's micro-batches; the choice of samples is a pure function of the number of consumed samples.

    This is a context manager: worker processes start at the first use and end at its exit.
    """

    def __init__(self, source: SampleSource, *, micro_batch_size: int) -> None:
        self._source = source
        self._requests = _Requests(source, micro_batch_size)
        self._reader = _Reader(source)
        self._ahead: DataLoader[Any] | None = None
        self._reads: Iterator[_Read | DataError] | None = None
        self._upcoming: Iterator[_Request] = iter(())  # what the worker processes return next
        self._seen: list[tuple[int, int]] = []
        self._closing = RawValue("b", False)  # seen by the worker processes

    def micro_batches(self, consumed_samples: int, deal: Deal) -> list[Batch]:
        """Return this rank's micro-batches of the step that starts at global sample `consumed_samples`.

        Raises:
            DataError: the dataset or `collate` failed, or the dataset is empty or changes its length.
        """
        requests = self._requests.of_step(consumed_samples, deal)
        return [self._micro_batch(each, (consumed_samples, deal, number)) for number, each in enumerate(requests)]

    def resize(self, micro_batch_size: int) -> None:
        """Make micro-batches of another size from now on."""
        self._requests.micro_batch_size, self._reads = micro_batch_size, None

    def _micro_batch(self, request: _Request, place: tuple[int, Deal, int]) -> Batch:
        """Return a micro-batch. `place`: the first sample of its step, the step's deal, and its number on this rank."""
        read = self._reader.read(request) if self._source.num_workers == 0 else self._from_workers(request, place)
        for start in read.starts:
            self._source.record_start(*start)
        self._seen.append((request.samples[0], read.checksum))
        if len(self._seen) > 2 * PROBES:
            del self._seen[1::2]  # recent samples stay dense, and some old ones stay
        return read.batch

    def _from_workers(self, request: _Request, place: tuple[int, Deal, int]) -> _Read:
        """Take the next read of the worker processes, which begin again where the request is not the next.

        Raises:
            DataError: a sample or a process failed.
        """
        try:
            if self._ahead is None:
                self._ahead = self._start_workers()
            if self._reads is None or next(self._upcoming) != request:
                self._requests.begin_at(*place)
                self._reads, self._upcoming = iter(self._ahead), iter(self._requests)
                next(self._upcoming)
            read = next(self._reads)
        except Exception as error:
            self.close()
            raise DataError(
                f"the worker processes of the dataset failed: {in_words(error)}: "
                "with num_workers=0 the process of the run reads, and shows where an error comes from"
            ) from error
        if isinstance(read, DataError):
            raise read
        return read

    def _start_workers(self) -> DataLoader[Any]:
        """Make torch's loader of whole micro-batches, which draws nothing from the generator of the run."""
        atexit.register(self.close)  # before multiprocessing waits for the processes
        self._closing.value = False
        options = dict(self._source.worker_options)
        prepare = partial(_prepare_worker, self._closing, options.pop("worker_init_fn", None))
        return DataLoader(
            self._reader,
            batch_size=None,  # a request is a whole micro-batch
            sampler=self._requests,
            collate_fn=_unchanged,
            num_workers=self._source.num_workers,
            persistent_workers=True,
            worker_init_fn=prepare,
            generator=torch.Generator(),  # else torch draws from the generator of the run
            **options,
        )

    def remember(self, consumed_samples: int) -> dict[str, Any]:
        """Return what `check` compares in a resumed run: JSON values for the checkpoint at this sample."""
        source = self._source
        return {
            "length": source.length,
            "epoch_start": list(source.start_of(consumed_samples)),
            "checksums": [list(seen) for seen in self._seen if seen[0] < consumed_samples and not source.is_stream],
        }

    def close(self) -> None:
        """End the worker processes and drop what they have read."""
        self._closing.value = True
        self._ahead = self._reads = self._reader._stream = None
        atexit.unregister(self.close)

    def __enter__(self) -> AnyDatasetLoader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check(source: SampleSource, remembered: Mapping[str, Any]) -> tuple[str, ...]:
    """Compare the dataset with what the loader of a saved run remembered, and return notes on differences.

    A stream without a length takes the start of its epoch from there, so that no earlier epoch is replayed.

    Raises:
        DataError: the dataset has another length.
    """
    if not remembered:
        return ()  # saved by a run without a dataset
    before, now = (f"{n:,} samples" if n is not None else "no length" for n in (remembered["length"], source.length))
    if before != now:
        raise DataError(
            f"the dataset had {before} when the run was saved and has {now} now: the samples that are left to read "
            "depend on it. Give the dataset of the saved run, or begin a new run with this one"
        )
    source.record_start(*remembered["epoch_start"])
    with _probe(source) as loader:
        for sample, saved in remembered["checksums"]:
            if loader.micro_batches(sample, _PROBE)[0].values != saved:
                return (
                    f"note: sample {sample}, consumed before this checkpoint, is another now: the data, their order "
                    "(seed, shuffle) or their transforms have changed, so some samples may be repeated and others "
                    "never read. A dataset with random numbers of a generator of its own causes this note too",
                )
    return ()


def checksum_of_start(source: SampleSource) -> int:
    """Return the checksum of a dataset's first sample."""
    with _probe(source) as loader:
        checksum: int = loader.micro_batches(0, _PROBE)[0].values
    return checksum


def _probe(source: SampleSource) -> AnyDatasetLoader:
    """Return a loader of checksums of single samples, the same on every rank."""
    # Read in a worker process here too, if one reads later: it may not be able to use what this process has opened.
    probe = replace(source, collate=_checksum_of_first, num_workers=min(source.num_workers, 1))
    return AnyDatasetLoader(probe, micro_batch_size=1)


def _prepare_worker(closing: Any, given: Callable[[int], None] | None, worker: int) -> None:
    def stop(*_: object) -> None:
        if closing.value:
            os._exit(0)

    # A stop signal for all processes of a job is the run's to answer: it still reads the samples of its last step.
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    if given is not None:
        given(worker)


def _unchanged(read: Any) -> Any:
    return read


def _checksum_of_first(rows: list[Any]) -> int:
    return _checksum(rows[0])


def _checksum(value: Any, before: int = 0) -> int:
    """Return a CRC-32 of the contents of a sample: tensors, arrays, numbers and text in any nesting."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        value = value.tolist()
    elif is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, each.name) for each in fields(value)]
    elif isinstance(value, Mapping):
        value = [part for pair in value.items() for part in pair]
    if isinstance(value, list | tuple):
        for part in value:
            before = _checksum(part, before)
        return before
    if hasattr(value, "tobytes"):
        return zlib.crc32(value.tobytes(), before)
    # The text of another object may name its address.
    plain = isinstance(value, str | bytes | int | float | complex | None)
    return zlib.crc32((repr(value) if plain else type(value).__name__).encode(), before)
