"""Layout of parameters in flat buckets: a pure function of their sizes and `Sharding` records.

Parameters of one kind (dtype, optimizer, data-parallel peers, partial group, uses, chunks) are placed consecutively, in
reverse order of registration. This is approximately the order in which backward reaches them. All ranks of a shard
group or of a partial group get the same layout.

The parts of each bucket that a rank stores, owns and saves are a pure function of the mesh and of the same records. Any
rank can therefore compute the parts of any other rank without communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import nn

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Sharding, partition_range

ALIGNMENT = 64
"""Alignment of the start of each parameter, in elements: 256 bytes of fp32, enough for vector loads on any device."""


@dataclass(frozen=True)
class Slot:
    """Position of a parameter in its bucket: elements [start, stop)."""

    parameter: Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterGroup:
    """Group of parameters that the optimizer updates in the same way."""

    weight_decay: bool
    is_embedding_or_output: bool
    matrices: bool
    """True if a matrix-wise optimizer (Muon) updates them as matrices."""

    NAMES: ClassVar = ("weights", "vectors", "token_tables")

    @staticmethod
    def of(parameter: Parameter) -> ParameterGroup:
        tensor = parameter.sharding.pieces[0].tensor
        return ParameterGroup(tensor.weight_decay, tensor.is_embedding_or_output, tensor.matrices is not None)

    @property
    def name(self) -> str:
        """One of NAMES, under which the statistics of the group are reported."""
        return "token_tables" if self.is_embedding_or_output else "weights" if self.weight_decay else "vectors"


@dataclass(frozen=True)
class BucketLayout:
    """Layout of one bucket: the parameters that are communicated in one message."""

    slots: tuple[Slot, ...]
    length: int
    """Number of elements, with padding. All shards have equal, aligned slices."""

    @property
    def frozen(self) -> bool:
        """True if the parameters have no gradients. A bucket has either trained or frozen ones."""
        return not self.slots[0].parameter.requires_grad

    def stretches(self) -> Iterator[tuple[ParameterGroup, tuple[Slot, ...], int, int]]:
        """Yield runs of consecutive slots of one group: the group, the slots, the first element, and the end.

        The end is one past the last element, including the padding after it.
        """
        by_group = itertools.groupby(self.slots, key=lambda slot: ParameterGroup.of(slot.parameter))
        groups = [(group, tuple(slots)) for group, slots in by_group]
        stops = [*(slots[0].start for _, slots in groups[1:]), self.length]
        for (group, slots), stop in zip(groups, stops, strict=True):
            yield group, slots, slots[0].start, stop

    def runs(self, start: int, stop: int) -> Iterator[tuple[ParameterGroup, slice]]:
        """Yield runs of elements of one group within [start, stop), with padding. The slices count from `start`."""
        for group, _, begin, end in self.stretches():
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield group, slice(low - start, high - start)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield the parts of logical tensors within [start, stop): the name, the first element, one past the last.

        Padding is left out.
        """
        for slot in self.slots:
            record = slot.parameter.sharding
            columns = math.prod(record.local_shape[1:])
            for piece in record.pieces:
                first = slot.start + piece.row * columns
                low, high = max(first, start), min(first + piece.rows * columns, stop)
                if low < high:
                    yield piece.tensor.name, low, high


def lay_out(sizes: Sequence[int], bucket_size: int | None) -> list[list[tuple[int, int, int]]]:
    """Assign parameters to buckets, in order. Starts are aligned.

    Args:
        sizes: the number of elements of each parameter.
        bucket_size: the number of elements at which a bucket is closed; None: one bucket.

    Returns:
        For each bucket, (index of the parameter, start, stop) of each parameter in it.
    """
    buckets: list[list[tuple[int, int, int]]] = []
    end = 0
    for index, size in enumerate(sizes):
        if not buckets or (bucket_size is not None and end >= bucket_size):
            buckets.append([])
            end = 0
        start = _round_up(end, ALIGNMENT)
        end = start + size
        buckets[-1].append((index, start, end))
    return buckets


