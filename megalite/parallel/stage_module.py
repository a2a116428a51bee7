"""The interface between a network and the code that trains it: a stage as a module, with the collectives inside it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from megalite.parallel.stage import LossTerm


class Inside(NamedTuple):
    """A collective that modules of a stage run inside a schedule action, except those over tensor-parallel ranks.

    Attributes:
        group: the axes of its group, for example "dp x cp" or "ep".
        backward: number of collectives that its backward runs.
    """

    name: str
    group: str
    backward: int = 1


def inside_forward(modules: Iterable[nn.Module]) -> list[Inside]:
    """List the modules' collectives in the order of forward. Backward runs those with a gradient in reverse order.

    A submodule that communicates lists its collectives in an attribute `inside`.
    """
    return [each for module in modules for part in module.modules() for each in getattr(part, "inside", ())]


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
        """List the collectives inside forward or backward that data-parallel ranks run together, in order.

        Ranks compare their lists. Those of backward have what is before the first trained weight, too, which does not
        run: it is the same on all of them.
        """
        return []
