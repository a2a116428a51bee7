"""Parts of each bucket that a rank holds, owns and saves: a pure function of the mesh and the parameters' records.

So any rank can tell it of any other without asking.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.optim.layout import BucketLayout
from megalite.parallel.sharding import Sharding, partition_range


@dataclass(frozen=True)
class BucketShardSpec:
    """A bucket, and the slices of it that belong to a rank. Ranges are of its elements: the first, one past the last.

    Its data-parallel peers, in their order, are dealt into instances (one, but for hybrid sharding) of as many ranks as
    there are shards.
    """

    layout: BucketLayout
    stage: int
    """ZeRO 0 to 3; 0 where there is one shard."""
    shards: int
    shard: int
    """Number of this rank's slice among the equal ones."""
    replicas: int
    """Number of ranks that have the same slice: copies of the parameters, times instances."""
    replica: int
    """Number of this rank among them."""

    @staticmethod
    def of(
        layout: BucketLayout, rank: int, *, peers: int, position: int, stage: int = 0, instances: int = 1
    ) -> BucketShardSpec:
        """Return the slices of `rank`, which holds the parameters, at `position` of so many data-parallel peers."""
        copies = layout.slots[0].parameter.sharding.replica_ranks
        shards = peers // instances
        instance, shard = divmod(position, shards)
        replica = copies.index(rank) * instances + instance
        return BucketShardSpec(layout, stage if shards > 1 else 0, shards, shard, len(copies) * instances, replica)

    @property
    def counted_here(self) -> bool:
        """True if this rank is the one of the replicas that counts where each element counts once."""
        return self.replica == 0

    @property
    def owned(self) -> tuple[int, int]:
        """This rank's slice: the elements that only this shard owns."""
        length = self.layout.length // self.shards
        return self.shard * length, (self.shard + 1) * length

    @property
    def updated(self) -> tuple[int, int]:
        """Range that this rank updates: under ZeRO 0 everything."""
        return self.owned if self.stage else (0, self.layout.length)

    @property
    def saved(self) -> tuple[int, int]:
        """Range that this rank saves: its part of the slice, of which each of the replicas saves as much."""
        begin, end = self.owned
        start, length = partition_range(end - begin, self.replicas, self.replica)
        return begin + start, begin + start + length


def is_main_replica(record: Sharding, rank: int, coordinates: Mapping[str, int]) -> bool:
    """Tell whether the rank at these coordinates is the first of those that hold a `State`.

    `record`: that of `rank`, which may differ from it in the data-parallel position.
    """
    data_parallel = ("edp",) if record.expert else ("dp", "cp")
    return record.replica_ranks.index(rank) == 0 and not any(coordinates[axis] for axis in data_parallel)
