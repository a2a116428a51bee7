"""Tensors that a rule treats as a whole, whatever the layout, and the sums over their elements on all ranks.

`LogicalTensor.matrices` defines them: the query, key, value, gate and up of a fused parameter are separate, and so is
each expert's matrix. A tensor without matrices is one whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megalite.optim.layout import Slot
from megalite.optim.shard import Segment, Shard, of_slot
from megalite.optim.statistics import sums_over_ranks
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.placement import DENSE, EXPERT
from megalite.parallel.sharding import Box, LogicalTensor, Piece
from megalite_kernels.exact_sum import BLOCK, sums_of_squares

AT_ONCE = 256
"""Number of sums in one message, of 34 KB each."""


@dataclass(frozen=True)
class Place:
    """Place of a piece of a parameter in a shard. Ranges are of elements of the bucket."""

    slot: Slot
    piece: Piece
    segments: Sequence[Segment]
    """Segments that have elements of the parameter, in order; none if this rank updates none of them."""
    start: int
    """First element of the piece."""
    counted: tuple[int, int]
    """Range that this rank adds to sums over `group`, in which each element is counted once."""
    group: Group
    """Ranks that together have the matrices, or the tensor, of which the piece has a part."""

    def runs(self, first: int, last: int) -> Iterator[Run]:
        """Yield those of the elements [first, last) that this rank updates, if there are any."""
        for segment in self.segments:
            low, high = max(first, segment.start), min(last, segment.stop)
            if low < high:
                begin, end = (min(max(bound, low), high) - low for bound in self.counted)
                yield Run(segment.part(low - segment.start, high - segment.start), slice(begin, end))


def places(shards: Iterable[Shard], mesh: ParallelMesh) -> Iterator[Place]:
    """Yield the place of each piece on this rank, also of those of which another rank updates all elements."""
    for shard in shards:
        spec = shard.bucket.shard_spec
        for slot in shard.bucket.slots:
            record = slot.parameter.sharding
            instances = spec.replicas // len(record.replica_ranks)
            for piece in record.pieces:
                numbered = piece.tensor.matrix_dimensions if piece.tensor.matrices is not None else ()
                apart = {axis for dimension, axis in piece.splits if dimension in numbered}
                split = (axis for axis in (EXPERT if record.expert else DENSE) if axis not in apart)
                group = mesh.group(*record.data_parallel_axes, *split)
                first = min(rank for rank in record.replica_ranks if rank in group.ranks)
                counts = mesh.rank == first and spec.replica % instances == 0
                start = slot.start + piece.row * math.prod(record.local_shape[1:])
                counted = shard.bucket.owned_range if counts else (0, 0)
                yield Place(slot, piece, of_slot(slot, shard.segments), start, counted, group)


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a whole that this rank updates, as a segment of their own."""

    segment: Segment
    counted: slice
    """Range that this rank adds to sums, in which each element of the whole is counted once."""

    def sums_of_squares(self, values: Tensor) -> Iterator[Tensor]:
        """Yield sums over the counted elements, in blocks which no shard divides."""
        values = values[self.counted]
        head = -(self.segment.start + self.counted.start) % BLOCK
        for part in (values[:head], values[head:]):
            if len(part):
                yield sums_of_squares(part)


@dataclass(frozen=True)
class TensorGroup:
    """Matrix or other tensor that a rule treats as a whole: its elements, with this rank's part of them."""

    tensor: LogicalTensor
    box: Box
    group: Group
    """Ranks that have parts of it."""
    runs: list[Run] = field(default_factory=list)


def tensor_groups(shards: Iterable[Shard], mesh: ParallelMesh) -> list[TensorGroup]:
    """Return the matrices and other tensors with weight decay of which this rank has a part.

    The order of those of the same ranks is the same on all of these, also on those that update no element.
    """
    found: dict[tuple[str, Box], TensorGroup] = {}
    for place in places(shards, mesh):
        tensor, box = place.piece.tensor, place.piece.box
        if not tensor.weight_decay:
            continue
        matrices = tensor.matrices_in(box) if tensor.matrices is not None else [(Box.whole(tensor.shape), box)]
        for whole, part in matrices:
            runs = found.setdefault((tensor.name, whole), TensorGroup(tensor, whole, place.group)).runs
            for first, last in box.runs_of(part):
                runs.extend(place.runs(place.start + first, place.start + last))
    return sorted(found.values(), key=lambda whole: (whole.tensor.name, whole.box.offset))


class Grouped(Protocol):
    """Something that is summed over a group."""

    @property
    def group(self) -> Group: ...


Item = TypeVar("Item", bound=Grouped)


def by_group(items: Iterable[Item]) -> list[tuple[Group, list[Item]]]:
    """Return the items of each group, the largest group first, so that no two ranks wait for each other."""
    found: dict[tuple[int, ...], tuple[Group, list[Item]]] = {}
    for item in items:
        found.setdefault(item.group.ranks, (item.group, []))[1].append(item)
    return sorted(found.values(), key=lambda each: (-each[0].size, each[0].ranks))


def messages(tensors: Iterable[TensorGroup]) -> Iterator[tuple[Group, list[TensorGroup]]]:
    """Yield the tensors of each message of `norms`, with the ranks over which it is summed."""
    for group, members in by_group(tensors):
        for start in range(0, len(members), AT_ONCE):
            yield group, members[start : start + AT_ONCE]


def norms(tensors: Iterable[TensorGroup], values: Callable[[Segment], Tensor], mesh: ParallelMesh) -> list[float]:
    """Return the L2 norms of values of each tensor, in the order of `messages`.

    Every rank gets the same bits, in whatever buckets and shards the elements are.

    Args:
        tensors: those of this rank.
        values: returns the values of a segment's elements.
        mesh: the mesh of ranks.
    """
    none = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    found: list[float] = []
    for group, members in messages(tensors):
        sums = [[sum for run in whole.runs for sum in run.sums_of_squares(values(run.segment))] for whole in members]
        of_rank = [torch.cat([none, *(part.to(none.device) for part in each)]) for each in sums]
        found.extend(math.sqrt(total) for total in sums_over_ranks(of_rank, group))
    return found
