"""Choice of the source of each sample of a phase, by weight: found for any sample at once, without an index of all.

Sample k of a source is due at the time (k + offset) / weight, with an offset between 0 and 1 that is the source's own;
samples are given in the order of these times. This is a divisor method, as those by which parliaments share out seats:
until any time, a source has its share to within one sample, and more samples never take one away from a source. A
source that has reached its limit is due no more, and the others go on in their proportions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megalite.extras.mixes.schedule import MARK

NO_LIMIT = 2**62
_LEAST = 4096
"""Least span of a round, in samples: enough work for each numpy operation."""
_KEPT = 4
"""Rounds that are kept: those of the steps that threads read now and in advance."""


class _Round(NamedTuple):
    """Samples that are due within a span of time, in order.

    Attributes:
        first: number of the first sample of the phase.
        sources: source of each sample, int64.
        numbers: number of each sample in its source, counted from the start of the phase, int64.
        before: samples of each source that are due before, int64 [sources].
    """

    first: int
    sources: np.ndarray
    numbers: np.ndarray
    before: np.ndarray


def offset_of(name: str) -> float:
    """Return the offset of a source, which belongs to its name: neither other sources nor other files change it."""
    name, _, _ = name.partition(MARK)
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return (number + 0.5) / 2**32


class Apportionment:
    """Samples of one phase.

    Args:
        names: names of the sources, from which their offsets follow.
        weights: positive numbers, one for each source.
        limits: most samples of each source; NO_LIMIT for as many as are asked for.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[float], limits: Sequence[int]) -> None:
        total = math.fsum(weights)
        self._weights = np.array([weight / total for weight in weights])
        self._offsets = np.array([offset_of(name) for name in names])
        self._limits = np.array(limits, np.int64)
        self.capacity = min(sum(limits), NO_LIMIT)
        """Number of all samples."""
        self._span = max(_LEAST, 4 * len(names))
        self._recent: tuple[_Round, ...] = ()

    def at(self, sample: int) -> tuple[int, int]:
        """Return the source of a sample, and its number there, both from 0.

        Raises IndexError if the phase has no such sample.
        """
        found = self._round_with(sample)
        place = sample - found.first
        return found.sources.item(place), found.numbers.item(place)

    def counts(self, samples: int) -> np.ndarray:
        """Return how many of the first samples are of each source, int64 [sources]."""
        if samples <= 0:
            return np.zeros_like(self._limits)
        if samples >= self.capacity:
            return self._limits.copy()
        found = self._round_with(samples)
        return found.before + np.bincount(found.sources[: samples - found.first], minlength=len(self._limits))

    def end_of(self, source: int) -> int | None:
        """Return the number of samples after which a source has reached its limit; None if it never does."""
        limit = int(self._limits[source])
        if limit == NO_LIMIT:
            return None
        if limit == 0:
            return 0
        return int(self._due((limit - 1 + self._offsets[source]) / self._weights[source]).sum())

    def _round_with(self, sample: int) -> _Round:
        """Return the round that has a sample, and keep it. Raises IndexError if the phase has no such sample."""
        for kept in self._recent:
            if 0 <= sample - kept.first < len(kept.sources):
                return kept
        if not 0 <= sample < self.capacity:
            raise IndexError(f"sample {sample} of {self.capacity}")
        number = self._number_of(sample)
        before, until = self._due(number * self._span), self._due((number + 1) * self._span)
        each = until - before
        sources = np.repeat(np.arange(len(each)), each)
        starts = np.cumsum(each) - each
        numbers = np.arange(len(sources)) - starts[sources] + before[sources]
        order = np.argsort((numbers + self._offsets[sources]) / self._weights[sources], kind="stable")
        found = _Round(int(before.sum()), sources[order], numbers[order], before)
        self._recent = (found, *self._recent[: _KEPT - 1])
        return found

    def _number_of(self, sample: int) -> int:
        """Return the number of the round that has a sample."""
        low, high = 0, max(1, sample // self._span + 1)
        while int(self._due(high * self._span).sum()) <= sample:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if int(self._due(middle * self._span).sum()) <= sample:
                low = middle
            else:
                high = middle
        return low

    def _due(self, time: float) -> np.ndarray:
        """Return how many samples of each source are due until a time, int64 [sources].

        The count is of the times as they are rounded: the same comparison decides here and in the order of a round.
        """
        counts = np.maximum(np.floor(time * self._weights - self._offsets) + 1, 0)
        counts += (counts + self._offsets) / self._weights <= time
        counts -= (counts > 0) & ((counts - 1 + self._offsets) / self._weights > time)
        return np.minimum(counts.astype(np.int64), self._limits)
