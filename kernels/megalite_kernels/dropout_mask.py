"""Mask of dropout, by which dropout.py and its kernel draw the same elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

GROUP = 16
"""Elements that share a counter."""
LEVELS = 1 << 16


@dataclass(frozen=True)
class DropoutMask:
    """The elements to drop from a local part of each sample's tensor.

    Attributes:
        probability: probability of dropping an element, below 1, rounded to a multiple of 1 / 65536.
        samples: the global number of each sample in the batch.
        rows: the rows of each sample's tensor that are present locally, as consecutive runs.
    """

    probability: float
    seed: int
    layer: int
    site: int
    samples: tuple[int, ...]
    rows: tuple[range, ...]

    @property
    def threshold(self) -> int:
        return min(round(LEVELS * self.probability), LEVELS - 1)

    @property
    def scale(self) -> float:
        return LEVELS / (LEVELS - self.threshold)

    def runs(self) -> Iterator[tuple[slice, range]]:
        """Yield each run of rows with its slice of the local rows, as (slice, run)."""
        begin = 0
        for run in self.rows:
            yield slice(begin, begin + len(run)), run
            begin += len(run)

    def runs_of_samples(self) -> Iterator[tuple[slice, range]]:
        """Yield each run of consecutive sample numbers with its slice of the batch. In training there is one run."""
        begins = [i for i, sample in enumerate(self.samples) if i == 0 or sample != self.samples[i - 1] + 1]
        for begin, end in itertools.pairwise([*begins, len(self.samples)]):
            first = self.samples[begin]
            yield slice(begin, end), range(first, first + end - begin)
