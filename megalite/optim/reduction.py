"""Reduction of a bucket's gradients over data-parallel ranks: compression, delay or reordering would plug in here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group

Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Collective(Generic[Result]):
    """Collective operation of some ranks after a step's list of actions."""

    name: str
    ranks: tuple[int, ...]
    run: Callable[[], Result]


class Reduction(Protocol):
    """Sums a flat tensor over the data-parallel ranks that share it."""

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        """Start; the result, in `out` where given, is this rank's slice of the sum. `gradients` may be overwritten."""

    def completion(self, gradients: Tensor) -> Iterator[Collective[object]]:
        """Steps that complete this rank's slice in place, once a step, after the last of its reductions."""


class ReduceScatter:
    """A reduce-scatter over the ranks among which the bucket is sharded; once a step the slice is summed over the
    instances of hybrid sharding, and over the copies that each saw a part.
    """

    def __init__(self, shard_group: Group, instance_group: Group, replica_group: Group) -> None:
        self.shard_group, self.instance_group, self.replica_group = shard_group, instance_group, replica_group

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        return collectives.reduce_scatter_async(gradients, self.shard_group, out=out)

    def completion(self, gradients: Tensor) -> Iterator[Collective[object]]:
        for kind, group in (("instances", self.instance_group), ("replicas", self.replica_group)):
            summed = partial(collectives.all_reduce_in_rank_order_, gradients, group)
            yield Collective(f"sum of the gradients over {kind}", group.ranks, summed)
