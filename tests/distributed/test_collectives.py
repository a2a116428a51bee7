"""Communication between ranks: collectives do not change their inputs, and merge what a vocabulary is split into.

Tested in groups of one, of two (which use a different algorithm), of three and of four.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.cross_entropy import over_ranks, vocab_parallel_cross_entropy
from megalite.parallel.mesh import Group, ParallelMesh
from tests.distributed.layout_expected import on_ranks
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

SHAPE = (12, 3, 12)
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])


def mesh_of_all() -> ParallelMesh:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return ParallelMesh(rank=rank, world_size=size, tensor_parallel_size=size)


def group_of_all() -> Group:
    return mesh_of_all().group("tp")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(tensor: Tensor, group: Group, dim: int) -> Tensor:
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


def results_of_collectives() -> dict[str, Any]:
    group = group_of_all()
    x = random(group.rank, *SHAPE)
    before = x.clone()
    results: dict[str, Any] = {
        "gather": collectives.all_gather(x, group),
        "gather, not contiguous": collectives.all_gather(x.transpose(0, 1), group),
        "scatter": collectives.reduce_scatter(x, group),
        "gather the last dimension": collectives.all_gather_last(x, group),
    }
    assert torch.equal(x, before)
    into = x.clone()
    results["scatter into itself"] = collectives.reduce_scatter_async(
        into, group, out=into.view(group.size, -1, *SHAPE[1:])[group.rank]
    ).wait()
    whole = torch.zeros(group.size, *SHAPE, dtype=x.dtype)
    whole[group.rank] = x
    results["gather into itself"] = (
        collectives.all_gather_async(whole[group.rank].flatten(), group, out=whole.view(-1)).wait().view(whole.shape)
    )
    results["max"] = collectives.all_reduce_(x.clone(), group, "max")
    apart = torch.empty(SHAPE[::-1], dtype=x.dtype).permute(2, 1, 0) if group.rank else torch.empty_like(x)
    results["sum, not contiguous"] = collectives.all_reduce_(apart.copy_(x), group)
    results["sum"] = collectives.all_reduce_(x.clone(), group)
    results["sum of integers"] = collectives.all_reduce_(torch.tensor([2**53 + group.rank, -1]), group)
    results["sum of one number"] = collectives.all_reduce_(x[0, 0, 0].clone(), group)
    # The number of elements sent to each rank follows from the numbers of both ranks.
    parts = [x.flatten()[: group.rank + 2 * to] for to in range(group.size)]
    results["all to all"] = torch.cat(
        collectives.all_to_all(parts, [rank + 2 * group.rank for rank in range(group.size)], group)
    )
    results["numbers"] = collectives.gather_numbers(list(range(3 * group.rank)), group, x.device)
    results["values"] = collectives.all_gather_json(("é" * 5 * group.rank, None), mesh_of_all())
    results["values of one rank"] = collectives.all_gather_json(group.rank, mesh_of_all(), "dp")
    return results


@SIZES
def test_collectives_give_what_their_names_say(size: int, rank_pools: RankPools) -> None:
    inputs = [random(rank, *SHAPE) for rank in range(size)]
    in_rank_order = functools.reduce(torch.add, inputs)
    for rank, results in enumerate(on_ranks(rank_pools, size, results_of_collectives)):
        rows = in_rank_order.chunk(size)[rank]
        assert_bits_equal(results["gather"], torch.cat(inputs))
        assert_bits_equal(results["gather, not contiguous"], torch.cat([x.transpose(0, 1) for x in inputs]))
        assert_bits_equal(results["scatter"], rows, "sums are taken in rank order")
        assert_bits_equal(results["scatter into itself"], rows)
        assert_bits_equal(results["gather into itself"], torch.stack(inputs))
        assert_bits_equal(results["gather the last dimension"], torch.cat(inputs, dim=-1))
        assert_bits_equal(results["max"], torch.stack(inputs).amax(0))
        torch.testing.assert_close(results["sum, not contiguous"], in_rank_order, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(results["sum"], in_rank_order, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(results["sum of one number"], in_rank_order[0, 0, 0], rtol=1e-14, atol=1e-14)
        assert results["sum of integers"].tolist() == [size * 2**53 + sum(range(size)), -size]
        sent = [inputs[peer].flatten()[: peer + 2 * rank] for peer in range(size)]
        assert_bits_equal(results["all to all"], torch.cat(sent))
        assert results["numbers"] == ([list(range(3 * peer)) for peer in range(size)] if rank == 0 else [])
        assert results["values"] == [["é" * 5 * peer, None] for peer in range(size)]
        assert results["values of one rank"] == [rank]


def split_loss_and_gradient(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    group = group_of_all()
    own = part(logits, group, -1).requires_grad_()
    losses = vocab_parallel_cross_entropy(own * 1.0, labels, group, vocab_size)
    (gradient,) = torch.autograd.grad((losses * random(9, *losses.shape)).sum(), own)
    return losses.detach(), gradient


@SIZES
@pytest.mark.parametrize("vocab_size", [24, 22, 7, 5], ids=["whole", "padded", "ranks-of-padding", "one-rank"])
def test_cross_entropy_over_a_split_vocabulary(vocab_size: int, size: int, rank_pools: RankPools) -> None:
    logits, labels = random(0, 6, 5, 24) * 3, torch.randint(vocab_size, (6, 5))
    logits[..., vocab_size:] = 50.0
    true = logits[..., :vocab_size].clone().requires_grad_()
    expected = F.cross_entropy(true.flatten(0, 1), labels.flatten(), reduction="none").view(6, 5)
    (gradient,) = torch.autograd.grad((expected * random(9, 6, 5)).sum(), true)
    ranks = on_ranks(rank_pools, size, split_loss_and_gradient, logits, labels, vocab_size)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    whole = torch.cat([gradient for _, gradient in ranks], dim=-1)
    torch.testing.assert_close(whole[..., :vocab_size], gradient, rtol=1e-12, atol=1e-12)
    assert not whole[..., vocab_size:].any()


def merged(statistics: Tensor) -> Tensor:
    group = group_of_all()
    return over_ranks(statistics[group.rank], group)


@SIZES
def test_statistics_of_large_logits_are_merged_and_overflow_nothing(size: int, rank_pools: RankPools) -> None:
    """Each rank in turn has one token's maximum; some ranks have no column; the other statistics are sums."""
    shifts = 200.0 * torch.eye(4)[:size] + torch.tensor([-80.0, 0.0, 80.0, 300.0])
    shifts[0, 3] = -torch.inf if size > 1 else 300.0
    whole = torch.stack([shifts, random(1, size, 4).float(), random(2, size, 4).float()], dim=1)
    wide = whole.double()
    expected = torch.cat([wide[:, :1].logsumexp(0), wide[:, 1:].sum(0)])
    found = on_ranks(rank_pools, size, merged, whole)
    for ours in found:
        torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
        assert_bits_equal(ours, found[0], "of another rank")


