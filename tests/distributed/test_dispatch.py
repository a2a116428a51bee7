"""Rows that travel between ranks, compared with indexing on one process."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.collectives import Pending
from megalite.parallel.dispatch import Dispatcher, PaddedRows, exchange_rows_async
from tests.distributed.layout_expected import on_ranks
from tests.distributed.test_collectives import group_of_all, random
from tests.harness.close import assert_bits_equal, assert_rounded_once
from tests.harness.rank_pool import RankPools

WIDTH = 5
COUNTS = {1: [[3]], 2: [[1, 4], [0, 2]], 3: [[2, 0, 5], [7, 1, 3], [4, 6, 0]]}
"""Numbers of rows from each rank to each rank, by number of ranks."""
NONE = {size: [[0] * size] * size for size in COUNTS}


def exchanged(counts: list[list[int]]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the rows that arrive, and the gradients that come back, contiguous and as a view."""
    group = group_of_all()
    sent, received = counts[group.rank], [row[group.rank] for row in counts]
    rows = random(group.rank, WIDTH, sum(sent)).t().requires_grad_()  # not contiguous
    arrived = exchange_rows_async(rows, sent, received, group)()
    arrived.backward(random(10 + group.rank, WIDTH, len(arrived)).t(), retain_graph=True)
    (of_sum,) = torch.autograd.grad(arrived.sum(), rows)
    assert rows.grad is not None
    return arrived.detach(), rows.grad, of_sum


@pytest.mark.parametrize("size", COUNTS)
@pytest.mark.parametrize("which", [COUNTS, NONE], ids=["rows", "none"])
def test_rows_arrive_and_gradients_return(which: dict[int, list[list[int]]], size: int, rank_pools: RankPools) -> None:
    counts = which[size]
    ranks = on_ranks(rank_pools, size, exchanged, counts)
    rows = [random(rank, WIDTH, sum(sent)).t().split(sent) for rank, sent in enumerate(counts)]
    received = [[counts[sender][rank] for sender in range(size)] for rank in range(size)]
    gradients = [random(10 + rank, WIDTH, sum(sizes)).t().split(sizes) for rank, sizes in enumerate(received)]
    for rank, (arrived, returned, of_sum) in enumerate(ranks):
        assert_bits_equal(arrived, torch.cat([rows[sender][rank] for sender in range(size)]))
        assert_bits_equal(returned, torch.cat([gradients[receiver][rank] for receiver in range(size)]))
        assert_bits_equal(of_sum, torch.ones(sum(counts[rank]), WIDTH, dtype=torch.float64))


TOKENS, CHOICES = 7, 3
LAYOUTS = {1: [(5, 1)], 2: [(4, 1), (3, 2)], 4: [(8, 1), (4, 2)]}
"""(experts, ranks that share one), by number of ranks."""


class Sent(NamedTuple):
    """Tokens of one rank, with their choices."""

    tokens: Tensor
    experts: Tensor
    weights: Tensor


def sent_by(rank: int, experts: int, which: str) -> Sent:
    """Return tokens with choices; -1 stands for none. `which`: "all to one" leaves most experts without rows."""
    generator = torch.Generator().manual_seed(rank)
    choices = torch.stack([torch.randperm(experts, generator=generator)[:CHOICES] for _ in range(TOKENS)])
    if which == "all to one":
        choices = torch.cat([torch.full((TOKENS, 1), experts - 1), torch.full((TOKENS, CHOICES - 1), -1)], dim=1)
    elif which == "some dropped":
        choices[torch.rand(choices.shape, generator=generator) < 0.4] = -1
        choices[0] = -1
    return Sent(random(rank, TOKENS, WIDTH), choices, random(100 + rank, TOKENS, CHOICES))


def dispatched(experts: int, parts: int, kind: Any, which: str, capacity: int | None) -> dict[str, Any]:
    """Send tokens to experts that multiply them with (number + 1) / 10, each part with its share, and add them up."""
    group = group_of_all()
    own = sent_by(group.rank, experts, which)
    tokens, weights = own.tokens.requires_grad_(), own.weights.requires_grad_()
    dispatcher = Dispatcher(group, experts, parts, kind)
    padded = None if capacity is None else PaddedRows(capacity, capacity * group.size)
    arrived = dispatcher.dispatch(tokens, own.experts, weights, padded)()
    part = torch.tensor([0.25, 0.75])[group.rank % parts] if parts > 1 else torch.tensor(1.0)
    outputs = torch.empty_like(arrived.rows)
    first = group.rank // parts * dispatcher.local_experts
    for number, (start, stop) in enumerate(pairwise(arrived.groups.offsets)):
        outputs[start:stop] = arrived.rows[start:stop] * (arrived.weights[start:stop, None] * (first + number + 1) / 10)
    combined = arrived.combine(outputs * part)
    combined.backward(random(200 + group.rank, TOKENS, WIDTH))
    return {
        "output": combined.detach(),
        "tokens": tokens.grad,
        "weights": weights.grad,
        "rows": arrived.rows.detach(),
        "offsets": arrived.groups.offsets,
        "ends": arrived.groups.ends,
    }


