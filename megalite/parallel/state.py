"""State that is no parameter: tensors that a run keeps, with their place in the global model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from megalite.parallel.sharding import Constant, Sharding


class State(nn.Module):
    """A tensor that no gradient changes, and its `Sharding`: a module's counts or biases, an optimizer's row sums.

    A module has it as any other module: an attribute, or one of a ModuleList. Its `replica_ranks`, and all ranks that
    differ in their data-parallel position alone, hold the same values, whatever the ZeRO stage: whoever changes it
    changes it alike on all of them. The first of them saves it, and all load it.
    """

    def __init__(self, sharding: Sharding, dtype: torch.dtype, device: torch.device) -> None:
        """Raise TypeError if its logical tensors do not begin as constants."""
        super().__init__()
        self.sharding = sharding
        self.values = torch.empty(sharding.local_shape, dtype=dtype, device=device)
        """Contiguous."""
        self.begin()

    @torch.no_grad()
    def begin(self) -> None:
        """Set the values that it has before training; padding is zero."""
        self.values.zero_()
        for piece in self.sharding.pieces:
            if not isinstance(piece.tensor.initial, Constant):
                raise TypeError(f"the state {piece.tensor.name} begins as a constant")
            piece.view(self.values).fill_(piece.tensor.initial.value)


def states_of(module: nn.Module) -> Iterator[State]:
    """Each `State` of a module and of those in it once, in order of registration."""
    return (each for each in module.modules() if isinstance(each, State))
