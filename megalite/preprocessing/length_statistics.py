"""Statistics of the lengths of a dataset's sequences."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

# Lengths from here on are counted together: quantiles among them are only known to be at least this.
LONGEST_COUNTED = 1 << 20


class LengthStatistics(NamedTuple):
    """Statistics of the number of tokens per sequence; all 0 if there are no sequences."""

    sequences: int = 0
    mean: float = 0.0
    shortest: int = 0
    median: int = 0
    percentile_99: int = 0
    longest: int = 0

    def __str__(self) -> str:
        """Return the statistics as text for a person."""
        return (
            f"{self.shortest:,} to {self.longest:,} tokens, mean {self.mean:,.1f}, median {self.median:,}, "
            f"99 % at most {self.percentile_99:,}"
        )


def length_statistics(blocks: Iterable[np.ndarray]) -> LengthStatistics:
    """Return statistics of the lengths in blocks; the memory needed does not grow with their number."""
    counts = np.zeros(1, np.int64)
    total = longest = 0
    for lengths in blocks:
        fewer, counts = sorted((counts, np.bincount(np.minimum(lengths, LONGEST_COUNTED))), key=len)
        counts[: len(fewer)] += fewer
        total += int(lengths.sum(dtype=np.int64))
        longest = max(longest, int(lengths.max(initial=0)))
    below = np.cumsum(counts)
    sequences = int(below[-1])
    if not sequences:
        return LengthStatistics()
    shortest, median, percentile_99 = (int(np.searchsorted(below, rank)) for rank in _ranks(sequences))
    return LengthStatistics(sequences, total / sequences, shortest, median, percentile_99, longest)


def _ranks(count: int) -> tuple[int, int, int]:
    """Return the ranks, counted from 1 in order of length, of the shortest, the median and the 99th percentile."""
    return 1, (count + 1) // 2, -(-count * 99 // 100)
