"""Samples of any dataset: map-style, iterable, or that of a torch `DataLoader`.

Sample n of a run is the same on every layout, with any number of worker processes and after a resume. A map-style
dataset of `length` items gives item `order[n % length]` of epoch `n // length`. The items of an iterable dataset are
counted through its epochs. Random transforms are keyed by the number of the sample: the global generators of Python,
numpy and torch are seeded before each sample is read, and before a micro-batch is collated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from megalite.errors import DataError

OF_SAMPLE, OF_COLLATE, OF_ORDER, OF_EPOCH = range(4)  # kinds of randomness


@dataclass(eq=False)
class SampleSource:
    """Dataset of a run, and the place of each sample in it. `of` makes it.

    Attributes:
        dataset: a map-style or an iterable dataset. If it has `set_epoch`, it is this source's alone: another would
            change its epoch.
        seed: seed of the order and of random transforms.
        is_stream: the dataset is iterable: it cannot be read at a given place.
        length: items in an epoch; None: only the end of the stream tells.
        shuffle: each epoch has an order of its own.
        collate: function from a list of samples to the values of a micro-batch.
        batch_size: samples in a micro-batch, if the dataset came with a `DataLoader`.
        num_workers: processes that read ahead; 0: the process of the run reads when requested.
        worker_options: other arguments of torch's `DataLoader` for these processes.
        notes: lines for the person who starts the run.
    """

    dataset: Any
    seed: int
    is_stream: bool
    length: int | None
    shuffle: bool
    collate: Callable[[list[Any]], Any]
    batch_size: int | None
    num_workers: int
    worker_options: Mapping[str, Any]
    notes: tuple[str, ...]
    _epoch: int | None = field(default=None, init=False)
    _starts: dict[int, int] = field(default_factory=lambda: {0: 0}, init=False)  # first sample of each known epoch

    @staticmethod
    def of(
        dataset: Any,
        *,
        seed: int,
        shuffle: bool | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        num_workers: int | None = None,
    ) -> SampleSource:
        """Return the source of samples of a dataset or `DataLoader`. Arguments other than None override the latter's.

        Raises:
            DataError: the dataset or the sampler of the `DataLoader` cannot be used; the message says what to do.
        """
        batch_size: int | None = None
        options: dict[str, Any] = {}
        if isinstance(dataset, DataLoader):
            given = dataset
            dataset, batch_size = given.dataset, given.batch_size
            is_shuffled = _is_shuffled(given)
            shuffle = is_shuffled if shuffle is None else shuffle
            collate = collate or given.collate_fn
            num_workers = given.num_workers if num_workers is None else num_workers
            for name in ("prefetch_factor", "multiprocessing_context", "timeout", "worker_init_fn"):
                options[name] = getattr(given, name)
        is_stream, length = _kind(dataset)
        if is_stream and shuffle:
            raise DataError(
                "shuffle=True needs a dataset with __getitem__ and __len__, and this one is iterable: "
                "leave shuffle out, and let the dataset shuffle its own items by seed and set_epoch"
            )
        notes: list[str] = []
        if is_stream:
            notes.append(
                "note: the dataset is iterable and cannot seek: each rank reads all of it (in one process) and keeps "
                "its samples, and a resumed run replays what its epoch had consumed"
            )
            num_workers = min(num_workers or 0, 1)  # more would each read the same
        return SampleSource(
            dataset=dataset,
            seed=seed % 2**64,
            is_stream=is_stream,
            length=length,
            shuffle=bool(shuffle),
            collate=collate or default_collate,
            batch_size=batch_size,
            num_workers=num_workers or 0,
            worker_options=options,
            notes=tuple(notes),
        )

    def epoch_of(self, consumed_samples: int) -> int:
        """Return the epoch of a sample. That of a stream without a length counts the ends that were found."""
        return self.start_of(consumed_samples)[1]

    def start_of(self, sample: int) -> tuple[int, int]:
        """Return the first sample of the epoch of a sample, and the epoch."""
        if self.length is not None:
            return sample // self.length * self.length, sample // self.length
        return max((first, epoch) for epoch, first in self._starts.items() if first <= sample)

    def record_start(self, first: int, epoch: int) -> None:
        """Record the first sample of an epoch of a stream. Raises DataError if it was another one before."""
        before = self._starts.setdefault(epoch, first)
        if before != first:
            raise DataError(
                f"epoch {epoch} of the dataset began at sample {before:,} and now begins at {first:,}: an epoch must "
                "have as many samples each time that it is read"
            )

    def index(self, sample: int) -> int:
        """Return the place in a map-style dataset of a sample of the run."""
        length = self.length or 1
        epoch, place = divmod(sample, length)
        return int(_order(length, self.seed, epoch)[place]) if self.shuffle else place

    def enter(self, epoch: int) -> None:
        """Call the dataset's `set_epoch`, if it has one, unless the last call in this process was the same."""
        if self._epoch == epoch:
            return
        if hasattr(self.dataset, "set_epoch"):
            seed_generators(OF_EPOCH, self.seed, epoch)
            try:
                self.dataset.set_epoch(epoch)
            except Exception as error:
                raise DataError(f"set_epoch({epoch}) of the dataset failed: {in_words(error)}") from error
        if not self.is_stream and len(self.dataset) != self.length:
            raise DataError(
                f"the dataset had {self.length:,} samples at the start and has {len(self.dataset):,} in epoch {epoch}: "
                "its length must stay"
            )
        self._epoch = epoch

    def item(self, sample: int, index: int) -> Any:
        """Read a sample of a map-style dataset."""
        epoch = self.epoch_of(sample)
        self.enter(epoch)
        seed_generators(OF_SAMPLE, self.seed, sample)
        try:
            return self.dataset[index]
        except Exception as error:
            raise self._failure(sample, index, epoch, error) from error

    def stream(self, sample: int) -> Iterator[tuple[int, int, int, Any]]:
        """Yield an iterable dataset's samples, without end, from the beginning of the epoch of a sample on.

        Each is (its number, the first number of its epoch, the epoch, the sample).
        """
        number, epoch = self.start_of(sample)
        while True:
            first, items = number, None
            self.record_start(first, epoch)
            self.enter(epoch)
            while True:
                seed_generators(OF_SAMPLE, self.seed, number)
                try:
                    items = iter(self.dataset) if items is None else items
                    item = next(items)
                except StopIteration:
                    break
                except Exception as error:
                    raise self._failure(number, number - first, epoch, error) from error
                if self.length is not None and number - first >= self.length:
                    raise self._wrong_length(f"epoch {epoch} has more")
                yield number, first, epoch, item
                number += 1
            if number == first:
                raise DataError(f"the dataset is empty: epoch {epoch} has no samples: see what its __iter__ yields")
            if self.length is not None and number - first != self.length:
                raise self._wrong_length(f"epoch {epoch} has {number - first:,}")
            epoch += 1

    def _wrong_length(self, found: str) -> DataError:
        return DataError(
            f"the __len__ of the dataset is {self.length:,}, but {found}: correct it, or leave __len__ out"
        )

    def _failure(self, sample: int, index: int, epoch: int, error: Exception) -> DataError:
        place = f"sample {sample} (index {index} of epoch {epoch})"
        return DataError(f"reading {place} of the dataset failed: {in_words(error)}")


