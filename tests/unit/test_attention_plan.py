"""The plan of attention over context-parallel ranks computes each visible score once, and balances the work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.parallel.attention_plan import FirstKeys, balanced, parts, rounds, work_of_chunks
from megalite.parallel.sequence import ChunkTable, Runs, SequenceLayout, deal, zigzag

CAUSAL = FirstKeys()
CHUNKS = 16
"""Chunks per rank that --cp-balance documents has by default."""


# ---------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize(
    ("ranks", "table"),
    [
        (1, ((0,),)),
        (2, ((0, 3), (1, 2))),
        (3, ((0, 5), (1, 4), (2, 3))),
        (4, ((0, 7), (1, 6), (2, 5), (3, 4))),
    ],
)
def test_zigzag_gives_each_rank_an_early_and_a_late_chunk(ranks: int, table: ChunkTable) -> None:
    assert zigzag(ranks) == table


def test_a_layout_has_the_tokens_of_the_rank() -> None:
    layout = SequenceLayout.cut(12, zigzag(3), 1)
    assert layout.runs == (range(2, 4), range(8, 10))
    assert layout.of_ranks == ((range(2), range(10, 12)), layout.runs, (range(4, 6), range(6, 8)))
    assert layout.places(torch.device("cpu")).tolist() == [2, 3, 8, 9]
    assert layout.gathered_places(torch.device("cpu")).tolist() == [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7]
    assert layout.own(torch.arange(24).view(2, 12)).tolist() == [[2, 3, 8, 9], [14, 15, 20, 21]]
    assert not layout.is_whole
    assert SequenceLayout.cut(12, zigzag(1), 0) == SequenceLayout.whole(12)
    assert SequenceLayout.whole(12).is_whole


def test_tokens_that_do_not_divide_into_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="10 tokens of a sample cannot be cut into 4 equal chunks"):
        SequenceLayout.cut(10, zigzag(2), 0)


@pytest.mark.parametrize("table", [zigzag(2), zigzag(3), ((1, 2, 5), (0, 3, 4))])
def test_gathered_tokens_are_put_in_order_and_distributed_again(table: ChunkTable) -> None:
    layout = SequenceLayout.cut(24, table, 0)
    values = torch.arange(48).view(2, 24)
    of_ranks = layout.by_rank(values, dimension=1)
    for rank, own in enumerate(of_ranks):
        assert torch.equal(own, SequenceLayout.cut(24, table, rank).own(values))
    assert torch.equal(layout.in_order(of_ranks, dimension=1), values)
    assert torch.equal(layout.in_order([own.t() for own in of_ranks], dimension=0), values.t())
    assert torch.equal(torch.cat(of_ranks, dim=1)[0], layout.gathered_places(torch.device("cpu")))


def test_neighbouring_ranks_put_their_tokens_together_in_order() -> None:
    for rank in range(4):
        layout = SequenceLayout.cut(8, zigzag(4), rank).grouped(2)
        assert layout.of_ranks == (
            (range(1), range(1, 2), range(6, 7), range(7, 8)),
            (range(2, 3), range(3, 4), range(4, 5), range(5, 6)),
        )
        assert layout.rank == rank // 2
        assert SequenceLayout.cut(8, zigzag(4), rank).grouped(1) == SequenceLayout.cut(8, zigzag(4), rank)
        assert SequenceLayout.cut(8, zigzag(4), rank).grouped(4) == SequenceLayout.whole(8)


# ---------------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class Case:
    """Samples that are cut.

    Attributes:
        table: the chunks of each rank.
        group: number of neighbouring ranks that put their tokens together.
        chunk: tokens per chunk.
        starts: for each sample, the first token of each document.
        window: the number of keys before its own that a query sees; None for all.
    """

    table: ChunkTable
    group: int
    chunk: int
    starts: list[list[int]]
    window: int | None

    @property
    def length(self) -> int:
        return self.chunk * sum(map(len, self.table))

    @property
    def documents(self) -> np.ndarray:
        """The first token of each token's document, [samples, length]."""
        return np.stack([first_tokens(starts, self.length) for starts in self.starts])

    @property
    def first(self) -> FirstKeys:
        return FirstKeys(self.documents.min(0), self.documents.max(0), self.window)

    @property
    def visible(self) -> np.ndarray:
        """True for each query and key that it sees, [samples, length, length]."""
        query, key = np.arange(self.length)[:, None], np.arange(self.length)
        near = query - key <= (self.length if self.window is None else self.window)
        return (key <= query) & near & (key >= self.documents[:, :, None])

    def layout(self, rank: int) -> SequenceLayout:
        return SequenceLayout.cut(self.length, self.table, rank).grouped(self.group)