def recorded() -> list[tuple[str, tuple[int, ...], int]]:
    """Return what a listener hears of one collective of each kind, on tensors of 96 bytes per rank."""
    mesh, heard = mesh_of_all(), []
    group = mesh.group("tp")
    mesh.traffic.listener = lambda kind, ranks, size: heard.append((kind, ranks, size))
    x = torch.ones(12, dtype=torch.float64)
    collectives.all_reduce_(x.clone(), group)
    collectives.all_reduce_in_rank_order_(x.clone(), group)
    collectives.all_reduce_(torch.ones(4, 3, dtype=torch.float64).t(), group)
    collectives.all_gather(x, group)
    collectives.reduce_scatter(x, group)
    equal = [12 // group.size] * group.size
    collectives.all_to_all_rows(x, equal, equal, group)
    mesh.traffic.listener = None
    collectives.all_gather(x, group)
    return heard


@SIZES
def test_a_listener_hears_of_each_collective_once(size: int, rank_pools: RankPools) -> None:
    """Also of those that gloo runs as others: with the bytes of the whole tensor."""
    ranks = tuple(range(size))
    reduced = [("all-reduce", ranks, 96)] * 3
    whole = [("all-gather", ranks, 96 * size), ("reduce-scatter", ranks, 96), ("all-to-all", ranks, 96)]
    for heard in on_ranks(rank_pools, size, recorded):
        assert heard == ([*reduced, *whole] if size > 1 else [])
