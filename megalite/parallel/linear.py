"""Linear layers split over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

A is the transposed weight, and rank i of p ranks has A_i:

    column-parallel:  Y = X [A_1, ..., A_p] = [X A_1, ..., X A_p]; backward sums the gradient of X over the ranks.
    row-parallel:     Y = [X_1, ..., X_p] [A_1; ...; A_p] = X_1 A_1 + ... + X_p A_p, summed over the ranks.

With sequence parallelism (arXiv:2205.05198), X of the column-parallel layer and Y of the row-parallel layer are split
along the sequence: the column-parallel layer all-gathers its input, and the row-parallel layer reduce-scatters its
output. The gathered input is not saved: backward gathers it again while it computes the input gradient, and reduces the
input gradient while it computes the weight gradient. Deferred weight gradients keep the split tensors and gather them
when they are added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.context import Meaning, ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Gradient, Parameter, ProductGradient, accumulate_grad, is_deferred
from megalite.parallel.sharding import Sharding


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


@dataclass(frozen=True)
class _GatheredGradient(Gradient):
    """A `ProductGradient` that gathers one of its factors only when it is added to the buffer."""

    output_gradient: Callable[[], Tensor]
    input: Callable[[], Tensor]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        ProductGradient(self.output_gradient(), self.input()).add_to(target, overwrite=overwrite)


def _gather_later(split: Tensor, group: Group) -> Callable[[], Tensor]:
    """Return a function that gathers on its first call and returns the same tensor on later calls."""
    return functools.cache(lambda: _matrix(collectives.all_gather(split, group)))


class _ColumnParallel(torch.autograd.Function):
    """Product of input [sequence (/ size), batch, in] and weights [out_i, in]: [sequence, batch, sum of out_i].

    `use`: the number of this use of a tied weight, whose uses have separate sums of gradients.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, sequence_parallel: bool, use: int, *weights: Tensor) -> Tensor:
        # Not by save_for_backward: under recomputation the saved tensor would not have the gradient buffer.
        ctx.group, ctx.sequence_parallel, ctx.use, ctx.weights = group, sequence_parallel, use, weights
        ctx.save_for_backward(input)
        whole = collectives.all_gather(input, group) if sequence_parallel else input
        if len(weights) == 1:
            return F.linear(whole, weights[0])
        output = whole.new_empty(*whole.shape[:-1], sum(weight.shape[0] for weight in weights))
        for weight, part in zip(weights, _split_outputs(_matrix(output), weights), strict=True):
            torch.mm(_matrix(whole), weight.t(), out=part)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the weights, whose products run beside the messages."""
        input, weights = ctx.saved_tensors[0].detach(), ctx.weights  # a deferred gradient must not keep the graph
        group: Group = ctx.group
        later = ctx.sequence_parallel and is_deferred(weights[0])
        gather_now = ctx.sequence_parallel and not later and any(weight.requires_grad for weight in weights)
        input_again = collectives.all_gather_async(input, group) if gather_now else None
        parts = _split_outputs(_matrix(gradients[0]), weights)
        input_gradient = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            input_gradient.addmm_(part, weight)
        whole = input_again.wait() if input_again is not None else input
        input_gradient = input_gradient.view(*gradients[0].shape[:-1], -1)
        if ctx.sequence_parallel:
            reduction = collectives.reduce_scatter_async(input_gradient, group)
        else:
            reduction = collectives.all_reduce_async_(input_gradient, group)
        products: list[Gradient]
        if later:
            gathered = _gather_later(input, group)
            products = [_GatheredGradient(functools.partial(_matrix, part), gathered) for part in parts]
        else:
            products = [ProductGradient(part, _matrix(whole)) for part in parts]
        weight_gradients = [
            accumulate_grad(weight, product, ctx.use) for weight, product in zip(weights, products, strict=True)
        ]
        return reduction.wait(), None, None, None, *weight_gradients


class _RowParallel(torch.autograd.Function):
    """Product of input [sequence, batch, in / size] and weight [out, in / size]: [sequence (/ size), batch, out]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, group: Group, sequence_parallel: bool, unread: bool) -> Tensor:
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        ctx.save_for_backward(input)
        if unread:
            sequence = len(input) // group.size if sequence_parallel else len(input)
            return input.new_zeros(sequence, *input.shape[1:-1], len(weight))
        term = F.linear(input, weight)  # a new tensor: it can be reduced in place
        return collectives.reduce_scatter(term, group) if sequence_parallel else collectives.all_reduce_(term, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input = ctx.saved_tensors[0].detach()
        gradient = collectives.all_gather(gradients[0], ctx.group) if ctx.sequence_parallel else gradients[0]
        input_gradient = gradient @ ctx.weight  # first: accumulating the last gradient may free the weight
        product: Gradient
        if ctx.sequence_parallel and is_deferred(ctx.weight):
            gathered = _gather_later(gradients[0], ctx.group)
            product = _GatheredGradient(gathered, functools.partial(_matrix, input))
        else:
            product = ProductGradient(_matrix(gradient), _matrix(input))
        return input_gradient, accumulate_grad(ctx.weight, product), None, None, None


_ALONE = Group((0,), 0)


def product(input: Tensor, weight: Tensor) -> Tensor:
    """Return the product of [..., in] and a weight [out, in], without communication.

    The gradient of the weight goes to its buffer, or later if it is deferred, as those of the layers here.
    """
    output: Tensor = _ColumnParallel.apply(input, _ALONE, False, 0, weight)
    return output


class _SharedByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        return collectives.all_gather(input, group) if sequence_parallel else input.view_as(input)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradients[0].contiguous()
        if ctx.sequence_parallel:
            return collectives.reduce_scatter(gradient, ctx.group), None, None
        return collectives.all_reduce_async_(gradient.clone(), ctx.group).wait(), None, None


def shared_by_heads(input: Tensor, group: Group, *, sequence_parallel: bool) -> Tensor:
    """Return [sequence, batch, width] for the heads of each rank, from [sequence (/ size), batch, width].

    Its gradient is the sum of those of all ranks' heads.
    """
    if group.size == 1:
        return input
    output: Tensor = _SharedByHeads.apply(input, group, sequence_parallel)
    return output


def gathered(input: Tensor, group: Group) -> Tensor:
    """Return [size * sequence, batch, width] of all ranks from [sequence, batch, width] of each.

    Its gradient is the sum of those of all ranks, cut likewise.
    """
    return shared_by_heads(input, group, sequence_parallel=True)


def _split_outputs(matrix: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return matrix.split([weight.shape[0] for weight in weights], dim=-1)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over ranks; the input is replicated, or split along the sequence.

    Several weights (queries, and keys and values that ranks share) are applied to the same input, which is gathered
    once; their outputs are concatenated along the last dimension.
    """

    def __init__(
        self,
        context: ParallelContext,
        outputs: Meaning,
        weights: Sequence[Sharding | Parameter],
        biases: Sequence[Sharding] = (),
        *,
        use: int = 0,
        adds_bias: bool = True,
    ) -> None:
        """Make the layer.

        Args:
            outputs: the meaning of the output dimension, which is split.
            weights: the placement of each weight; or, for a weight tied to another layer's, that `Parameter`.
            use: the number of this use, if the weight is tied.
            adds_bias: False if the next operation adds `bias` instead of this layer.
        """
        super().__init__()
        self.weights = nn.ParameterList(
            [weight if isinstance(weight, Parameter) else context.parameter(weight) for weight in weights]
        )
        self.biases = nn.ParameterList(map(context.parameter, biases))
        self.group, self.use, self.adds_bias = context.group(outputs), use, adds_bias
        self.sequence_parallel = context.sequence_parallel

    @property
    def bias(self) -> Tensor | None:
        """The biases concatenated, [out / size]."""
        if len(self.biases) < 2:
            return self.biases[0] if self.biases else None
        return torch.cat(list(self.biases))

    def forward(self, input: Tensor, *, frozen: bool = False) -> Tensor:
        """Map [sequence (/ size under sequence parallelism), batch, in] to [sequence, batch, out / size].

        `frozen`: the weights get no gradient.
        """
        weights = [weight.frozen_alias() for weight in self.weights] if frozen else self.weights
        output: Tensor = _ColumnParallel.apply(input, self.group, self.sequence_parallel, self.use, *weights)
        bias = self.bias if self.adds_bias else None
        return output if bias is None else output + bias


class ReplicatedLinear(nn.Module):
    """A linear layer that every rank has whole and applies to its own tokens."""

    def __init__(self, context: ParallelContext, weight: Sharding, bias: Sharding | None) -> None:
        super().__init__()
        self.weight = context.parameter(weight)
        self.bias = context.parameter(bias) if bias is not None else None

    def forward(self, input: Tensor) -> Tensor:
        """Map [sequence (/ size under sequence parallelism), batch, in] to the same with out."""
        output = product(input, self.weight)
        return output if self.bias is None else output + self.bias


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over ranks. Partial outputs are summed, then the bias is added once.

    `inputs`: the meaning of the input dimension, which is split.
    """

    def __init__(self, context: ParallelContext, inputs: Meaning, weight: Sharding, bias: Sharding | None) -> None:
        super().__init__()
        self.weight = context.parameter(weight)
        self.bias = context.parameter(bias) if bias is not None else None
        self.group, self.sequence_parallel = context.group(inputs), context.sequence_parallel

    def forward(self, input: Tensor, *, unread: bool = False) -> Tensor:
        """Map [sequence, batch, in / size] to [sequence (/ size under sequence parallelism), batch, out].

        `unread`: only backward is asked for. The output is then not computed, and has zeros in place of the product.
        """
        output: Tensor = _RowParallel.apply(input, self.weight, self.group, self.sequence_parallel, unread)
        return output if self.bias is None else output + self.bias
