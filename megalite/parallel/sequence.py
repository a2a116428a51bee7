"""Cutting of samples into chunks for context parallelism, and the indices of a rank's tokens in their samples.

A sample is cut into equal chunks, and each context-parallel rank has equally many of them. By default there are 2C
chunks for C ranks, and rank r has the chunks r and 2C - 1 - r, which gives all ranks the same number of causal scores.
Documents never move a cut: they are a mask.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

Runs = tuple[range, ...]
"""Indices of tokens or of rows of a tensor, as consecutive runs in order."""
ChunkTable = tuple[tuple[int, ...], ...]
"""The chunks of each context-parallel rank, ascending. All ranks have equally many."""
_NEAR = 1.01
"""Work of the busiest rank over the mean at which chunks are no longer exchanged."""
_EXCHANGES, _IDLE = 1, 4
"""Most exchanges of chunks, per rank, and the number of idle ranks that are tried for each."""


@dataclass(frozen=True)
class SequenceLayout:
    """The indices in the sample of each context-parallel rank's tokens. They are equal for all samples of a batch.

    Attributes:
        length: number of tokens of the full sample.
        of_ranks: the indices of each rank's tokens, counted from 0 at the start of the sample, ascending.
        rank: this rank's position among the context-parallel ranks.
    """

    length: int
    of_ranks: tuple[Runs, ...]
    rank: int = 0

    @staticmethod
    def whole(length: int) -> SequenceLayout:
        """Return the layout of a rank that has all tokens of each sample."""
        return SequenceLayout(length, ((range(length),),))

    @staticmethod
    def cut(length: int, table: ChunkTable, rank: int) -> SequenceLayout:
        """Return the layout of `rank` if samples are cut into the chunks of the table.

        Raises:
            ValueError: the tokens do not divide evenly into chunks.
        """
        if len(table) == 1:
            return SequenceLayout.whole(length)
        chunk, left = divmod(length, sum(map(len, table)))
        if left:
            raise ValueError(f"{length} tokens of a sample cannot be cut into {sum(map(len, table))} equal chunks")
        starts = (tuple(number * chunk for number in chunks) for chunks in table)
        return SequenceLayout(length, tuple(tuple(range(at, at + chunk) for at in each) for each in starts), rank)

    @cached_property
    def runs(self) -> Runs:
        """The indices of this rank's tokens."""
        return self.of_ranks[self.rank]

    @cached_property
    def is_whole(self) -> bool:
        """True if the rank has all tokens, in order."""
        return self.runs == (range(self.length),)

    @cached_property
    def run_owners(self) -> tuple[int, ...]:
        """The rank that has each run, in the order of the sample."""
        return tuple(
            rank for _, rank in sorted((run.start, rank) for rank, runs in enumerate(self.of_ranks) for run in runs)
        )

    @cached_property
    def run_numbers(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of each rank's runs, counted in the order of the sample."""
        numbers: list[list[int]] = [[] for _ in self.of_ranks]
        for number, rank in enumerate(self.run_owners):
            numbers[rank].append(number)
        return tuple(map(tuple, numbers))

    def grouped(self, size: int) -> SequenceLayout:
        """Return the layout of groups of `size` neighbouring ranks, which put their tokens together, in order."""
        if size == len(self.of_ranks):
            return SequenceLayout.whole(self.length)
        groups = [sum(self.of_ranks[at : at + size], ()) for at in range(0, len(self.of_ranks), size)]
        in_order = tuple(tuple(sorted(runs, key=lambda run: run.start)) for runs in groups)
        return SequenceLayout(self.length, in_order, self.rank // size)

    def own(self, values: Tensor, dimension: int = 1) -> Tensor:
        """Return this rank's tokens of a tensor with the tokens of the sample in order along this dimension."""
        if self.is_whole:
            return values
        return torch.cat([values.narrow(dimension, run.start, len(run)) for run in self.runs], dimension)

    def places(self, device: torch.device | None = None) -> Tensor:
        """Return the index in the sample of each token of this rank, [tokens] int64. None: torch's default device."""
        return _places(self.runs, device)

    def gathered_places(self, device: torch.device) -> Tensor:
        """Return the index in the sample of each token if those of all ranks are gathered in rank order: [length]."""
        return _places(sum(self.of_ranks, ()), device)

    def in_order(self, of_ranks: Sequence[Tensor], dimension: int) -> Tensor:
        """Put the tokens of all ranks, along this dimension of a tensor per rank, into the order of the sample."""
        pieces = {
            run.start: piece
            for runs, values in zip(self.of_ranks, of_ranks, strict=True)
            for run, piece in zip(runs, values.split([len(run) for run in runs], dimension), strict=True)
        }
        return torch.cat([pieces[start] for start in sorted(pieces)], dimension)

    def by_rank(self, values: Tensor, dimension: int) -> list[Tensor]:
        """Return each rank's tokens of a tensor with the tokens of the sample in order along this dimension."""
        return [replace(self, rank=rank).own(values, dimension) for rank in range(len(self.of_ranks))]

    def part(self, number: int, parts: int) -> Runs:
        """Cut the rank's tokens, in order, into `parts` equal parts, and return the indices of part `number`.

        Raises:
            ValueError: the tokens do not divide evenly.
        """
        tokens, left = divmod(sum(map(len, self.runs)), parts)
        if left:
            raise ValueError(f"{tokens * parts + left} tokens of a sample cannot be divided into {parts} equal parts")
        return between(self.runs, number * tokens, (number + 1) * tokens)

    def rows_of(self, heads: range) -> Runs:
        """Return the rows of a matrix [heads * length, ...] that belong to the rank's tokens in these heads."""
        if self.is_whole:
            return (range(heads.start * self.length, heads.stop * self.length),)
        at = (head * self.length for head in heads)
        return tuple(range(begin + run.start, begin + run.stop) for begin in at for run in self.runs)


def between(runs: Runs, start: int, stop: int) -> Runs:
    """Return the indices from number `start` to `stop` of those in the runs."""
    found = []
    for run in runs:
        cut = run[max(start, 0) : max(stop, 0)]
        start, stop = start - len(run), stop - len(run)
        if cut:
            found.append(cut)
    return tuple(found)


def _places(runs: Sequence[range], device: torch.device | None) -> Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def zigzag(ranks: int) -> ChunkTable:
    """Return the default table: two chunks per rank, the first ones in order and the last ones in reverse order."""
    if ranks == 1:
        return ((0,),)
    return tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))


