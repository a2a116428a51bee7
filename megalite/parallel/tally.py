"""Whole numbers that modules count over a training step, as tokens of each expert: the same on every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group


class _Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, along: Tensor, numbers: Tensor, tally: Tally) -> Tensor:
        ctx.numbers, ctx.tally = numbers, tally
        return along.view_as(along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tally.own += ctx.numbers
        return gradients[0], None, None


class Tally(nn.Module):
    """Numbers that a module counts over all micro-batches of a step, on all ranks together.

    Numbers are added in backward, which runs once for each micro-batch: forward runs in evaluations, too, and again
    where it is recomputed. A module has it as any other module: an attribute, or one of a ModuleList.

    Attributes:
        own: [size], int64: what this rank has counted since the step began.
    """

    def __init__(self, size: int, group: Group, device: torch.device, take: Callable[[Tensor], None]) -> None:
        """Make one of `size` numbers.

        Args:
            group: the ranks that count different things: tokens, those along `ParallelContext.token_axes`.
            take: is given the sums over all of them, [size] in int64, alike on each, when the step has changed the
                weights: not behind one that is skipped. It may change a `State`.
        """
        super().__init__()
        self.group, self.take = group, take
        self.own = torch.zeros(size, dtype=torch.int64, device=device)

    def count(self, numbers: Tensor, along: Tensor) -> Tensor:
        """Add `numbers`, [size], when the gradient of `along` comes back; returns `along`, to go on with."""
        counted: Tensor = _Count.apply(along, numbers, self)
        return counted

    def begin_step(self) -> None:
        """Begin to count at zero."""
        self.own.zero_()


def tallies_of(module: nn.Module) -> list[Tally]:
    """Each `Tally` of a module and of those in it once, in order of registration."""
    return [each for each in module.modules() if isinstance(each, Tally)]


@torch.no_grad()
def end_step(tallies: Sequence[Tally]) -> None:
    """Add up what the ranks of a group have counted, in one go for all tallies, and give each its sums."""
    totals = collectives.all_reduce_(torch.cat([tally.own for tally in tallies]), tallies[0].group)
    for tally, total in zip(tallies, totals.split([len(tally.own) for tally in tallies]), strict=True):
        tally.take(total)
