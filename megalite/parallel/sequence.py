"""Indices of a rank's tokens in their samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Runs = tuple[range, ...]
"""Indices of tokens or of rows of a tensor, as consecutive runs in order."""


@dataclass(frozen=True)
class SequenceLayout:
    """The indices in the sample of this rank's tokens. They are equal for all samples of a batch.

    Attributes:
        length: number of tokens of the full sample.
        runs: the indices, counted from 0 at the start of the sample.
    """

    length: int
    runs: Runs

    @staticmethod
    def whole(length: int) -> SequenceLayout:
        """Return the layout of a rank that has all tokens of each sample."""
        return SequenceLayout(length, (range(length),))

    @property
    def is_whole(self) -> bool:
        """True if the rank has all tokens, in order."""
        return self.runs == (range(self.length),)

    def places(self, device: torch.device) -> Tensor:
        """Return the index in the sample of each token, [tokens] int64."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self.runs])

    def part(self, number: int, parts: int) -> Runs:
        """Cut the rank's tokens, in order, into `parts` equal parts, and return the indices of part `number`.

        Raises:
            ValueError: the tokens do not divide evenly.
        """
        tokens, left = divmod(sum(map(len, self.runs)), parts)
        if left:
            raise ValueError(f"{tokens * parts + left} tokens of a sample cannot be divided into {parts} equal parts")
        begin, found = number * tokens, []
        for run in self.runs:
            cut = run[max(begin, 0) : max(begin + tokens, 0)]
            begin -= len(run)
            if cut:
                found.append(cut)
        return tuple(found)

    def rows_of(self, heads: range) -> Runs:
        """Return the rows of a matrix [heads * length, ...] that belong to the rank's tokens in these heads."""
        if self.is_whole:
            return (range(heads.start * self.length, heads.stop * self.length),)
        at = (head * self.length for head in heads)
        return tuple(range(begin + run.start, begin + run.stop) for begin in at for run in self.runs)