def first_tokens(starts: list[int] | np.ndarray, length: int) -> np.ndarray:
    """Return the first token of each token's document."""
    first = np.zeros(length, dtype=np.int64)
    first[starts] = starts
    return np.maximum.accumulate(first)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks, each, chunk = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    chunks, length = draw(st.permutations(range(ranks * each))), ranks * each * chunk
    table = tuple(tuple(sorted(chunks[at : at + each])) for at in range(0, len(chunks), each))
    group = draw(st.sampled_from([size for size in (1, 2, 4) if ranks % size == 0]))
    some = st.lists(st.integers(0, length - 1), max_size=4)
    starts = draw(st.lists(some | st.just(list(range(length))), min_size=1, max_size=2))
    return Case(table, group, chunk, starts, draw(st.none() | st.integers(0, length)))


def tokens_of(runs: Runs) -> np.ndarray:
    return np.concatenate([np.arange(run.start, run.stop) for run in runs])


@settings(deadline=None, max_examples=30)
@given(cases(), st.booleans())
def test_each_visible_score_is_computed_once_and_no_pair_in_vain(case: Case, gathers: bool) -> None:
    visible, computed = case.visible, np.zeros((case.length, case.length), dtype=np.int64)
    chunk = len(case.layout(0).runs[0])  # if all ranks put their tokens together, there is one chunk
    for rank in range(0, len(case.table), case.group):
        layout = case.layout(rank)
        planned = rounds(layout, case.first, gathers=gathers)
        assert len(planned) == (1 if gathers else len(layout.of_ranks))
        for of_round in planned:
            for part in of_round.parts:
                queries, keys = tokens_of(layout.runs)[part.queries], tokens_of(of_round.keys)[part.keys]
                seen = visible[:, queries[:, None], keys]
                triangle = np.tri(len(queries), len(keys), dtype=np.bool_)
                if part.kind == "all":
                    assert seen.all()
                    of_part = np.ones_like(triangle)
                elif part.kind == "causal":
                    assert queries.tolist() == keys.tolist()
                    assert (seen == triangle).all()
                    of_part = triangle
                else:  # one chunk of queries and one of keys, for which neither of the other kinds is right
                    assert len(queries) == len(keys) == chunk
                    assert queries[0] % chunk == keys[0] % chunk == 0
                    assert seen.any()
                    assert not seen.all()
                    assert queries[0] != keys[0] or not (seen == triangle).all()
                    of_part = np.ones_like(triangle)
                assert part.scores == of_part.sum()
                computed[queries[:, None], keys] += of_part
    assert (computed[visible.any(0)] == 1).all()
    assert computed.max() == 1
    # Each pair of chunks with a visible score is computed, and no other one.
    of_chunks = (case.length // chunk, chunk, case.length // chunk, chunk)
    needed = visible.any(0).reshape(of_chunks).max((1, 3))
    assert (computed.reshape(of_chunks).max((1, 3)) == needed).all()


@settings(deadline=None, max_examples=30)
@given(cases())
def test_the_work_of_chunks_is_that_of_their_parts(case: Case) -> None:
    """The work of a chunk is exactly that of its parts, one by one, and the sum for a rank is that of its plan."""
    chunks = tuple(range(at, at + case.chunk) for at in range(0, case.length, case.chunk))
    windows = {case.window: 1, None: 2}
    work = work_of_chunks(case.length, len(chunks), windows, case.first)
    firsts = [FirstKeys(case.first.least, case.first.most, window) for window, n in windows.items() for _ in range(n)]
    for run, expected in zip(chunks, work, strict=True):
        found = (part for first in firsts for key in chunks for part in parts((run,), (key,), first))
        assert sum(part.scores for part in found) == expected
    if len(case.table) == 1:
        return  # the sample is not cut into chunks
    for rank, own in enumerate(case.table):
        layout = SequenceLayout.cut(case.length, case.table, rank)
        for gathers in (False, True):
            planned = (each for first in firsts for each in rounds(layout, first, gathers=gathers))
            assert sum(each.scores for each in planned) == sum(work[chunk] for chunk in own)


# ---------------------------------------------------------------------------------------------------- balance


@pytest.mark.parametrize("gathers", [False, True], ids=["ring", "gather"])
@pytest.mark.parametrize("ranks", range(1, 9))
def test_all_ranks_compute_equally_many_causal_scores(ranks: int, gathers: bool) -> None:
    length = 6 * ranks
    layouts = [SequenceLayout.cut(length, zigzag(ranks), rank) for rank in range(ranks)]
    scores = [sum(each.scores for each in rounds(layout, CAUSAL, gathers=gathers)) for layout in layouts]
    assert scores == [length * (length + 1) // 2 // ranks] * ranks


def busiest(table: ChunkTable, length: int, first: FirstKeys) -> float:
    """Return the scores of the rank with the most, as a multiple of the mean."""
    layouts = [SequenceLayout.cut(length, table, rank) for rank in range(len(table))]
    scores = [sum(each.scores for each in rounds(layout, first)) for layout in layouts]
    return max(scores) * len(scores) / sum(scores)


def long_tailed(seed: int, length: int) -> FirstKeys:
    """Return the first keys of a sample with documents of log-normal lengths."""
    lengths = np.random.default_rng(seed).lognormal(np.log(length / 16), 2.0, size=length)
    starts = np.cumsum(np.ceil(lengths)).astype(np.int64)
    first = first_tokens(starts[starts < length], length)
    return FirstKeys(first, first)


@pytest.mark.parametrize(("ranks", "samples"), [(2, 100), (4, 20), (8, 10)])
def test_documents_leave_all_ranks_the_same_work(ranks: int, samples: int) -> None:
    """Zigzag, in several of these samples, gives the busiest rank 1.3 times the mean or more."""
    length, uneven = 4096, 0
    for seed in range(samples):
        first = long_tailed(seed, length)
        assert busiest(balanced(length, ranks, CHUNKS, {None: 1}, first), length, first) <= 1.05
        uneven += busiest(zigzag(ranks), length, first) >= 1.3
    assert uneven >= 3


def test_chunks_are_dealt_to_a_thousand_ranks() -> None:
    """Each rank has equally many, and each chunk has one rank. Work is at most 1.01 times the mean."""
    work = np.random.default_rng(0).integers(1, 1000, size=16 * 1024).tolist()
    table = deal(work, 1024)
    assert sorted(chunk for chunks in table for chunk in chunks) == list(range(len(work)))
    assert {len(chunks) for chunks in table} == {16}
    assert max(sum(work[chunk] for chunk in chunks) for chunks in table) <= 1.01 * sum(work) / 1024


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("documents", [np.zeros(2048, dtype=np.int64), np.arange(2048)], ids=["one", "one per token"])
def test_documents_of_one_size_are_balanced_exactly(documents: np.ndarray, ranks: int) -> None:
    first = FirstKeys(documents, documents)
    assert busiest(balanced(2048, ranks, CHUNKS, {None: 1}, first), 2048, first) == 1.0


def test_the_work_of_all_layers_is_balanced() -> None:
    """Layers with windows need other work than those without. The balance is that of their sum."""
    first, windows = long_tailed(10, 4096), {None: 1, 100: 5}
    table = balanced(4096, 8, CHUNKS, windows, first)
    work = work_of_chunks(4096, 8 * CHUNKS, windows, first)
    of_ranks = [sum(work[chunk] for chunk in chunks) for chunks in table]
    assert max(of_ranks) * 8 <= 1.05 * sum(of_ranks)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_chunks_are_dealt_evenly_and_each_once(ranks: int, each: int, data: st.DataObject) -> None:
    work = data.draw(st.lists(st.integers(0, 1000), min_size=ranks * each, max_size=ranks * each))
    table = deal(work, ranks)
    assert [len(chunks) for chunks in table] == [each] * ranks
    assert sorted(sum(table, ())) == list(range(ranks * each))
    assert all(list(chunks) == sorted(chunks) for chunks in table)


def test_an_exchange_mends_what_dealing_by_size_leaves() -> None:
    """Dealing by falling work alone would leave 3 + 2 + 2 and 3 + 2 + 0."""
    work = [3, 3, 2, 2, 2, 0]
    assert [sum(work[chunk] for chunk in chunks) for chunks in deal(work, 2)] == [6, 6]


# ---------------------------------------------------------------------------------------------------- long samples


def test_a_million_tokens_on_64_ranks_are_planned_in_few_calls() -> None:
    length, ranks = 2**20, 64
    for rank in range(ranks):
        layout = SequenceLayout.cut(length, zigzag(ranks), rank)
        planned = rounds(layout, CAUSAL)
        assert [len(each.parts) for each in planned] == [1] * ranks  # one call for both chunks
        assert sum(each.scores for each in planned) == length * (length + 1) // 2 // ranks
        (gathered,) = rounds(layout, CAUSAL, gathers=True)
        assert len(gathered.parts) == (3 if rank == 0 else 4)  # for each chunk, the keys before it and its own


def test_a_million_tokens_of_documents_on_64_ranks_are_planned_and_balanced() -> None:
    length, ranks = 2**20, 64
    first = long_tailed(0, length)
    work = work_of_chunks(length, ranks * CHUNKS, {None: 1}, first)
    table = balanced(length, ranks, CHUNKS, {None: 1}, first)
    assert max(sum(work[chunk] for chunk in chunks) for chunks in table) * ranks <= 1.05 * sum(work)
    for rank in range(0, ranks, 16):
        planned = rounds(SequenceLayout.cut(length, table, rank), first)
        assert sum(each.scores for each in planned) == sum(work[chunk] for chunk in table[rank])
        assert sum(len(each.parts) for each in planned) < 0.1 * CHUNKS * ranks * CHUNKS / 2  # of all causal pairs
