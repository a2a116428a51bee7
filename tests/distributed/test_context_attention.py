"""Attention alone over context-parallel ranks: outputs, and gradients of queries, keys and values.

A wrong backward leaves the loss right. So each way is compared with attention of the full sample on one rank, written
out in float64, for documents that end at every position, for windows and for every table of chunks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.model import context_parallel
from megalite.model.attention_core import LocalCore
from megalite.model.batch import first_keys
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import FirstKeys, rounds
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import ChunkTable, SequenceLayout, zigzag
from megalite_kernels.attention import dense_mask
from tests.harness.rank_pool import RankPools
from tests.harness.wide import wide_except

BATCH, WIDTH = 2, 4
SCALE = 0.6
WAYS = {
    "p2p": AttentionWay(),
    "all_gather": AttentionWay(gathers=True),
    "a2a": AttentionWay(head_ranks=0),  # of all ranks
    "a2a+p2p": AttentionWay(head_ranks=2),
    "a2a+all_gather": AttentionWay(head_ranks=2, gathers=True),
}


class Case(NamedTuple):
    """Documents and a way of attention. `ends`: the places after which a document begins, in each sample."""

    ranks: int
    way: str
    ends: tuple[tuple[int, ...], ...]
    window: int | None = None
    table: ChunkTable | None = None
    heads: tuple[int, ...] = (0, 0, 1, 1)
    """The key-value group of each head."""
    cap: float | None = None
    length: int | None = None

    @property
    def tokens(self) -> int:
        return self.length or 4 * self.ranks * 2

    @property
    def fits(self) -> bool:
        if WAYS[self.way].head_ranks == 2 and self.ranks != 4:
            return False
        return len(self.heads) % (WAYS[self.way].head_ranks or self.ranks) == 0


def documents(case: Case) -> Tensor:
    ids = torch.zeros(BATCH, case.tokens, dtype=torch.int64)
    for sample, ends in enumerate(case.ends):
        for end in ends:
            ids[sample, end:] += 1
    return ids


def first_visible(case: Case) -> tuple[Tensor, FirstKeys]:
    first = first_keys(documents(case))
    bounds = FirstKeys(first.amin(0).numpy(), first.amax(0).numpy(), case.window)
    if case.window is not None:
        first = torch.maximum(first, torch.arange(case.tokens) - case.window)
    return first, bounds


def inputs(case: Case) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(case.heads))
    counts = (len(case.heads), max(case.heads) + 1, max(case.heads) + 1, len(case.heads))
    shapes = [(case.tokens, BATCH, count, WIDTH) for count in counts]
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


def whole(case: Case) -> list[Tensor]:
    """Return the output and the gradients of one rank with all tokens, written out."""
    *parts, gradient = inputs(case)
    query, key, value = (part.requires_grad_() for part in parts)
    heads_first = [
        each.permute(1, 2, 0, 3) for each in (query, key[:, :, list(case.heads)], value[:, :, list(case.heads)])
    ]
    scores = heads_first[0] @ heads_first[1].transpose(2, 3) * SCALE
    scores = scores if case.cap is None else case.cap * torch.tanh(scores / case.cap)
    probabilities = scores.masked_fill(~dense_mask(first_visible(case)[0]), -math.inf).softmax(-1)
    output = (probabilities @ heads_first[2]).permute(2, 0, 1, 3)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), gradient)]


def attention_of(case: Case, dropout: float = 0.0) -> tuple[ContextParallelCore, SampleMask, Tensor]:
    """Return this rank's core, the mask of the sample, and the places of its tokens."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=case.ranks, context_parallel_size=case.ranks)
    layout = SequenceLayout.cut(case.tokens, case.table or zigzag(case.ranks), mesh.coordinate("cp"))
    heads = range(len(case.heads))
    local = LocalCore(heads, list(case.heads), SCALE, case.cap, dropout, Site(0, "attention"), False)
    way = WAYS[case.way] if WAYS[case.way].head_ranks else AttentionWay(case.ranks)
    first, bounds = first_visible(case)
    mask = SampleMask(layout, first, bounds, lambda: dense_mask(first), in_blocks=False)
    return ContextParallelCore(local, ParallelContext(mesh), way), mask, layout.places(torch.device("cpu"))


