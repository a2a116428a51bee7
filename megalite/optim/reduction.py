"""The seam where data-parallel ranks sum a bucket's gradients: what compresses, delays or reorders it plugs in here."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group


class Reduction(Protocol):
    """Sums a flat tensor over the data-parallel ranks that share it."""

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        """Start; the result, in `out` where given, is this rank's slice of the sum. `gradients` may be overwritten."""

    def finish(self, gradients: Tensor) -> None:
        """Once a step, after the last of its reductions: complete this rank's slice in place."""


class ReduceScatter:
    """A reduce-scatter over the ranks among which the bucket is sharded; once a step the slice is summed over the
    instances of hybrid sharding, and over the copies that each saw a part.
    """

    def __init__(self, shard_group: Group, instance_group: Group, replica_group: Group) -> None:
        self.shard_group, self.instance_group, self.replica_group = shard_group, instance_group, replica_group

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        return collectives.reduce_scatter_async(gradients, self.shard_group, out=out)

    def finish(self, gradients: Tensor) -> None:
        collectives.all_reduce_(gradients, self.instance_group)
        collectives.all_reduce_(gradients, self.replica_group)