WHICH = ["all chosen", "some dropped", "all to one"]


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("capacity", [None, TOKENS], ids=["dropless", "padded"])
@pytest.mark.parametrize("size", LAYOUTS)
def test_tokens_reach_their_experts_and_return(
    size: int, capacity: int | None, which: str, rank_pools: RankPools
) -> None:
    """Each token's output is the weighted sum over its experts; both dispatchers give the same bits."""
    for experts, parts in LAYOUTS[size]:
        ways = [
            on_ranks(rank_pools, size, dispatched, experts, parts, kind, which, capacity)
            for kind in ("alltoall", "allgather")
        ]
        for rank, (found, gathered) in enumerate(zip(*ways, strict=True)):
            tokens, choices, weights = sent_by(rank, experts, which)
            tokens.requires_grad_()
            weights.requires_grad_()
            scale = torch.where(choices < 0, 0.0, (choices.double() + 1) / 10)
            expected = (weights * scale).sum(1, keepdim=True) * tokens
            expected.backward(random(200 + rank, TOKENS, WIDTH))
            wanted = {"output": expected.detach(), "tokens": tokens.grad, "weights": weights.grad}
            for name, values in wanted.items():
                torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-12)
            for name in ("output", "tokens", "weights", "rows"):
                assert_bits_equal(found[name], gathered[name], name)
            assert list(found["ends"]) == list(found["offsets"][1:]) == list(gathered["offsets"][1:])


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
@pytest.mark.parametrize(("size", "experts", "parts"), [(1, 3, 1), (2, 4, 1), (4, 4, 2)])
def test_rows_are_sorted_by_expert_rank_and_position(
    size: int, experts: int, parts: int, kind: str, rank_pools: RankPools
) -> None:
    everything = [sent_by(rank, experts, "all chosen") for rank in range(size)]
    for rank, found in enumerate(on_ranks(rank_pools, size, dispatched, experts, parts, kind, "all chosen", None)):
        local = experts * parts // size
        first = rank // parts * local
        rows = [
            tokens[position]
            for expert in range(first, first + local)
            for tokens, choices, _ in everything
            for position in range(TOKENS)
            if expert in choices[position]
        ]
        assert_bits_equal(found["rows"], torch.stack(rows))


def output_of(rank: int) -> Tensor:
    return random(300 + rank, 100, WIDTH).bfloat16()


def added_up(kind: Any) -> tuple[Tensor, Tensor]:
    """Return sums over four ranks in bf16: each token's outputs of one expert per rank, and its gradients."""
    group = group_of_all()
    tokens = torch.ones(100, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    choices = torch.arange(4).expand(100, 4)
    arrived = Dispatcher(group, 4, 1, kind).dispatch(tokens, choices, torch.ones(100, 4))()
    combined = arrived.combine(output_of(group.rank).repeat(4, 1))
    (gradient,) = torch.autograd.grad(arrived.rows, tokens, output_of(group.rank).repeat(4, 1))
    return combined, gradient


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_sums_of_ranks_are_rounded_once(kind: str, rank_pools: RankPools) -> None:
    exact = torch.stack([output_of(rank).double() for rank in range(4)]).sum(0)
    for combined, gradient in rank_pools(4).run(added_up, kind):
        assert_rounded_once(combined, exact, "sum of the experts")
        assert_rounded_once(gradient, exact, "gradient of the tokens")


def rows_sent(kind: Any) -> list[int]:
    """Return the numbers of rows that each call of the exchange sends, for tokens that choose two experts of a rank."""
    group = group_of_all()
    choices = torch.tensor([[0, 1], [2, 3], [0, 1]])
    sent: list[int] = []
    real = collectives.all_to_all_rows_async

    def noting(rows: Tensor, counts: Sequence[int], *rest: Any) -> Tensor:
        sent.append(sum(counts))
        return real(rows, counts, *rest)

    with mock.patch.object(collectives, "all_to_all_rows_async", noting):
        arrived = Dispatcher(group, 4, 1, kind).dispatch(random(1, 3, WIDTH), choices, random(2, 3, 2))()
        arrived.combine(arrived.rows)
    return sent


def counted_before_tokens(kind: Any) -> list[str]:
    """Return the order in which the host asks for the numbers of rows and waits for gathered or exchanged tokens."""
    order: list[str] = []
    wait, tolist = Pending.wait, Tensor.tolist

    def noted_wait(pending: Pending, *what: object) -> Tensor:
        found = wait(pending)
        order.extend(["tokens"] if found.shape[1:] == (WIDTH,) else [])
        return found

    def noted_tolist(tensor: Tensor) -> Any:
        order.append("counts")
        return tolist(tensor)

    group, choices = group_of_all(), torch.tensor([[0, 1], [2, 3], [0, 1]])
    with mock.patch.object(Pending, "wait", noted_wait), mock.patch.object(Tensor, "tolist", noted_tolist):
        arrive = Dispatcher(group, 4, 1, kind).dispatch(random(1, 3, WIDTH), choices, random(2, 3, 2))
        order.append("work of the caller")
        arrive()
    return order


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_the_host_counts_rows_before_the_caller_goes_on(kind: str, rank_pools: RankPools) -> None:
    """On a GPU, the host would otherwise wait for the caller's kernels, such as shared experts, and for the tokens."""
    assert rank_pools(2).run(counted_before_tokens, kind) == [["counts", "work of the caller", "tokens"]] * 2


def test_a_token_is_sent_once_to_a_rank(rank_pools: RankPools) -> None:
    """Counts go first; then choices, then tokens; and their sums come back."""
    first, second = rank_pools(2).run(rows_sent, "alltoall")
    assert first == [2, 3, 3, 4]
    assert second == [2, 3, 3, 2]
