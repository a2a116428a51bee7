"""Sum of gradients over replicas in the first steps, before the replicas update their own weights."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megalite.optim.layout import BucketShardSpec
from megalite.optim.reduction import Reduction, ReductionGroups
from megalite.parallel.mesh import Group


class WarmupReduction(Reduction):
    """Sum over the ranks of a replica, and over the replicas in steps of plain data parallelism."""

    def __init__(self, replicas: Group, spec: BucketShardSpec, groups: ReductionGroups) -> None:
        """Describe the sum. `replicas`: the ranks that own the same slices, one per replica."""
        super().__init__(spec, replace(groups, instances=replicas))
        self.is_local = False

    def sum_over_instances(self, shard: Tensor) -> Tensor:
        return shard if self.is_local else super().sum_over_instances(shard)
