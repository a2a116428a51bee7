"""Tokens that a run has consumed of each source of a blend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megalite.data.sampler import Ranges, sample_at
from megalite.process.output import printable

MOST_SOURCES = 32
"""Most sources of a blend whose tokens records have."""
_PIECE = 2**20
"""Samples that are counted at once, to bound the memory."""


class SourceTokens:
    """Count of the tokens of each source: a function of the number of consumed samples.

    Args:
        sources: the source of each sample, [samples].
        prefixes: the prefix of each source.
        tokens_per_sample: tokens of a sample.
    """

    def __init__(self, sources: np.ndarray, prefixes: Sequence[str], tokens_per_sample: int) -> None:
        self._sources, self._length = sources, tokens_per_sample
        self._names = [printable(name) for name in short_names(prefixes)]  # records go to other programs
        self._until, self._counts = 0, np.zeros(len(prefixes), np.int64)

    def after(self, consumed_samples: int, left_out: Ranges = ()) -> dict[str, float]:
        """Return the tokens of each source among the first samples, as figures of a record. They add up to all.

        `left_out`: samples that are passed over, and are not consumed. In their place the first ones come once more, at
        the end.
        """
        rest = len(self._sources) - sum(last - first + 1 for first, last in left_out)
        counts = self._first(min(consumed_samples, rest), left_out)
        if consumed_samples > rest:
            counts = counts + self._first(consumed_samples - rest, left_out)
        figures = dict.fromkeys((f"consumed_tokens/{name}" for name in self._names), 0.0)
        for name, count in zip(self._names, counts.tolist(), strict=True):
            figures[f"consumed_tokens/{name}"] += count * self._length
        return figures

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