def default_bucket_size(ranks: int) -> int:
    """Return Megatron-LM's size of a bucket in elements, for a number of data-parallel ranks."""
    return max(40_000_000, 1_000_000 * ranks)


def bucket_length(places: Sequence[tuple[int, int, int]], shards: int) -> int:
    """Return the number of elements of a bucket with padding, so that all shards have equal, aligned slices."""
    return _round_up(places[-1][2], shards * ALIGNMENT)


def bucket_layouts(
    parameters: Sequence[Parameter],
    mesh: ParallelMesh,
    bucket_size: int | None,
    chunks_of: Mapping[int, Sequence[int]],
) -> list[BucketLayout]:
    """Return the layouts of the buckets, approximately in the order in which backward completes them.

    Args:
        parameters: in order of registration.
        mesh: the mesh of ranks.
        bucket_size: the number of elements at which a bucket is closed; None: one bucket per kind of parameter.
        chunks_of: maps the id of a parameter to the chunks that contain it.
    """
    kinds: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in reversed(parameters):
        record = parameter.sharding
        ranks = (record.expert, record.replica_ranks, record.grad_is_partial)
        first = record.pieces[0].tensor
        uses = tuple(replace(use, times=1) for use in record.uses)  # each parameter's own number is no reason to part
        held = (parameter.dtype, first.fp32, first.optimizer, parameter.coded is not None)
        kind = (*held, *ranks, uses, *chunks_of[id(parameter)])
        kinds.setdefault(kind, []).append(parameter)
    layouts: list[BucketLayout] = []
    for alike in kinds.values():
        shards = mesh.size(*alike[0].sharding.data_parallel_axes)
        for places in lay_out([parameter.numel() for parameter in alike], bucket_size):
            slots = tuple(Slot(alike[index], start, stop) for index, start, stop in places)
            layouts.append(BucketLayout(slots, bucket_length(places, shards)))
    return layouts


def unique_parameters(module: nn.Module) -> list[Parameter]:
    """Return each parameter of a module once, in order of registration."""
    return list({id(parameter): parameter for parameter, _ in named_pieces(module)}.values())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BucketShardSpec:
    """Slices of a bucket that belong to one rank.

    A range is (first element, one past the last element), counted from the start of the bucket. The data-parallel peers
    are divided, in order, into instances of `shards` ranks each. Without hybrid sharding there is one instance.
    """

    layout: BucketLayout
    zero_stage: int
    """ZeRO stage 0 to 3. It is 0 if there is only one shard (whose parameters are not on the host), or if only
    gradients and state would be sharded of frozen parameters, which have none."""
    shards: int
    shard: int
    """Index of this rank's slice among the equal slices."""
    replicas: int
    """Number of ranks that have the same slice: the replicas of the parameters, times the number of instances."""
    replica: int
    """Index of this rank among them."""

    @staticmethod
    def of(
        layout: BucketLayout,
        rank: int,
        *,
        peers: int,
        position: int,
        zero_stage: int = 0,
        instances: int = 1,
        alone: bool = False,
    ) -> BucketShardSpec:
        """Return the slices of a rank.

        Args:
            layout: the layout of the bucket.
            rank: a rank that stores the parameters of the bucket.
            peers: the number of data-parallel peers of that rank, itself included.
            position: the index of that rank among them.
            zero_stage: 0 to 3.
            instances: the number of instances of hybrid sharding.
            alone: keep the stage with a single shard, too: under ZeRO 3 its parameters are elsewhere between uses.
        """
        copies = layout.slots[0].parameter.sharding.replica_ranks
        shards = peers // instances
        instance, shard = divmod(position, shards)
        replica = copies.index(rank) * instances + instance
        if (shards == 1 and not alone) or (zero_stage < 3 and layout.frozen):
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