def _kind(dataset: Any) -> tuple[bool, int | None]:
    """Tell whether a dataset is iterable, and return its length. Raises DataError if it cannot be used."""
    name, reason = type(dataset).__name__, None
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        length, reason = None, error
    if is_stream and not hasattr(dataset, "__iter__"):
        raise DataError(f"{name} is not a dataset: give one with __getitem__ and __len__, or with __iter__")
    if is_stream and isinstance(dataset, Iterator):
        raise DataError(
            f"the dataset is an iterator ({name}), which can be read only once: give an object whose __iter__ begins "
            "anew, such as a torch.utils.data.IterableDataset"
        )
    if not is_stream and length is None:
        raise DataError(
            f"the dataset ({name}) has __getitem__, but its length is unknown ({reason}): add __len__, or make it a "
            "torch.utils.data.IterableDataset"
        ) from reason
    if length == 0:
        raise DataError(f"the dataset ({name}) is empty: its __len__ is 0")
    return is_stream, length


def _is_shuffled(given: DataLoader[Any]) -> bool:
    """Tell whether a `DataLoader` shuffles. Raises DataError if it does anything else."""
    if given.batch_size is None:
        raise DataError(
            "the DataLoader has a batch_sampler of its own or batch_size=None: give it a batch_size instead, because "
            "megalite makes micro-batches of single samples"
        )
    sampler: Any = given.sampler
    is_stream, length = _kind(given.dataset)
    if is_stream:
        return False  # torch refuses another sampler
    if type(sampler) in (SequentialSampler, RandomSampler) and len(sampler) == length:
        is_shuffled = type(sampler) is RandomSampler
        if not (is_shuffled and sampler.replacement):
            return is_shuffled
    raise DataError(
        f"the DataLoader has a sampler that megalite cannot follow ({type(sampler).__name__}): leave it out, because "
        "megalite shards over ranks by sample number, and give shuffle=True for an order that changes by epoch. "
        "Another choice of samples belongs into the dataset: torch.utils.data.Subset, for example"
    )


@lru_cache(maxsize=4)  # the epochs in use
def _order(length: int, seed: int, epoch: int) -> np.ndarray:
    # The numbers of RandomState are frozen. Those of numpy's newer generators may change with its version.
    place = np.random.SeedSequence((OF_ORDER, seed, epoch))
    order = np.arange(length, dtype=np.uint32 if length <= 2**32 else np.uint64)
    np.random.RandomState(np.random.PCG64(place)).shuffle(order)
    return order


def seed_generators(kind: int, seed: int, place: int) -> None:
    """Seed the global generators of Python, numpy and torch for a sample or an epoch."""
    python, of_numpy, of_torch = np.random.SeedSequence((kind, seed, place)).generate_state(3).tolist()
    random.seed(python)
    np.random.seed(of_numpy)
    torch.default_generator.manual_seed(of_torch)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the states of the global generators after the block."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def in_words(error: Exception) -> str:
    """Return the class and the message of an error."""
    return f"{type(error).__name__}: {error}"
