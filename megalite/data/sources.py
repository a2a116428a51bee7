"""Sources of the samples of a blend: their names, the source of a sample, and the tokens that a run has consumed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megalite.data.sampler import Ranges, sample_at
from megalite.process.output import printable

MOST_SOURCES = 32
"""Most sources of a blend of which records have figures."""
_PIECE = 2**20
"""Samples that are counted at once, to bound the memory."""


class Sources(Protocol):
    """Sources of the samples of a dataset."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the sources, which all differ."""

    def of(self, sample: int) -> int:
        """Return the number of a sample's source, as an index of `names`."""

    def after(self, consumed_samples: int, left_out: Ranges = ()) -> dict[str, float]:
        """Return the tokens of each source among the first samples, as figures of a record. They add up to all.

        `left_out`: samples that are passed over, and are not consumed. In their place the first ones come once more, at
        the end.
        """


def told(sources: Sources | None) -> Sources | None:
    """Return the sources if records have figures of each: if they are few enough."""
    return None if sources is None or len(sources.names) > MOST_SOURCES else sources


class SourceTokens:
    """Sources of a blend, with a count of their tokens: a function of the number of consumed samples.

    Args:
        sources: the source of each sample, [samples].
        prefixes: the prefix of each source; equal ones are one source.
        tokens_per_sample: tokens of a sample.

    Attributes:
        by_prefix: name of each prefix.
    """

    def __init__(self, sources: np.ndarray, prefixes: Sequence[str], tokens_per_sample: int) -> None:
        self._sources, self._length = sources, tokens_per_sample
        names = [printable(name) for name in short_names(prefixes)]  # records go to other programs
        self.names, self.by_prefix = list(dict.fromkeys(names)), dict(zip(prefixes, names, strict=True))
        numbers = {name: number for number, name in enumerate(self.names)}
        self._numbers = np.array([numbers[name] for name in names], np.int64)
        self._until, self._counts = 0, np.zeros(len(prefixes), np.int64)

    def of(self, sample: int) -> int:
        return int(self._numbers[self._sources[sample]])

    def after(self, consumed_samples: int, left_out: Ranges = ()) -> dict[str, float]:
        rest = len(self._sources) - sum(last - first + 1 for first, last in left_out)
        counts = self._first(min(consumed_samples, rest), left_out)
        if consumed_samples > rest:
            counts = counts + self._first(consumed_samples - rest, left_out)
        tokens = self._length * np.bincount(self._numbers, counts, len(self.names))
        return {f"consumed_tokens/{name}": count for name, count in zip(self.names, tokens.tolist(), strict=True)}

    def _first(self, consumed: int, left_out: Ranges) -> np.ndarray:
        """Return how many of the first samples, without those left out, are of each source."""
        end = sample_at(consumed - 1, left_out) + 1
        if end < self._until:
            self._until, self._counts = 0, np.zeros_like(self._counts)
        for start in range(self._until, end, _PIECE):
            self._counts += self._of(start, min(start + _PIECE, end))
        self._until = end
        passed: np.ndarray | int = sum(self._of(first, last + 1) for first, last in left_out if last < end)
        return self._counts - passed

    def _of(self, start: int, stop: int) -> np.ndarray:
        """Return how many of these samples are of each source."""
        return np.bincount(self._sources[start:stop], minlength=len(self._counts))


def short_names(prefixes: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths that tell the prefixes apart. Equal prefixes have equal names."""
    parts = [prefix.strip("/").split("/") for prefix in prefixes]
    wanted, names = len(set(prefixes)), list(prefixes)
    for depth in range(max(map(len, parts), default=0), 0, -1):
        shorter = ["/".join(each[-depth:]) for each in parts]
        if len(set(shorter)) < wanted:
            break
        names = shorter
    return names
