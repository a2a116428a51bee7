"""The interface between a network and the code that trains it: a stage as a module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import nn

from megalite.parallel.inside import Inside
from megalite.parallel.stage import LossTerm


class StageModule(nn.Module):
    """A stage of a network, or the entire network: `stage(inputs, micro_batch)` returns a `StageOutput`.

    Every parameter has a `Sharding`.
    """

    @property
    @abstractmethod
    def loss_terms(self) -> tuple[LossTerm, ...]:
        """The loss terms of the entire network. Each stage returns the sums of some of them."""

    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """Return the modules that forward runs in order. Together they own all parameters."""

    def parts(self) -> list[tuple[str, nn.Module]]:
        """Return the modules by which reports tell where something happened, in the order of forward, with names."""
        return list(self.named_children())

    def inside(self, *, backward: bool) -> list[Inside]:
        """List the collectives inside forward or backward that data-parallel ranks run together, in order."""
        return []
