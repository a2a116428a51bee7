"""Linear layers split over the tensor-parallel ranks.

Megatron-LM (arXiv:1909.08053) and, with sequence parallelism, Korthikanti et al. (arXiv:2205.05198): the
column-parallel layer's gathered input is not saved but gathered again in backward, beside the input-gradient product;
the input gradient's reduction then runs beside the weight-gradient product. What deferred weight gradients keep stays
split along the sequence and is gathered when they are added.
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
class _GatheredGradient:
    """A `ProductGradient` of which a factor is gathered when it is added."""

    output_gradient: Callable[[], Tensor]
    input: Callable[[], Tensor]

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        ProductGradient(self.output_gradient(), self.input()).add_to(target, overwrite=overwrite)


def _gather_later(split: Tensor, group: Group) -> Callable[[], Tensor]:
    """Gathers once, however many gradients ask, and keeps the whole until the last of them is gone."""
    return functools.cache(lambda: _matrix(collectives.all_gather(split, group)))


class _ColumnParallel(torch.autograd.Function):
    """input [sequence (/ size), batch, in], weights [out_i, in] -> [sequence, batch, sum of out_i]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, sequence_parallel: bool, use: int, *weights: Tensor) -> Tensor:
        # Parameters are kept as they are: a saved tensor would lose its buffer under recomputation.
        ctx.group, ctx.sequence_parallel, ctx.use, ctx.weights = group, sequence_parallel, use, weights
        ctx.save_for_backward(input)
        whole = collectives.all_gather(input, group) if sequence_parallel else input
        if len(weights) == 1:
            return F.linear(whole, weights[0])
        output = whole.new_empty(*whole.shape[:-1], sum(weight.shape[0] for weight in weights))
        for weight, part in zip(weights, _split(_matrix(output), weights), strict=True):
            torch.mm(_matrix(whole), weight.t(), out=part)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, weights = ctx.saved_tensors[0].detach(), ctx.weights  # a deferred gradient must not keep the graph
        group: Group = ctx.group
        later = ctx.sequence_parallel and is_deferred(weights[0])
        gather_now = ctx.sequence_parallel and not later
        input_again = collectives.all_gather_async(input, group) if gather_now else collectives.completed(input)
        parts = _split(_matrix(gradients[0]), weights)
        input_gradient = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            input_gradient.addmm_(part, weight)
        whole = input_again.wait()
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
    """input [sequence, batch, in / size], weight [out, in / size] -> [sequence (/ size), batch, out]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.weight, ctx.group, ctx.sequence_parallel = weight, group, sequence_parallel
        ctx.save_for_backward(input)
        term = F.linear(input, weight)  # nobody else's: it can be summed in place
        return collectives.reduce_scatter(term, group) if sequence_parallel else collectives.all_reduce_(term, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input = ctx.saved_tensors[0].detach()
        gradient = collectives.all_gather(gradients[0], ctx.group) if ctx.sequence_parallel else gradients[0]
        input_gradient = gradient @ ctx.weight  # first: the last gradient to be handed over may free the weight
        product: Gradient
        if ctx.sequence_parallel and is_deferred(ctx.weight):
            gathered = _gather_later(gradients[0], ctx.group)
            product = _GatheredGradient(gathered, functools.partial(_matrix, input))
        else:
            product = ProductGradient(_matrix(gradient), _matrix(input))
        return input_gradient, accumulate_grad(ctx.weight, product), None, None


def _split(matrix: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return matrix.split([weight.shape[0] for weight in weights], dim=-1)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over ranks; the input is replicated, or split along the sequence.

    Several weights over the same input (queries, and keys and values that ranks share) run over one gathered input;
    their outputs stand side by side in the last dimension.
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
        """A weight that is tied to another layer's is given as that `Parameter`, with the number of its use here.

        Args:
            outputs: what the dimension means that is split.
            adds_bias: or leaves `bias` to be added by what comes next.
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
        """[out / size]"""
        if len(self.biases) < 2:
            return self.biases[0] if self.biases else None
        return torch.cat(list(self.biases))

    def forward(self, input: Tensor) -> Tensor:
        """[sequence (/ size under sequence parallelism), batch, in] to [sequence, batch, out / size]."""
        output: Tensor = _ColumnParallel.apply(input, self.group, self.sequence_parallel, self.use, *self.weights)
        bias = self.bias if self.adds_bias else None
        return output if bias is None else output + bias


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over ranks: their terms are summed, then the bias is added once.

    `inputs`: what the dimension means that is split.
    """

    def __init__(self, context: ParallelContext, inputs: Meaning, weight: Sharding, bias: Sharding | None) -> None:
        super().__init__()
        self.weight = context.parameter(weight)
        self.bias = context.parameter(bias) if bias is not None else None
        self.group, self.sequence_parallel = context.group(inputs), context.sequence_parallel

    def forward(self, input: Tensor) -> Tensor:
        """[sequence, batch, in / size] to [sequence (/ size under sequence parallelism), batch, out]."""
        output: Tensor = _RowParallel.apply(input, self.weight, self.group, self.sequence_parallel)
        return output if self.bias is None else output + self.bias
