"""Parts of each bucket that a rank stores, owns and saves.

They are a pure function of the mesh and of the parameters' `Sharding` records. Any rank can therefore compute the parts
of any other rank without communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megalite.optim.layout import BucketLayout
from megalite.parallel.sharding import Sharding, partition_range


@dataclass(frozen=True)
class BucketShardSpec:
    """Slices of a bucket that belong to one rank.

    A range is (first element, one past the last element), counted from the start of the bucket. The data-parallel peers
    are divided, in order, into instances of `shards` ranks each. Without hybrid sharding there is one instance.
    """

    layout: BucketLayout
    zero_stage: int
    """ZeRO stage 0 to 3. It is 0 if there is only one shard, or if only gradients and state would be sharded of frozen
    parameters, which have none."""
    shards: int
    shard: int
    """Index of this rank's slice among the equal slices."""
    replicas: int
    """Number of ranks that have the same slice: the replicas of the parameters, times the number of instances."""
    replica: int
    """Index of this rank among them."""

    @staticmethod
    def of(
        layout: BucketLayout, rank: int, *, peers: int, position: int, zero_stage: int = 0, instances: int = 1
    ) -> BucketShardSpec:
        """Return the slices of a rank.

        Args:
            layout: the layout of the bucket.
            rank: a rank that stores the parameters of the bucket.
            peers: the number of data-parallel peers of that rank, itself included.
            position: the index of that rank among them.
            zero_stage: 0 to 3.
            instances: the number of instances of hybrid sharding.
        """
        copies = layout.slots[0].parameter.sharding.replica_ranks
        shards = peers // instances
        instance, shard = divmod(position, shards)
        replica = copies.index(rank) * instances + instance
        if shards == 1 or (zero_stage < 3 and layout.frozen):
            zero_stage = 0
        return BucketShardSpec(layout, zero_stage, shards, shard, len(copies) * instances, replica)

    @property
    def counted_here(self) -> bool:
        """True on exactly one of the replicas, for sums that must count each element once."""
        return self.replica == 0

    @property
    def owned(self) -> tuple[int, int]:
        """Range of this rank's slice. The slices of different shards do not overlap."""
        length = self.layout.length // self.shards
        return self.shard * length, (self.shard + 1) * length

    @property
    def updated(self) -> tuple[int, int]:
        """Range that this rank updates: its slice, or the full bucket under ZeRO 0."""
        return self.owned if self.zero_stage else (0, self.layout.length)

    @property
    def saved(self) -> tuple[int, int]:
        """Range that this rank saves: its part of the slice, which is divided evenly among the replicas."""
        begin, end = self.owned
        start, length = partition_range(end - begin, self.replicas, self.replica)
        return begin + start, begin + start + length


def is_main_replica(record: Sharding, rank: int, coordinates: Mapping[str, int]) -> bool:
    """Return True if the rank at these coordinates is the first of the ranks that have the same `State`.

    Args:
        record: the `Sharding` of the state on `rank`.
        rank: a rank that may differ from the coordinates in its data-parallel position.
        coordinates: the coordinates of the rank, by the name of the axis.
    """
    own_samples = any(coordinates[axis] for axis in record.data_parallel_axes)
    return record.replica_ranks.index(rank) == 0 and not own_samples
