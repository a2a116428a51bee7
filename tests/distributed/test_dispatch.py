"""Rows that travel between ranks, compared with indexing on one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megalite.parallel.dispatch import exchange_counts, exchange_rows
from megalite.parallel.mesh import Group
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_collectives import group_of_all, random
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

WIDTH = 5
COUNTS = {1: [[3]], 2: [[1, 4], [0, 2]], 3: [[2, 0, 5], [7, 1, 3], [4, 6, 0]]}
"""Numbers of rows from each rank to each rank, by number of ranks."""
NONE = {size: [[0] * size] * size for size in COUNTS}


def exchanged(counts: list[list[int]]) -> tuple[list[int], Tensor, Tensor, Tensor | None]:
    """Return the announced counts, the rows that arrive, and the gradients that come back, contiguous and as a view."""
    group = group_of_all()
    sent = counts[group.rank]
    received = exchange_counts(sent, group, torch.device("cpu"))
    rows = random(group.rank, WIDTH, sum(sent)).t().requires_grad_()  # not contiguous
    arrived = exchange_rows(rows, sent, received, group)
    arrived.backward(random(10 + group.rank, WIDTH, len(arrived)).t(), retain_graph=True)
    (of_sum,) = torch.autograd.grad(arrived.sum(), rows)
    assert rows.grad is not None
    return received, arrived.detach(), rows.grad, of_sum


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("which", [COUNTS, NONE], ids=["rows", "none"])
def test_rows_arrive_and_gradients_return(which: dict[int, list[list[int]]], size: int, rank_pools: RankPools) -> None:
    counts = which[size]
    ranks = on_ranks(rank_pools, size, exchanged, counts)
    rows = [random(rank, WIDTH, sum(sent)).t().split(sent) for rank, sent in enumerate(counts)]
    received = [[counts[sender][rank] for sender in range(size)] for rank in range(size)]
    gradients = [random(10 + rank, WIDTH, sum(sizes)).t().split(sizes) for rank, sizes in enumerate(received)]
    for rank, (announced, arrived, returned, of_sum) in enumerate(ranks):
        assert announced == received[rank]
        assert_bits_equal(arrived, torch.cat([rows[sender][rank] for sender in range(size)]))
        assert_bits_equal(returned, torch.cat([gradients[receiver][rank] for receiver in range(size)]))
        assert_bits_equal(of_sum, torch.ones(sum(counts[rank]), WIDTH, dtype=torch.float64))


@pytest.mark.parametrize(
    ("size", "sent", "received", "words"),
    [
        (1, [], [], "for and from 1 ranks cannot be"),
        (1, [2, 1], [3], "for and from 1 ranks cannot be"),
        (2, [2, 1], [3], "for and from 2 ranks cannot be"),
        (1, [-3], [3], "for and from 1 ranks cannot be"),
        (2, [4, -1], [1, 2], "for and from 2 ranks cannot be"),
        (2, [2, 1], [4, -1], "for and from 2 ranks cannot be"),
        (1, [2], [2], "add up to 2, not to 3 rows"),
        (2, [2, 2], [1, 1], "add up to 4, not to 3 rows"),
        (1, [3], [4], "receives the 3 rows that it sends, not 4"),
    ],
)
def test_counts_that_do_not_deal_the_rows_are_an_error(
    size: int, sent: list[int], received: list[int], words: str
) -> None:
    """The error comes before anything is sent."""
    group = Group(ranks=tuple(range(size)), rank=0)
    with pytest.raises(ValueError, match=words):
        exchange_rows(random(1, 3, WIDTH), sent, received, group)


def test_counts_that_are_not_equally_many_for_each_rank_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 counts cannot be divided evenly among 2 ranks"):
        exchange_counts([1, 2, 3], Group(ranks=(0, 1), rank=0), torch.device("cpu"))


def announced() -> list[int]:
    group = group_of_all()
    return exchange_counts([100 * group.rank + n for n in range(2 * group.size)], group, torch.device("cpu"))


@pytest.mark.parametrize("size", [1, 3])
def test_several_counts_for_each_rank_are_announced(size: int, rank_pools: RankPools) -> None:
    for rank, found in enumerate(on_ranks(rank_pools, size, announced)):
        assert found == [100 * sender + 2 * rank + n for sender in range(size) for n in range(2)]
