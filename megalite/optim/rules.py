"""Choice of the update rule of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.elementwise import elementwise_rule
from megalite.optim.learning_rate import Rates
from megalite.optim.muon import Muon
from megalite.optim.shard import Shard
from megalite.parallel.mesh import ParallelMesh


class UpdateRule(Protocol):
    """Updates parameters, master weights and state from the gradients of the shards it was made for."""

    def update(self, rates: Rates, step: int, factor: float) -> None:
        """`step` counts updates from 1; the gradients are to be multiplied by `factor`, in place or on the way.

        Every rank calls it: a rule may talk to other ranks.
        """

    def collectives(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """List an update's collectives with other ranks, in order: names and ranks."""


def make_rules(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    """The rules that together update all of the shards once."""
    return _MAKE[config.optimizer](shards, mesh, config)


def _elementwise(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    return [elementwise_rule([segment for shard in shards for segment in shard.segments], config)]


def _muon(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    rest = [segment for shard in shards for segment in shard.segments if not segment.group.matrices]
    return [Muon(shards, mesh, config), elementwise_rule(rest, config)]


_MAKE: Mapping[str, Callable[[Sequence[Shard], ParallelMesh, OptimizerConfig], list[UpdateRule]]] = {
    "adam": _elementwise,
    "sgd": _elementwise,
    "muon": _muon,
}
"""Makers of the rules of each --optimizer."""