def by_ranks(case: Case) -> list[Tensor]:
    """Return this rank's part of the output and of the gradients, with zeros for the other tokens."""
    core, mask, places = attention_of(case)
    *parts, gradient = (each[places] for each in inputs(case))
    parts = [part.requires_grad_() for part in parts]
    output = core(*parts, mask, mask.layout, None)
    found = [output.detach().view_as(gradient), *torch.autograd.grad(output, parts, gradient.flatten(2))]
    return [torch.zeros(case.tokens, *each.shape[1:], dtype=each.dtype).index_copy_(0, places, each) for each in found]


def on_this_rank(cases: Sequence[Case]) -> list[list[Tensor]]:
    return [by_ranks(case) for case in cases]


def check(rank_pools: RankPools, cases: Sequence[Case]) -> None:
    ranks = cases[0].ranks
    of_ranks = rank_pools(ranks).run(on_this_rank, cases)
    for case, found in zip(cases, zip(*of_ranks, strict=True), strict=True):
        for what, expected, *parts in zip(("output", "query", "key", "value"), whole(case), *found, strict=True):
            assert (sum(parts) - expected).abs().max() < 1e-12 * max(expected.abs().max(), 1.0), f"{case}: {what}"


def ways_of(ranks: int, **options: object) -> list[Case]:
    cases = [Case(ranks, way, ends=((), ()), **options) for way in WAYS]  # type: ignore[arg-type]
    return [case for case in cases if case.fits]


