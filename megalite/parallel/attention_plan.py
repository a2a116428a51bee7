"""Plan of attention under context parallelism: which pairs of chunks of queries and of keys a rank computes, and when.

A query sees the keys from its first visible one (of its document, and of its window) up to itself. So a pair of chunks
is of one of four kinds: skipped, if no query sees a key; "all", if all queries see all keys; "causal", if both are the
same chunk and each query sees the keys up to itself; or "masked". Chunks do not overlap, and the first visible key
never falls from one query to the next.

Everything here is a pure function of the layout and of the first keys. Forward, backward, the balance of work over
ranks and the figures of a run read the same plan.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from megalite.parallel.sequence import ChunkTable, Runs, SequenceLayout, deal

PartKind = Literal["all", "causal", "masked"]


class Part(NamedTuple):
    """One call of attention, over rows of the rank's queries and rows of the keys that are present in a round.

    Attributes:
        queries: rows of the queries.
        keys: rows of the keys.
        kind: which of the scores are visible.
    """

    queries: slice
    keys: slice
    kind: PartKind

    @property
    def scores(self) -> int:
        """Number of scores that are computed. Of a masked part, all are."""
        rows, columns = (each.stop - each.start for each in (self.queries, self.keys))
        return rows * (rows + 1) // 2 if self.kind == "causal" else rows * columns


@dataclass(frozen=True)
class FirstKeys:
    """Bounds of the first key that a query sees, over the samples of a batch. Its rows are on the host.

    Attributes:
        least: the smallest over the samples, [sequence]; None if all queries see the sample's first key.
        most: the largest over the samples, [sequence].
        window: the number of keys before its own that a query sees; None for all.
    """

    least: np.ndarray | None = None
    most: np.ndarray | None = None
    window: int | None = None

    def bounds(self, run: range) -> tuple[int, int]:
        """Return the smallest and the largest first key of the queries in a run."""
        first, last = run.start, run.stop - 1
        near, nearest = (0, 0) if self.window is None else (max(at - self.window, 0) for at in (first, last))
        if self.least is None or self.most is None:
            return near, nearest
        return max(int(self.least[first]), near), max(int(self.most[last]), nearest)


def parts(queries: Runs, keys: Runs, first: FirstKeys) -> list[Part]:
    """Return the calls of attention of these queries over these keys.

    Chunks next to each other that see all of the same keys are one call, and so is the triangle of a rank's own chunks.
    """
    kinds = [list(_row(run, keys, first.bounds(run))) for run in queries]
    rows, columns = _slices(queries), _slices(keys)
    count = len(queries)
    triangle = [["all"] * row + ["causal"] + [None] * (count - row - 1) for row in range(count)]
    if queries == keys and count > 1 and kinds == triangle:
        return [Part(slice(0, rows[-1].stop), slice(0, rows[-1].stop), "causal")]
    found: list[Part] = []
    for row, of_keys in zip(rows, kinds, strict=True):
        found += _calls(row, columns, of_keys)
    return _joined(found)


def _row(run: range, keys: Runs, bounds: tuple[int, int]) -> Iterator[PartKind | None]:
    """Yield the kind of each pair of a chunk of queries and one of the keys; None for a skipped one."""
    least, most = bounds
    for key in keys:
        if key.start >= run.stop or least >= key.stop:
            yield None
        elif most > key.start:
            yield "masked"
        else:
            yield "causal" if key == run else "all"


def _slices(runs: Runs) -> list[slice]:
    """Return the rows of each run in a tensor that has them one after the other."""
    ends = np.cumsum([0, *map(len, runs)]).tolist()
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]


def _calls(row: slice, columns: Sequence[slice], kinds: Sequence[PartKind | None]) -> Iterator[Part]:
    """Yield the calls of one chunk of queries. Neighbouring chunks of keys that are all visible are one call."""
    begin: int | None = None
    for column, kind in [*zip(columns, kinds, strict=True), (slice(0, 0), None)]:
        if kind == "all":
            begin = column.start if begin is None else begin
            end = column.stop
            continue
        if begin is not None:
            yield Part(row, slice(begin, end), "all")
            begin = None
        if kind is not None:
            yield Part(row, column, kind)


def _joined(found: list[Part]) -> list[Part]:
    """Join calls of neighbouring queries over the same keys, all of which they see."""
    joined: list[Part] = []
    for part in sorted(found, key=lambda each: (each.keys.start, each.keys.stop, each.queries.start)):
        before = joined[-1] if joined else None
        if (
            before is not None
            and part.kind == before.kind == "all"
            and (before.keys, before.queries.stop) == (part.keys, part.queries.start)
        ):
            joined[-1] = Part(slice(before.queries.start, part.queries.stop), part.keys, "all")
        else:
            joined.append(part)
    return sorted(joined, key=lambda each: (each.queries.start, each.keys.start))


class Round(NamedTuple):
    """The calls of one round.

    Attributes:
        keys: the tokens whose keys and values are present.
        parts: the calls, possibly none.
    """

    keys: Runs
    parts: list[Part]

    @property
    def scores(self) -> int:
        """Number of scores that are computed."""
        return sum(part.scores for part in self.parts)


def rounds(layout: SequenceLayout, first: FirstKeys, *, gathers: bool = False) -> list[Round]:
    """Return the rounds of a ring: in round i, a rank has the keys of the rank i places before it.

    All ranks have the same number of rounds, with or without calls in them. With `gathers`, there is one round, with
    all keys in the order of the sample.
    """
    count = len(layout.of_ranks)
    present = [layout.of_ranks[(layout.rank - number) % count] for number in range(count)]
    if gathers:
        present = [tuple(sorted(sum(layout.of_ranks, ()), key=lambda run: run.start))]
    return [Round(keys, parts(layout.runs, keys, first)) for keys in present]


def work_of_chunks(length: int, chunks: int, windows: Mapping[int | None, int], first: FirstKeys) -> list[int]:
    """Return the number of scores that the queries of each chunk need, summed over layers.

    Args:
        windows: the number of layers with each window (`LayerSpec.keys_before`).
        first: the first keys without a window.
    """
    size = length // chunks
    starts = np.arange(chunks) * size
    work = np.zeros(chunks, dtype=np.int64)
    for window, layers in windows.items():
        bounds = [FirstKeys(first.least, first.most, window).bounds(range(at, at + size)) for at in starts.tolist()]
        least, most = np.array(bounds).T
        # Of the keys before its own chunk, a chunk of queries computes those of the chunks from that of `least` on.
        before = starts // size - least // size
        diagonal = np.where(most > starts, size * size, size * (size + 1) // 2)
        work += layers * (before * size * size + diagonal)
    return work.tolist()


def balanced(
    length: int, ranks: int, chunks_per_rank: int, windows: Mapping[int | None, int], first: FirstKeys
) -> ChunkTable:
    """Return the table that deals chunks to ranks by the work that the documents leave."""
    return deal(work_of_chunks(length, ranks * chunks_per_rank, windows, first), ranks)
