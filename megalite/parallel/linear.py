"""Linear layers split over the tensor-parallel ranks.

Megatron-LM (arXiv:1909.08053) and, with sequence parallelism, Korthikanti et al. (arXiv:2205.05198): the
column-parallel layer's gathered input is not saved but gathered again in backward, beside the input-gradient product;
the input gradient's reduction then runs beside the weight-gradient product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.parameter import Parameter, ProductGradient, hand_over
from megalite.parallel.sharding import Sharding


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


class _ColumnParallel(torch.autograd.Function):
    """input [sequence (/ size), batch, in], weights [out_i, in] -> [sequence, batch, sum of out_i]."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: Group, sequence_parallel: bool, *weights: Tensor) -> Tensor:
        # Parameters are kept as they are: a saved tensor would lose its buffer under recomputation.
        ctx.group, ctx.sequence_parallel, ctx.weights = group, sequence_parallel, weights
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
        (input,), weights = ctx.saved_tensors, ctx.weights
        group: Group = ctx.group
        input_again = collectives.all_gather_async(input, group) if ctx.sequence_parallel else collectives.done(input)
        parts = _split(_matrix(gradients[0]), weights)
        input_gradient = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            input_gradient.addmm_(part, weight)
        whole = input_again.wait()
        input_gradient = input_gradient.view(whole.shape)
        if ctx.sequence_parallel:
            reduction = collectives.reduce_scatter_async(input_gradient, group)
        else:
            reduction = collectives.all_reduce_async_(input_gradient, group)
        weight_gradients = [
            hand_over(weight, ProductGradient(part, _matrix(whole)))
            for part, weight in zip(parts, weights, strict=True)
        ]
        return reduction.wait(), None, None, *weight_gradients


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
        (input,) = ctx.saved_tensors
        gradient = collectives.all_gather(gradients[0], ctx.group) if ctx.sequence_parallel else gradients[0]
        input_gradient = gradient @ ctx.weight  # first: the last gradient to be handed over may free the weight
        weight_gradient = hand_over(ctx.weight, ProductGradient(_matrix(gradient), _matrix(input)))
        return input_gradient, weight_gradient, None, None


def _split(matrix: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return matrix.split([weight.shape[0] for weight in weights], dim=-1)


class ColumnParallelLinear(nn.Module):
    """A linear layer whose outputs are split over `group`; the input is replicated, or split along the sequence.

    Several weights over the same input (queries, and keys and values that ranks share) run over one gathered input;
    their outputs stand side by side in the last dimension.
    """

    def __init__(
        self,
        weights: Sequence[Sharding | Parameter],
        biases: Sequence[Sharding],
        group: Group,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """A weight that is tied to another layer's is given as that `Parameter`."""
        super().__init__()
        self.weights = nn.ParameterList(
            [weight if isinstance(weight, Parameter) else Parameter(weight, dtype, device) for weight in weights]
        )
        self.biases = nn.ParameterList([Parameter(sharding, dtype, device) for sharding in biases])
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size > 1

    def forward(self, input: Tensor) -> Tensor:
        """[sequence (/ size under sequence parallelism), batch, in] to [sequence, batch, out / size]."""
        output: Tensor = _ColumnParallel.apply(input, self.group, self.sequence_parallel, *self.weights)
        if len(self.biases) == 0:
            return output
        return output + (self.biases[0] if len(self.biases) == 1 else torch.cat(list(self.biases)))


class RowParallelLinear(nn.Module):
    """A linear layer whose inputs are split over `group`: its terms are summed over it, then the bias is added once."""

    def __init__(
        self,
        weight: Sharding,
        bias: Sharding | None,
        group: Group,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = Parameter(weight, dtype, device)
        self.bias = Parameter(bias, dtype, device) if bias is not None else None
        self.group = group
        self.sequence_parallel = sequence_parallel and group.size > 1

    def forward(self, input: Tensor) -> Tensor:
        """[sequence, batch, in / size] to [sequence (/ size under sequence parallelism), batch, out]."""
        output: Tensor = _RowParallel.apply(input, self.weight, self.group, self.sequence_parallel)
        return output if self.bias is None else output + self.bias
