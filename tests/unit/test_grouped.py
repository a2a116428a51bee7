"""Grouped linear products and their gradients, against a loop over experts by torch."""

from __future__ import annotations

from itertools import accumulate
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel
from megalite.optim.optimizer import Optimizer, make_optimizer
from megalite.parallel import grouped, placement
from megalite.parallel.grouped import ExpertRows, grouped_linear
from megalite.parallel.mesh import ParallelMesh, UnconnectedMesh
from megalite.parallel.parameter import GroupedProductGradient, Parameter
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding
from megalite_kernels import grouped as kernel
from tests.harness.close import assert_bits_equal, assert_rounded_once
from tests.harness.poison import poisoned_memory

OUT, IN = 5, 3


class Experts(nn.Module):
    def __init__(self, experts: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        mesh = ParallelMesh()
        tensor = LogicalTensor("experts", (experts, OUT, IN), Normal(1.0), True)
        self.weight = Parameter(placement.split(mesh, tensor, {0: ("ep",)}), dtype, mesh.device)
        self.weight.allocate()
        nn.init.normal_(self.weight, generator=torch.Generator().manual_seed(1))

    def optimizer(self, zero: int, gradients: torch.dtype = torch.float64) -> Optimizer:
        options = DataParallel(gradients, zero)
        return make_optimizer([self], ParallelMesh(), OptimizerConfig(lr=0.1), options, blocks=[[self]])

    def forward(self, input: Tensor, offsets: list[int]) -> Tensor:
        return grouped_linear(input, self.weight, expert_rows(offsets))


def expert_rows(offsets: list[int]) -> ExpertRows:
    return ExpertRows(tuple(offsets), torch.tensor(offsets[1:], dtype=torch.int32))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(weight: Tensor, input: Tensor, output_gradient: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """Return the output, and the gradients of input and weight."""
    weight, input = weight.detach().clone().requires_grad_(), input.detach().clone().requires_grad_()
    of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    output = torch.einsum("ri,roi->ro", input, weight.view(-1, OUT, IN)[of_row])
    return output.detach(), *torch.autograd.grad(output, (input, weight), output_gradient)


COUNTS = [[2, 0, 4, 1], [0, 3, 0], [6], [0, 0], [0]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("way", ["alone", "at once", "deferred"])
@pytest.mark.parametrize("zero", [0, 3])
def test_a_grouped_product_is_a_loop_over_experts(counts: list[int], way: str, zero: int) -> None:
    """Over two steps of two micro-batches; in the second of each the experts' rows stand the other way round."""
    experts = Experts(len(counts))
    matrices = experts.weight.detach().clone()
    optimizer = None if way == "alone" else experts.optimizer(zero)
    for step in range(2):
        if optimizer is not None:
            optimizer.begin_step(2)
        total = torch.zeros_like(matrices)
        experts.weight.grad = None
        for number, rows in enumerate((counts, counts[::-1])):
            if step == 1:  # there an expert without rows in both must not keep what it had
                rows = [0] * (len(rows) - 1) + [sum(rows)]
            offsets = [0, *accumulate(rows)]
            input = random(sum(rows), IN, seed=10 * step + number).requires_grad_()
            gradient = random(sum(rows), OUT, seed=100 + 10 * step + number)
            wanted = expected(matrices, input, gradient, rows)
            output = experts(input, offsets)
            torch.testing.assert_close(output.detach(), wanted[0], rtol=1e-12, atol=1e-12)
            if way == "deferred":
                assert optimizer is not None
                with optimizer.deferring(0) as deferred:
                    output.backward(gradient)
                deferred.add()
            else:
                output.backward(gradient)
            assert input.grad is not None
            torch.testing.assert_close(input.grad, wanted[1], rtol=1e-12, atol=1e-12)
            total += wanted[2]
            if optimizer is not None:
                optimizer.reduce(0, number + 1)
        if optimizer is None:
            found = experts.weight.grad
        else:
            optimizer.complete()
            found = optimizer.buckets[0].gradient_shard[: total.numel()].view(total.shape)
        torch.testing.assert_close(found, total, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("counts", [[2, 0, 4, 1], [0, 3, 0], [6]], ids=str)
def test_one_call_for_all_experts_is_a_loop_over_them(counts: list[int]) -> None:
    """`F.grouped_mm` in bf16, which is for GPUs, but runs everywhere."""
    mesh, width, out = ParallelMesh(), 8, 16
    tensor = LogicalTensor("experts", (len(counts), out, width), Normal(1.0), True)
    weight = Parameter(placement.split(mesh, tensor, {0: ("ep",)}), torch.bfloat16, mesh.device)
    weight.allocate()
    nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    input = random(sum(counts), width, seed=1).bfloat16().requires_grad_()
    gradient = random(sum(counts), out, seed=2).bfloat16()
    wide, matrices = input.detach().double().requires_grad_(), weight.detach().double().view(-1, out, width)
    of_row = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    exact = torch.einsum("ri,roi->ro", wide, matrices[of_row])
    exact.backward(gradient.double())
    called = mock.patch.object(F, "grouped_mm", wraps=F.grouped_mm)
    with mock.patch.object(kernel, "_takes_grouped_mm", return_value=True), called as calls, poisoned_memory():
        found = grouped_linear(input, weight, expert_rows([0, *accumulate(counts)]))
        found.backward(gradient)
    assert calls.call_count == 2
    assert input.grad is not None
    assert wide.grad is not None
    assert_rounded_once(found.detach(), exact.detach(), "output")
    assert_rounded_once(input.grad, wide.grad, "gradient")


@pytest.mark.parametrize("overwrite", [False, True])
def test_experts_without_rows_give_zeros_or_nothing(overwrite: bool) -> None:
    target = torch.full((3 * OUT, IN), torch.nan if overwrite else 7.0)
    output_gradient, input = random(4, OUT, seed=1).bfloat16(), random(4, IN, seed=2).bfloat16()
    product = GroupedProductGradient(output_gradient, input, *expert_rows([0, 0, 4, 4]))
    product.add_to(target, overwrite=overwrite)
    first, second, third = target.view(3, OUT, IN)
    for none in (first, third):
        assert_bits_equal(none, torch.full((OUT, IN), 0.0 if overwrite else 7.0))
    product = (output_gradient.t() @ input).float()  # as any other product: in fp32 at once, or from bf16
    torch.testing.assert_close(second, product if overwrite else product + 7, rtol=1e-2, atol=1e-2)


def test_what_is_handed_over_keeps_no_graph() -> None:
    input = random(4, IN, seed=1).requires_grad_() * 1
    with mock.patch.object(grouped, "accumulate_grad", return_value=None) as taken:
        grouped_linear(input, Experts(1).weight, expert_rows([0, 4])).sum().backward()
    gradient = taken.call_args.args[1].made()
    assert gradient.input.grad_fn is gradient.output_gradient.grad_fn is None


@pytest.mark.parametrize("offsets", [[], [0, 2], [1, 4], [0, 3, 2, 4], [0, 5]])
def test_offsets_that_do_not_deal_all_rows_are_an_error(offsets: list[int]) -> None:
    with pytest.raises(ValueError, match="do not rise from 0 to the 4 rows"):
        grouped_linear(random(4, IN, seed=1), Experts(1).weight, expert_rows(offsets))


def experts_tensor(name: str, experts: int) -> LogicalTensor:
    return LogicalTensor(name, (experts, OUT, IN), Normal(1.0), True)


def fused() -> Sharding:
    """Return the sharding of the gates of two experts, followed by their ups."""
    return placement.stacked([placement.split(ParallelMesh(), experts_tensor(name, 2), {}) for name in ("gate", "up")])


def lonely(rank: int, padded: int) -> Sharding:
    """One expert and padding over two ranks: the part of one of them."""
    mesh = UnconnectedMesh(rank=rank, world_size=2, expert_parallel_size=2)
    return placement.split(mesh, experts_tensor("lonely", 1), {0: ("ep",)}, padded=padded)


@pytest.mark.parametrize(
    "sharding", [fused(), lonely(1, padded=2), lonely(0, padded=4)], ids=["fused", "none", "padding"]
)
def test_a_weight_that_is_not_one_tensor_of_experts_is_an_error(sharding: Sharding) -> None:
    weight = Parameter(sharding, torch.float64, torch.device("cpu"))
    weight.allocate()
    with pytest.raises(ValueError, match="needs a weight that is one tensor without padding, of at least one expert"):
        grouped_linear(random(0, IN, seed=1), weight, expert_rows([0] * (1 + sharding.pieces[0].box.size[0])))


@pytest.mark.parametrize(
    ("offsets", "width"),
    [([0, 4], IN), ([0, 1, 2, 2, 4], IN), ([0, 1, 4], 2 * IN), ([0, 1, 4], OUT), ([0, 1, 1, 1, 2, 4], 2 * IN)],
)
def test_rows_of_other_experts_than_the_weights_are_an_error(offsets: list[int], width: int) -> None:
    """The weight's elements could be laid out in that way."""
    words = f"rows of {len(offsets) - 1} experts with {width} .* has 2 experts .* of {IN}"
    with pytest.raises(ValueError, match=words):
        grouped_linear(random(4, width, seed=1), Experts(2).weight, expert_rows(offsets))
