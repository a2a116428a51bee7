"""State that is not a parameter: tensors that a run keeps and saves, with their place in the global model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

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