def deal(work: Sequence[int], ranks: int) -> ChunkTable:
    """Deal chunks to ranks so that the most work of a rank is close to the mean.

    Chunks are dealt by falling work, each to the rank with the least work among those that may take one more. Then the
    busiest rank exchanges a chunk for a smaller one of an idle rank, until it has at most 1.01 times the mean, or as
    long as that helps.

    Args:
        work: the work of each chunk; their number is a multiple of `ranks`.
    """
    each, mean = len(work) // ranks, sum(work) / ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    least = [(0, rank) for rank in range(ranks)]
    for chunk in sorted(range(len(work)), key=lambda chunk: (-work[chunk], chunk)):
        _, rank = heapq.heappop(least)
        dealt[rank].append(chunk)
        loads[rank] += work[chunk]
        if len(dealt[rank]) < each:
            heapq.heappush(least, (loads[rank], rank))
    for _ in range(_EXCHANGES * ranks):
        by_load = sorted(range(ranks), key=lambda rank: (loads[rank], rank))
        busiest = by_load.pop()
        if loads[busiest] <= _NEAR * mean or not any(
            _exchange(work, dealt, loads, busiest, idle) for idle in by_load[:_IDLE]
        ):
            break
    return tuple(tuple(sorted(chunks)) for chunks in dealt)


def _exchange(work: Sequence[int], dealt: list[list[int]], loads: list[int], busiest: int, idle: int) -> bool:
    """Exchange the pair of chunks that comes closest to equal loads. Returns False if no pair brings them closer."""
    difference = loads[busiest] - loads[idle]
    found, chunk, smaller = min(
        (abs(difference - 2 * (work[chunk] - work[smaller])), chunk, smaller)
        for chunk in dealt[busiest]
        for smaller in dealt[idle]
    )
    if found >= difference:
        return False
    for rank, given, taken in ((busiest, chunk, smaller), (idle, smaller, chunk)):
        dealt[rank].remove(given)
        dealt[rank].append(taken)
        loads[rank] += work[taken] - work[given]
    return True
