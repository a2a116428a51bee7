"""Bytes that a rank sends to its context-parallel peers for one layer, compared with the formula of each way."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from benchmarks.context_parallel import counted
from megalite.model.attention_core import LocalCore
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.context import AttentionWay, ParallelContext
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import Site
from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.harness.rank_pool import RankPools

BATCH, HEADS, GROUPS, WIDTH, LENGTH = 2, 6, 6, 4, 24
ITEM, WIDE = 2, 4
"""Bytes of an element of bf16, and of the fp32 in which gradients of keys and values are added up."""


class Bytes(NamedTuple):
    forward: int
    backward: int


def sent(ranks: int, way: AttentionWay, groups: int, first: FirstKeys) -> Bytes:
    """Return the bytes that this rank sends in forward and in backward of attention alone."""
    mesh = ParallelMesh(rank=dist.get_rank(), world_size=dist.get_world_size(), context_parallel_size=ranks)
    layout = SequenceLayout.cut(LENGTH, zigzag(ranks), mesh.coordinate("cp"))
    of_heads = [head * groups // HEADS for head in range(HEADS)]
    core = ContextParallelCore(
        LocalCore(range(HEADS), of_heads, None, None, 0.0, Site(0, "attention"), False), ParallelContext(mesh), way
    )
    nothing = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    mask = SampleMask(layout, nothing, first, lambda: None, in_blocks=False)
    counts = HEADS, groups, groups
    query, key, value = (
        torch.randn(LENGTH // ranks, BATCH, count, WIDTH).bfloat16().requires_grad_() for count in counts
    )
    with counted() as in_forward:
        output = core(query, key, value, mask, layout, None)
    with counted() as in_backward:
        output.backward(torch.ones_like(output))
    return Bytes(in_forward.bytes, in_backward.bytes)


@pytest.mark.parametrize("groups", [GROUPS, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_sends_keys_and_values_twice_and_their_gradients_once(
    ranks: int, groups: int, rank_pools: RankPools
) -> None:
    """(C - 1) / C of those of the full sample each time, also in rounds that compute nothing."""
    passed = BATCH * LENGTH * 2 * groups * WIDTH * (ranks - 1) // ranks
    for first in (FirstKeys(), FirstKeys(window=0)):
        for found in rank_pools(ranks).run(sent, ranks, AttentionWay(), groups, first):
            # A block's gradient begins on the rank that the block reaches first, and comes home at last.
            assert found == Bytes(ITEM * passed, ITEM * passed + WIDE * passed)


@pytest.mark.parametrize("groups", [GROUPS, 2])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gather_sends_keys_and_values_and_their_gradients_once(
    ranks: int, groups: int, rank_pools: RankPools
) -> None:
    passed = BATCH * LENGTH * 2 * groups * WIDTH * (ranks - 1) // ranks
    for found in rank_pools(ranks).run(sent, ranks, AttentionWay(gathers=True), groups, FirstKeys()):
        assert found == Bytes(ITEM * passed, WIDE * passed)


@pytest.mark.parametrize("ranks", [2, 3])
def test_an_exchange_of_heads_sends_a_part_of_everything(ranks: int, rank_pools: RankPools) -> None:
    """Count (C - 1) / C of a rank's queries, keys, values and outputs, and of their gradients the same."""
    of_rank = BATCH * LENGTH // ranks * (2 * HEADS + 2 * GROUPS) * WIDTH
    for found in rank_pools(ranks).run(sent, ranks, AttentionWay(head_ranks=ranks), GROUPS, FirstKeys()):
        assert found == Bytes(*2 * (ITEM * of_rank * (ranks - 1) // ranks,))


def test_a_group_goes_to_all_ranks_that_need_it(rank_pools: RankPools) -> None:
    """Give 3 ranks of 2 heads 2 groups: a rank sends another the keys and values of one or of both."""
    tokens, needed = BATCH * LENGTH // 3, (1, 2, 1)
    for rank, found in enumerate(rank_pools(3).run(sent, 3, AttentionWay(head_ranks=3), 2, FirstKeys())):
        there = tokens * WIDTH * sum(2 + 2 * groups for other, groups in enumerate(needed) if other != rank)
        back = tokens * WIDTH * 2 * 2
        gradients = tokens * WIDTH * 2 * (2 + 2 * needed[rank])
        outputs = tokens * WIDTH * 2 * 2
        assert found == Bytes(ITEM * (there + back), ITEM * (gradients + outputs))