@pytest.mark.wide_except("3")
@pytest.mark.parametrize("ranks", wide_except([2, 3, 4], [2, 3]))
def test_documents_may_end_anywhere(ranks: int, rank_pools: RankPools) -> None:
    """At every position, alone and with others; documents of one token, of all tokens, and longer than a chunk."""
    tokens, cases = 8 * ranks, []
    patterns = [((end,), tuple(range(1, end + 1, 3))) for end in range(1, tokens)]
    patterns += [(tuple(range(1, tokens)), ()), ((1, tokens - 1), (tokens // 2, tokens // 2 + 1))]
    ways = ways_of(ranks, heads=(0, 0, 1, 1) if ranks != 3 else (0, 0, 0))
    for number, ends in enumerate(patterns):
        cases += [case._replace(ends=ends) for case in ways[number % 2 :: 2]]
    check(rank_pools, cases)


@pytest.mark.wide_except("3")
@pytest.mark.parametrize("ranks", wide_except([2, 3, 4], [2, 3]))
def test_windows_may_be_smaller_and_larger_than_a_chunk(ranks: int, rank_pools: RankPools) -> None:
    heads = (0, 0, 1, 1) if ranks != 3 else (0, 1, 2)
    cases = [
        case._replace(window=window, ends=((5, 6), (9,)) if window % 2 else ((), ()), cap=None if window % 3 else 1.5)
        for window in (0, 1, 3, 4, 5, 9, 8 * ranks)
        for case in ways_of(ranks, heads=heads)
    ]
    check(rank_pools, cases)


@pytest.mark.wide_except("4_1-4", "12-3")
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "heads", [(0, 0, 0, 0), (0, 1, 2, 3), (0, 0, 1, 1, 2, 2), (0,) * 4 + (1,) * 4 + (2,) * 4], ids=len
)
def test_groups_may_be_more_than_ranks_and_fewer(ranks: int, heads: tuple[int, ...], rank_pools: RankPools) -> None:
    check(rank_pools, [case._replace(ends=((7,), ())) for case in ways_of(ranks, heads=heads)])


@pytest.mark.wide_except("3")
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunks_may_be_dealt_in_any_way(ranks: int, rank_pools: RankPools) -> None:
    """Rank 0 has the last chunks, a rank has neighbouring chunks, and ranks have three and one chunks each."""
    in_turn = tuple(tuple(range(rank, 4 * ranks, ranks)) for rank in range(ranks))
    neighbours = tuple(tuple(range(4 * rank, 4 * rank + 4)) for rank in reversed(range(ranks)))
    single = tuple((rank,) for rank in reversed(range(ranks)))
    cases = [
        case._replace(table=table, ends=((3, 10), (6,)))
        for table in (in_turn, neighbours, single)
        for case in ways_of(ranks, heads=(0, 0, 1, 1) if ranks != 3 else (0, 0, 0))
    ]
    check(rank_pools, cases)


def calls_of(case: Case) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the sizes of the parts that forward and backward compute, and those of the plan."""
    forward: list[tuple[int, int]] = []
    backward: list[tuple[int, int]] = []
    attend, gradients = context_parallel.attend, context_parallel.part_gradients

    def counted(query: Tensor, key: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor]:
        forward.append((query.shape[2], key.shape[2]))
        return attend(query, key, *rest, **options)  # type: ignore[arg-type]

    def counted_gradients(gradient: Tensor, query: Tensor, key: Tensor, *rest: object, **options: object) -> object:
        backward.append((query.shape[2], key.shape[2]))
        return gradients(gradient, query, key, *rest, **options)  # type: ignore[arg-type]

    with mock.patch.multiple(context_parallel, attend=counted, part_gradients=counted_gradients):
        by_ranks(case)
    layout = SequenceLayout.cut(case.tokens, zigzag(case.ranks), dist.get_rank())
    planned = rounds(layout, first_visible(case)[1], gathers=WAYS[case.way].gathers)
    sizes = [
        (each.queries.stop - each.queries.start, each.keys.stop - each.keys.start)
        for of in planned
        for each in of.parts
    ]
    assert forward == backward
    return forward, sizes


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_only_planned_parts_are_computed(ranks: int, way: str, rank_pools: RankPools) -> None:
    tokens = 8 * ranks
    for ends in (((), ()), ((4, 8, 12), (4, 8, 12)), (tuple(range(1, tokens)),) * 2):
        found = rank_pools(ranks).run(calls_of, Case(ranks, way, ends))
        assert all(computed == planned for computed, planned in found)
    assert sum(len(computed) for computed, _ in found) == 2 * ranks  # only each chunk with itself


def dropped(case: Case) -> tuple[Tensor, Tensor]:
    """Return this rank's output with attention dropout, with zeros for other tokens, and that of one rank."""
    key = RandomKey(7, (3, 9))
    core, mask, places = attention_of(case, dropout=0.4)
    *parts, _ = inputs(case)
    own = core(*(part[places] for part in parts), mask, mask.layout, key)
    alone = core.inner(*parts, mask.of_whole, SequenceLayout.whole(case.tokens), key)
    return torch.zeros_like(alone).index_copy_(0, places, own), alone


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_probabilities_are_dropped_by_their_place(way: str, rank_pools: RankPools) -> None:
    found = rank_pools(3).run(dropped, Case(3, way, ((5,), ())))
    torch.testing.assert_close(sum(part for part, _ in found), found[0][1], rtol=1e-12, atol=1e-13)


def in_bf16(case: Case) -> Tensor:
    """Return this rank's output in bf16, with zeros for other tokens."""
    core, mask, places = attention_of(case)
    *parts, gradient = (each[places].bfloat16() for each in inputs(case))
    parts = [part.requires_grad_() for part in parts]
    output = core(*parts, mask, mask.layout, None)
    found = [output.detach().view_as(gradient), *torch.autograd.grad(output, parts, gradient.flatten(2))]
    assert all(each.dtype == torch.bfloat16 for each in found)
    padded = [torch.zeros(case.tokens, *each.shape[1:]).index_copy_(0, places, each.float()) for each in found]
    return torch.cat([each.flatten() for each in padded])


@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_bf16_is_rounded_once(way: str, rank_pools: RankPools) -> None:
    """The error is not larger than that of rounding inputs and results, about 2^-8 each."""
    case = Case(4, way, ((), ()), length=512)
    found = sum(rank_pools(4).run(in_bf16, case))
    exact = torch.cat([each.flatten() for each in whole(case)])
    assert (found - exact).norm() < 0.008 * exact.norm()


def test_all_pairs_of_ranks_and_ways_are_met() -> None:
    assert {(case.ranks, case.way) for ranks in (2, 3, 4) for case in ways_of(ranks, heads=(0, 0, 1, 1))} >= set(
        itertools.product((2, 4), ("p2p", "all_gather", "a2a"))
    )
