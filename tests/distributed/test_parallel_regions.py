"""What travels between ranks: collectives leave their inputs alone, regions pair a map with its transpose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.parallel import collectives, regions
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy
from megalite.parallel.mesh import Group, ParallelMesh
from tests.harness.close import assert_bits_equal
from tests.harness.rank_pool import RankPools

SIZE = 4
SHAPE = (8, 3, 12)


def group_of_all() -> Group:
    import torch.distributed as dist

    return ParallelMesh(rank=dist.get_rank(), world_size=SIZE, tensor_parallel_size=SIZE).group("tp")


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def part(tensor: Tensor, group: Group, dim: int) -> Tensor:
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


REGIONS: dict[str, tuple[Callable[[Tensor, Group], Tensor], str, str]] = {
    # the map, and what its input and output are: the same on every rank, or a value of each rank's own
    "copy": (regions.copy_to_region, "same", "own"),
    "reduce": (regions.reduce_from_region, "own", "same"),
    "gather": (regions.gather_from_region, "own", "same"),
    "scatter": (regions.scatter_to_region, "same", "own"),
    "all-gather": (regions.all_gather_sequence, "own", "own"),
    "reduce-scatter": (regions.reduce_scatter_sequence, "own", "own"),
}


def both_sides(name: str) -> tuple[float, float]:
    """<A x, y> and <x, A^T y> over the spaces of all ranks together; what is the same everywhere counts once."""
    group = group_of_all()
    map_, input_kind, output_kind = REGIONS[name]
    x = random(group.rank if input_kind == "own" else 100, *SHAPE).requires_grad_()
    before = x.detach().clone()
    image = map_(x, group)
    y = random(200 + (group.rank if output_kind == "own" else 100), *image.shape)
    incoming = y.clone()
    (transpose,) = torch.autograd.grad(image, x, y)
    assert torch.equal(x.detach(), before), "the input was written"
    assert torch.equal(y, incoming), "the incoming gradient was written"
    if output_kind == "same":
        assert torch.equal(image, collectives.all_gather(image.detach().unsqueeze(0), group)[0])

    def over_ranks(value: Tensor, kind: str) -> float:
        total = collectives.all_reduce_(value.detach().view(1).clone(), group).item()
        return total / (group.size if kind == "same" else 1)

    return over_ranks((image * y).sum(), output_kind), over_ranks((x * transpose).sum(), input_kind)


@pytest.mark.parametrize("name", REGIONS)
def test_backward_is_the_transpose(name: str, rank_pools: RankPools) -> None:
    for left, right in rank_pools(SIZE).run(both_sides, name):
        assert abs(left - right) < 1e-12 * max(1.0, abs(left))
        assert abs(left) > 1e-3


def results_of_collectives() -> dict[str, Tensor]:
    group = group_of_all()
    x = random(group.rank, *SHAPE)
    before = x.clone()
    results = {
        "gather": collectives.all_gather(x, group),
        "gather, not contiguous": collectives.all_gather(x.transpose(0, 1), group),
        "scatter": collectives.reduce_scatter(x, group),
        "gather region": regions.gather_from_region(x, group),
        "scatter region": regions.scatter_to_region(x, group),
        "reduce region": regions.reduce_from_region(x, group),
    }
    assert torch.equal(x, before)
    into = x.clone()
    results["scatter into itself"] = collectives.reduce_scatter_async(
        into, group, out=into.view(group.size, -1, *SHAPE[1:])[group.rank]
    ).wait()
    whole = torch.zeros(SIZE, *SHAPE, dtype=x.dtype)
    whole[group.rank] = x
    results["gather into itself"] = (
        collectives.all_gather_async(whole[group.rank].flatten(), group, out=whole.view(-1)).wait().view(whole.shape)
    )
    results["max"] = collectives.all_reduce_(x.clone(), group, "max")
    apart = torch.empty(SHAPE[::-1], dtype=x.dtype).permute(2, 1, 0) if group.rank else torch.empty_like(x)
    results["sum, not contiguous"] = collectives.all_reduce_(apart.copy_(x), group)
    return results


def test_collectives_give_what_their_names_say(rank_pools: RankPools) -> None:
    inputs = [random(rank, *SHAPE) for rank in range(SIZE)]
    in_rank_order = inputs[0] + inputs[1] + inputs[2] + inputs[3]
    for rank, results in enumerate(rank_pools(SIZE).run(results_of_collectives)):
        rows = in_rank_order.chunk(SIZE)[rank]
        assert_bits_equal(results["gather"], torch.cat(inputs))
        assert_bits_equal(results["gather, not contiguous"], torch.cat([x.transpose(0, 1) for x in inputs]))
        assert_bits_equal(results["scatter"], rows, "sums are taken in rank order")
        assert_bits_equal(results["scatter into itself"], rows)
        assert_bits_equal(results["gather into itself"], torch.stack(inputs))
        assert_bits_equal(results["gather region"], torch.cat(inputs, dim=-1))
        assert_bits_equal(results["scatter region"], inputs[rank].chunk(SIZE, dim=-1)[rank].contiguous())
        assert_bits_equal(results["max"], torch.stack(inputs).amax(0))
        torch.testing.assert_close(results["sum, not contiguous"], in_rank_order, rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(results["reduce region"], in_rank_order, rtol=1e-14, atol=1e-14)


def split_loss_and_gradient(logits: Tensor, labels: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    group = group_of_all()
    own = part(logits, group, -1).requires_grad_()
    losses = vocab_parallel_cross_entropy(own * 1.0, labels, group, vocab_size)
    (gradient,) = torch.autograd.grad((losses * random(9, *losses.shape)).sum(), own)
    return losses.detach(), gradient


@pytest.mark.parametrize("vocab_size", [16, 13, 5, 3], ids=["whole", "padded", "ranks-of-padding", "one-rank"])
def test_cross_entropy_over_a_split_vocabulary(vocab_size: int, rank_pools: RankPools) -> None:
    logits, labels = random(0, 6, 5, 16) * 3, torch.randint(vocab_size, (6, 5))
    logits[..., vocab_size:] = 50.0
    true = logits[..., :vocab_size].clone().requires_grad_()
    expected = F.cross_entropy(true.flatten(0, 1), labels.flatten(), reduction="none").view(6, 5)
    (gradient,) = torch.autograd.grad((expected * random(9, 6, 5)).sum(), true)
    ranks = rank_pools(SIZE).run(split_loss_and_gradient, logits, labels, vocab_size)
    for losses, _ in ranks:
        torch.testing.assert_close(losses, expected.detach(), rtol=1e-12, atol=1e-12)
    whole = torch.cat([gradient for _, gradient in ranks], dim=-1)
    torch.testing.assert_close(whole[..., :vocab_size], gradient, rtol=1e-12, atol=1e-12)
    assert not whole[..., vocab_size:].any()
