"""The order in which samples are read from one pass over a source: a stream of its tokens, in a new order of documents.

A pass is cut into lanes, from which samples are taken in turns: so neighbouring samples are of other documents, and yet
what is read of each lane is its beginning. If the length of samples changes, reading goes on where each lane stands: no
token is lost or repeated. At the end, when lanes have less than a sample left, their ends are joined.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

Ranges = list[tuple[int, int]]
"""First token of each part of a pass, and the one behind its last."""
LANE = 1 << 20
"""Least tokens of a lane: many samples, even of long ones."""
MOST_LANES = 1024


class Reading(Protocol):
    """Order of samples of one length. The last one has what is left, if that is less than a sample.

    Attributes:
        whole: number of samples before it.
    """

    whole: int

    def ranges(self, sample: int) -> Ranges:
        """Return the parts of a sample, which have as many tokens as it."""

    def rest(self, samples: int) -> np.ndarray:
        """Return the segments that are left behind the first samples, int64 [segments, 2]: begin and end."""


def lanes(begin: int, end: int) -> np.ndarray:
    """Return the lanes of a pass whose tokens before `begin` have been read, int64 [lanes, 2]."""
    count = min(max((end - begin) // LANE, 1), MOST_LANES)
    bounds = begin + (end - begin) * np.arange(count + 1) // count
    return np.stack([bounds[:-1], bounds[1:]], axis=1)


class InTurns:
    """Samples from segments in turns, as long as all have one; then from what is left of them, joined.

    Args:
        segments: int64 [segments, 2], the begin and the end of each.
        length: tokens of a sample.
    """

    def __init__(self, segments: np.ndarray, length: int) -> None:
        self._segments, self._length = segments, length
        sizes = segments[:, 1] - segments[:, 0]
        self._rows = int(sizes.min(initial=np.iinfo(np.int64).max)) // length if len(segments) else 0
        self._in_turns = self._rows * len(segments)
        self._ends = np.cumsum(sizes - self._rows * length)
        self.whole = int(sizes.sum()) // length

    def ranges(self, sample: int) -> Ranges:
        """Return the parts of a sample."""
        if sample < self._in_turns:
            row, lane = divmod(sample, len(self._segments))
            begin = self._segments.item(lane, 0) + row * self._length
            return [(begin, begin + self._length)]
        first = (sample - self._in_turns) * self._length
        return [(begin, end) for begin, end in self._joined(first, first + self._length).tolist()]

    def rest(self, samples: int) -> np.ndarray:
        """Return the segments behind the first samples."""
        if samples > self._in_turns:
            total = int(self._ends[-1])
            return self._joined((samples - self._in_turns) * self._length, total)
        row, lane = divmod(samples, max(1, len(self._segments)))
        read = row + (np.arange(len(self._segments)) < lane)
        left = np.stack([self._segments[:, 0] + read * self._length, self._segments[:, 1]], axis=1)
        return left[left[:, 0] < left[:, 1]]

    def _joined(self, first: int, end: int) -> np.ndarray:
        """Return the parts that have these tokens of what is left of the segments, int64 [parts, 2]."""
        low, high = np.searchsorted(self._ends, first, side="right"), np.searchsorted(self._ends, end, side="left")
        parts = self._segments[low : high + 1].copy()
        parts[:, 0] += self._rows * self._length
        if len(parts):
            before = int(self._ends[low]) - int(parts[0, 1] - parts[0, 0])
            if high < len(self._ends):
                parts[-1, 1] -= int(self._ends[high]) - end
            parts[0, 0] += first - before
        return parts[parts[:, 0] < parts[:, 1]]


class InOrder:
    """Samples in an order that is given, and then what is behind them all.

    Args:
        order: number of each sample: it has the tokens from its number times the length on.
        length: tokens of a sample.
        total: tokens of the pass.
    """

    def __init__(self, order: np.ndarray, length: int, samples: int, total: int) -> None:
        self._order, self._length, self._samples, self._total = order, length, samples, total
        self.whole = len(order) + (total - samples * length) // length

    def ranges(self, sample: int) -> Ranges:
        """Return the parts of a sample."""
        if sample < len(self._order):
            begin = int(self._order[sample]) * self._length
            return [(begin, begin + self._length)]
        return [(self._samples * self._length, self._total)]

    def rest(self, samples: int) -> np.ndarray:
        """Return the segments behind the first samples: runs of samples that follow one another in the stream."""
        left = np.sort(self._order[samples:].astype(np.int64))
        begins = np.flatnonzero(np.diff(left, prepend=-2) > 1)
        ends = np.append(begins[1:], len(left))[: len(begins)]
        runs = np.stack([left[begins], left[ends - 1] + 1], axis=1) * self._length
        behind = self._samples * self._length
        if len(runs) and runs[-1, 1] == behind:
            runs[-1, 1] = self._total
        elif behind < self._total:
            runs = np.concatenate([runs, [[behind, self._total]]])
        return runs
