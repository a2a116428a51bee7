"""Weights that recurrent layers share: the places of parts that are fused, and initial values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.placement import stacked
from megalite.parallel.sharding import Constant, Drawn, LogicalTensor, Sharding


def by_heads(context: ParallelContext, parts: Sequence[LogicalTensor], *, columns: int = 1) -> Sharding:
    """Place parts, [heads, ...] each, that are fused into one tensor: heads are split within each part."""
    return stacked([context.split(part, {0: "heads"}, columns=columns) for part in parts])


def of_parts(
    context: ParallelContext, own: Sequence[LogicalTensor], grouped: Sequence[LogicalTensor], *, columns: int = 1
) -> list[Sharding]:
    """Place parts that are fused into one tensor; each has its heads or groups first, and is split by them.

    Args:
        own: parts by head, [heads, ...].
        grouped: parts by group, [groups, ...], each group for equally many consecutive heads. If there are fewer groups
            than ranks, ranks have copies, in a second tensor, and each computes a part of their gradient.
        columns: as of `ParallelContext.split`.
    """
    over, groups = context.group("heads"), grouped[0].shape[0]
    if len(copies := sharers(context, groups)) == 1:
        return [by_heads(context, [*own, *grouped], columns=columns)]
    one = over.rank * groups // over.size
    shared = [context.shared(part, range(one, one + 1), copies, columns=columns) for part in grouped]
    return [by_heads(context, own, columns=columns), stacked(shared)]


def sharers(context: ParallelContext, groups: int) -> tuple[int, ...]:
    """Return the ranks that have heads of the same group as this rank: itself alone if each has complete groups."""
    over = context.group("heads")
    each = max(over.size // groups, 1)
    first = over.rank // each * each
    return over.ranks[first : first + each]


class SumOverSharers(torch.autograd.Function):
    """Sum of a tensor over the ranks that share a group, in rank order. Its gradient is summed in the same way."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, over: Group, ranks: tuple[int, ...]) -> Tensor:
        ctx.over, ctx.ranks = over, ranks
        return _summed(input, over, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradients[0], ctx.over, ctx.ranks), None, None


def _summed(input: Tensor, over: Group, ranks: tuple[int, ...]) -> Tensor:
    gathered = collectives.all_gather(input.unsqueeze(0), over)
    first = over.ranks.index(ranks[0])
    return gathered[first : first + len(ranks)].sum(0)


def of_heads(name: str, heads: int, initial: Drawn | Constant) -> LogicalTensor:
    """Describe a number for each head, kept in fp32: a decay rounded to bf16 is off by nearly a percent."""
    return LogicalTensor(name, (heads,), initial, weight_decay=False, fp32=True)


@dataclass(frozen=True)
class Uniform:
    """Initial values drawn evenly between two numbers."""

    shape: tuple[int, ...]
    low: float
    high: float

    def __call__(self, generator: torch.Generator) -> Tensor:
        return torch.rand(self.shape, generator=generator) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class LogOfUniform(Uniform):
    """Logarithms of such values."""

    def __call__(self, generator: torch.Generator) -> Tensor:
        return super().__call__(generator).log()


@dataclass(frozen=True)
class StepBias(Uniform):
    """Biases whose softplus is drawn evenly in its logarithm between two numbers, and is at least `least`."""

    least: float = 1e-4

    def __call__(self, generator: torch.Generator) -> Tensor:
        powers = torch.rand(self.shape, generator=generator)
        low, high = math.log(self.low), math.log(self.high)
        steps = (powers * (high - low) + low).exp().clamp(min=self.least)
        return steps + (-torch.expm1(-steps)).log()


def taps_of(shape: tuple[int, ...], taps: int) -> Drawn:
    """Return the initial values of a convolution over so many tokens: torch's for `nn.Conv1d` by channel."""
    bound = 1 / math.sqrt(taps)
    return Drawn(Uniform(shape, -bound, bound))
