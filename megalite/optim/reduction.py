"""Sum of a bucket's gradients over the data-parallel ranks: the seam at which a run may communicate less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalite.optim.layout import BucketShardSpec
from megalite.parallel import collectives
from megalite.parallel.mesh import Group


@dataclass(frozen=True)
class ReductionGroups:
    """Process groups over which a bucket's gradients are summed."""

    shards: Group
    """Ranks among which the bucket is sharded. The gradients are summed by a reduce-scatter."""
    instances: Group
    """Ranks that own the same slice, one per instance of hybrid sharding."""
    partial: Group
    """Ranks that have the same parameters but compute only a part of the gradient each.

    Example: the first and the last pipeline stage, if both have a tied embedding.
    """


class Reduction:
    """Sum of a bucket's gradients from its uses in one chunk, by the collectives of the backend.

    Subclasses (`megalite/extras/synchronization/`) send fewer bytes, or send them in another way. A step calls `begin`
    once, or once per micro-batch under ZeRO 2 and 3, then `sum_over_instances`, then `complete`, then, if the step is
    not skipped, `apply`, and under ZeRO 0 `begin_gather`.
    """

    order = 0
    """Position among the reductions of a rank if a micro-batch that is left out completes them: as in a backward.
    0: that of the bucket."""
    own_slice = False
    """True if the slice of the sum needs memory of its own, because `gradients` must keep what this rank has sent."""

    def __init__(self, spec: BucketShardSpec, groups: ReductionGroups) -> None:
        """Describe the sum. `spec`: the bucket's layout and this rank's slices of it."""
        self.spec, self.groups = spec, groups

    @property
    def shards_have_all(self) -> bool:
        """True if the sum over the shard group is the whole sum, without instances, partial gradients or other uses."""
        record = self.spec.layout.slots[0].parameter.sharding
        one_use = len({use.chunk for use in record.uses}) == 1
        return one_use and self.groups.instances.size == self.groups.partial.size == 1

    def begin_step(self, updates: int, loss_scale: float) -> None:
        """Tell the number of updates before this step, and the factor that the gradients have."""

    def begin(self, gradients: Tensor, out: Tensor | None) -> collectives.Pending:
        """Start to sum [length] over the shard group. The result is this rank's slice, in `out` if given."""
        return collectives.reduce_scatter_async(gradients, self.groups.shards, out=out)

    def sum_over_instances(self, shard: Tensor) -> Tensor:
        """Sum the slice in place over the instances of hybrid sharding."""
        return collectives.all_reduce_in_rank_order_(shard, self.groups.instances)

    def complete(self, shard: Tensor) -> None:
        """Prepare the slice, which is the sum over all ranks and uses now, for `begin_gather`: what will be applied."""

    def apply(self) -> None:
        """Keep what this step's messages have left out. It is not called for a step that is skipped."""

    def begin_gather(self, shard: Tensor, gradients: Tensor) -> collectives.Pending:
        """Start to gather the slices of all ranks of the shard group in `gradients`."""
        return collectives.all_gather_async(shard, self.groups.shards, out=gradients)


ReductionOf = Callable[[BucketShardSpec, ReductionGroups], Reduction]
"""Function that makes the reduction of an accumulator."""
