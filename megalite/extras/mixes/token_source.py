"""The token files of one source as one stream: all documents of all files, in a new order in each pass."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import Arrays, IndexCache
from megalite.data.indexed_dataset import IndexedDataset, bin_path, idx_path
from megalite.data.side_file import Record
from megalite.errors import DataError
from megalite.extras.mixes.course import BlendOrder, Part
from megalite.small_files import open_regular

OF_PASS = 0x4D495850
"""Marks the random numbers of the order of a pass among those of one seed."""
_FEW = 1 << 12
"""Most sequences of a source whose orders are computed in memory, in less time than files take."""
_PROBES, _PROBE = 16, 1 << 12
"""Number and size in bytes of the parts of a file that stand for it, if no checksums are recorded."""


class Stream(NamedTuple):
    """Sequences of one pass, in order.

    Attributes:
        order: number of each sequence among all files' of the source.
        ends: tokens up to the end of each, int64.
    """

    order: np.ndarray
    ends: np.ndarray


class BlendPast(NamedTuple):
    """Samples that a source has given as a part of a blend (`--data-path`).

    Attributes:
        requested: samples that the blend has asked for; None: those of one epoch.
        consumed: samples that it has taken.
        length: tokens of a sample.
    """

    requested: int | None
    consumed: int
    length: int


class TokenSource:
    """Token files of one source.

    Args:
        name: its name, for messages.
        files: the files.
        records: their side files' records, if there are any.
        share: the fractions of each file's sequences at which the source begins and ends.
        seed: seed of the order.
        cache: where orders of many sequences are kept.

    Raises:
        DataError: the share of the files has no tokens.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[IndexedDataset],
        records: Sequence[Record | None],
        share: tuple[float, float],
        seed: int,
        cache: IndexCache,
    ) -> None:
        self.name, self.files, self._seed, self._cache = name, files, seed, cache
        self._records = records
        self._parts = [range(round(share[0] * len(file)), round(share[1] * len(file))) for file in files]
        counts = [len(part) for part in self._parts]
        self._bounds = np.cumsum([0, *counts])
        self._is_one = len(files) == 1
        self.tokens = sum(map(_tokens, files, self._parts))
        self._blend: GPTDataset | None = None
        self._stream = lru_cache(maxsize=3)(self._make_stream)
        if not self.tokens:
            raise DataError(
                f"the source {name} has no tokens in its share of {', '.join(file.prefix for file in files[:3])}: "
                "leave it out, give training a larger share in --split, or add documents"
            )

    @property
    def prefixes(self) -> list[str]:
        """The paths of the files, without the suffix."""
        return [file.prefix for file in self.files]

    def identity(self) -> str:
        """Return a checksum of the files: of the recorded checksums, or else of parts that are spread over them."""
        found = hashlib.sha256()
        for file, record in zip(self.files, self._records, strict=True):
            for path in (idx_path(file.prefix), bin_path(file.prefix)):
                known = None if record is None else record.crc32.get(path.suffix[1:])
                sums = _probes(path) if known is None else list(known)
                found.update(json.dumps([path.stat().st_size, sums]).encode())
        return found.hexdigest()[:32]

    def follow(self, past: BlendPast | None) -> BlendOrder | None:
        """Take the source over from a blend, if it was part of one. Returns what the blend's order has left."""
        self._blend = None
        self._stream.cache_clear()
        if past is None:
            return None
        dataset = GPTDataset(self.files[0], self._parts[0], past.requested, past.length, self._seed, self._cache)
        if past.consumed > len(dataset):
            raise DataError(f"the blend has taken {past.consumed} samples of {self.name}, which has {len(dataset)}")
        self._blend = dataset
        return BlendOrder(
            order=dataset.shuffle_index[past.consumed :],
            length=past.length,
            samples=len(dataset),
            tokens=dataset.epochs.count * self.tokens,
        )

    def read(self, parts: Sequence[Part]) -> np.ndarray:
        """Return the tokens of the parts of a sample, and the one behind the last of them, int64.

        Raises:
            DataError: a file is damaged.
        """
        number, begin, end = parts[-1]
        stream = self._stream(number)
        if is_inside := end < stream.ends.item(-1):
            end += 1
        last = self._pieces(stream, begin, end)
        if len(parts) == len(last) == 1 and is_inside:
            return last[0]
        found = [piece for number, *part in parts[:-1] for piece in self._pieces(self._stream(number), *part)] + last
        if not is_inside:
            found += self._pieces(self._stream(number + 1), 0, 1)
        return np.concatenate(found)

    def _pieces(self, stream: Stream, begin: int, end: int) -> list[np.ndarray]:
        """Return tokens of a pass, in as many pieces as there are sequences, or in one if there is one file."""
        order, ends = stream
        first, last = ends.searchsorted((begin + 1, end)).tolist()  # those that end behind the first and the last token
        sequences = order[first : last + 1].tolist()
        start = begin - ends.item(first - 1) if first else begin
        end -= ends.item(last - 1) if last else 0
        if self._is_one:
            if offset := self._parts[0].start:
                sequences = [offset + sequence for sequence in sequences]
            return [self.files[0].join(sequences, start, end)]
        found = []
        for place, sequence in enumerate(sequences):
            file, inside = self._place_of(sequence)
            stop = end if place == len(sequences) - 1 else int(file.sequence_lengths[inside])
            found.append(file.join([inside], start, stop))
            start = 0
        return found

    def _place_of(self, sequence: int) -> tuple[IndexedDataset, int]:
        """Return the file of a sequence of the source, and its number there."""
        number = int(self._bounds.searchsorted(sequence, side="right")) - 1
        return self.files[number], sequence - int(self._bounds[number]) + self._parts[number].start

    def documents(self, parts: Sequence[Part]) -> dict[str, list[int]]:
        """Return the documents of which a sample has tokens, ascending, by the prefix of their file."""
        found: dict[str, set[int]] = {}
        for number, begin, end in parts:
            order, ends = self._stream(number)
            first, last = ends.searchsorted((begin + 1, end)).tolist()
            for file, inside in map(self._place_of, order[first : last + 1].tolist()):
                document = int(file.document_indices.searchsorted(inside, side="right")) - 1
                found.setdefault(file.prefix, set()).add(document)
        return {prefix: sorted(numbers) for prefix, numbers in found.items()}

    def _make_stream(self, number: int) -> Stream:
        """Return the order of a pass, computed or from the cache."""
        if self._blend is not None and number == 0:
            order = self._blend.document_index - self._parts[0].start
            return Stream(order, np.cumsum(self._lengths()[order], dtype=np.int64))
        number -= self._blend is not None
        if int(self._bounds[-1]) <= _FEW:
            return Stream(**self._order(number))
        description = {
            "kind": "order of a pass over a source",
            "version": 1,
            "sequence_lengths": [file.lengths_sha256 for file in self.files],
            "sequences": [[part.start, part.stop] for part in self._parts],
            "pass": number,
            "seed": self._seed,
        }
        return Stream(**self._cache.get(self.files[0].prefix, description, lambda: self._order(number)))

    def _order(self, number: int) -> Arrays:
        # The numbers of RandomState are frozen. Those of numpy's newer generators may change with its version.
        random = np.random.RandomState(np.random.PCG64(np.random.SeedSequence((OF_PASS, self._seed, number))))
        count = int(self._bounds[-1])
        order = np.arange(count, dtype=np.uint32 if count <= 2**32 else np.int64)
        random.shuffle(order)
        return {"order": order, "ends": np.cumsum(self._lengths()[order], dtype=np.int64)}

    def _lengths(self) -> np.ndarray:
        each = [
            file.sequence_lengths[part.start : part.stop] for file, part in zip(self.files, self._parts, strict=True)
        ]
        return each[0] if self._is_one else np.concatenate(each)


def _tokens(file: IndexedDataset, part: range) -> int:
    if len(part) == len(file):
        return file.tokens
    return int(file.sequence_lengths[part.start : part.stop].sum(dtype=np.int64))


def _probes(path: Path) -> list[int]:
    """Return checksums of parts that are spread evenly over a file."""
    with open_regular(path) as file:
        last = max(os.fstat(file.fileno()).st_size - _PROBE, 0)
        places = sorted({last * number // (_PROBES - 1) for number in range(_PROBES)})
        return [zlib.crc32(os.pread(file.fileno(), _PROBE, place)) for place in places]
