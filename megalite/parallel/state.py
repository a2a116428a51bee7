"""State that is not a parameter: tensors that a run keeps and saves, with their places, and counts of a step.

The counts are integers, for example tokens per expert. They are equal on every layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import AsBuilt, Constant, Sharding


class State(nn.Module):
    """A tensor with a `Sharding` that has no gradient, for example a module's counts or an optimizer's row sums.

    Register it as a submodule: an attribute of a module, or an element of a ModuleList. It is replicated over its
    `replica_ranks` and over the data-parallel ranks, under every ZeRO stage. Code that changes it must make the same
    change on all of these ranks. The first of them saves it, and all of them load it.
    """

    def __init__(
        self, sharding: Sharding, dtype: torch.dtype, device: torch.device, values: Tensor | None = None
    ) -> None:
        """Allocate the tensor and set its initial values, or keep `values`, a contiguous tensor that a module has.

        Raises:
            TypeError: the initial values of a logical tensor are neither a constant nor those of the module.
        """
        super().__init__()
        self.sharding = sharding
        self.values = torch.empty(sharding.local_shape, dtype=dtype, device=device) if values is None else values
        """The tensor, contiguous."""
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Set the initial values. Padding is zero. A tensor that begins as it was built is left as it is."""
        if all(isinstance(piece.tensor.initial, AsBuilt) for piece in self.sharding.pieces):
            return
        self.values.zero_()
        for piece in self.sharding.pieces:
            if not isinstance(piece.tensor.initial, Constant):
                raise TypeError(f"the state {piece.tensor.name} begins as a constant")
            piece.view(self.values).fill_(piece.tensor.initial.value)


def states_of(module: nn.Module) -> Iterator[State]:
    """Return each `State` of a module and its submodules once, in registration order."""
    return (each for each in module.modules() if isinstance(each, State))


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
