"""Places of a rank's tokens in their samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Runs = tuple[range, ...]
"""Places, or rows of a tensor, in order."""


@dataclass(frozen=True)
class SequenceLayout:
    """The places in the sample of this rank's tokens, the same for each sample of a batch.

    Attributes:
        length: of the whole sample.
        runs: the places, counted from 0.
    """

    length: int
    runs: Runs

    @staticmethod
    def whole(length: int) -> SequenceLayout:
        """All tokens of a sample."""
        return SequenceLayout(length, (range(length),))

    @property
    def is_whole(self) -> bool:
        """Tell whether the rank has all tokens, in their order."""
        return self.runs == (range(self.length),)

    def places(self, device: torch.device) -> Tensor:
        """The place of each token, [tokens] int64."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])

    def part(self, number: int, parts: int) -> Runs:
        """The places of one of the equal parts into which the rank's tokens are cut in their order.

        Raises ValueError if some would be left over.
        """
        tokens, left = divmod(sum(map(len, self.runs)), parts)
        if left:
            raise ValueError(f"{tokens * parts + left} tokens of a sample do not make {parts} equal parts")
        begin, found = number * tokens, []
        for run in self.runs:
            cut = run[max(begin, 0) : max(begin + tokens, 0)]
            begin -= len(run)
            if cut:
                found.append(cut)
        return tuple(found)

    def rows_of(self, heads: range) -> Runs:
        """The rows of a matrix [heads * length, ...] that stand for the rank's tokens in some consecutive heads."""
        if self.is_whole:
            return (range(heads.start * self.length, heads.stop * self.length),)
        at = (head * self.length for head in heads)
        return tuple(range(begin + run.start, begin + run.stop) for begin in at for run in self.runs)
