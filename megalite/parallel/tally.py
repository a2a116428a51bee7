"""Integers that modules count over a training step, for example tokens per expert. They are equal on every layout."""

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
        # Saved, so that a recomputed forward does not stop before it: then all its collectives run again, as declared.
        ctx.save_for_backward(numbers)
        ctx.tally = tally
        return along.view_as(along)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tally.own += ctx.saved_tensors[0]
        return gradients[0], None, None


class Tally(nn.Module):
    """Counters of a module over all micro-batches of a step, summed over ranks at its end.

    Counts are added in backward, which runs exactly once per micro-batch. Forward also runs in evaluation and in
    recomputation. Register a tally as a submodule: an attribute of a module, or an element of a ModuleList.

    Attributes:
        own: [size], int64: this rank's counts since the step began.
    """

    def __init__(self, size: int, group: Group, device: torch.device, on_step: Callable[[Tensor], None]) -> None:
        """Make a tally of `size` counters.

        Args:
            group: the ranks whose counts are summed; for tokens, those along `ParallelContext.token_axes`.
            on_step: called with the sums over the group, [size] int64, after the step has updated the weights, but not
                after a skipped step. It may change a `State`.
        """
        super().__init__()
        self.group, self.on_step = group, on_step
        self.own = torch.zeros(size, dtype=torch.int64, device=device)

    def count(self, numbers: Tensor, along: Tensor) -> Tensor:
        """Add `numbers` [size] when backward reaches `along`. The caller must use the returned tensor for `along`."""
        counted: Tensor = _Count.apply(along, numbers, self)
        return counted

    def begin_step(self) -> None:
        """Reset the counters to zero."""
        self.own.zero_()


def tallies_of(module: nn.Module) -> list[Tally]:
    """Return each `Tally` of a module and its submodules once, in registration order."""
    return [each for each in module.modules() if isinstance(each, Tally)]


@torch.no_grad()
def end_step(tallies: Sequence[Tally]) -> None:
    """Sum the counts of all tallies over the ranks in one all-reduce, and call each tally's `on_step` with its sums."""
    totals = collectives.all_reduce_(torch.cat([tally.own for tally in tallies]), tallies[0].group)
    for tally, total in zip(tallies, totals.split([len(tally.own) for tally in tallies]), strict=True):
        tally.on_step(total)
