"""Layout of parameters in flat buckets: a pure function of their sizes and records.

Parameters of one kind (dtype, data-parallel peers, copies, uses, chunks) are laid out consecutively in reverse order of
registration, about the order in which backward reaches them. All members of a shard group or a replica group get the
same layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Sharding

ALIGNMENT = 64
"""Elements to whose multiple a parameter's start is aligned: 256 bytes of fp32, a vector load of any device."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    parameter: Parameter
    start: int
    stop: int


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    weight_decay: bool
    is_embedding_or_output: bool
    matrices: bool
    """True if a matrix-wise optimizer sees them as matrices."""

    NAMES: ClassVar = ("weights", "vectors", "token_tables")

    @staticmethod
    def of(parameter: Parameter) -> ParameterGroup:
        record = parameter.sharding
        return ParameterGroup(record.weight_decay, record.is_embedding_or_output, record.has_matrices)

    @property
    def name(self) -> str:
        """One of NAMES: what its figures are called."""
        return "token_tables" if self.is_embedding_or_output else "weights" if self.weight_decay else "vectors"


@dataclass(frozen=True)
class BucketLayout:
    """The parameters that travel in one message."""

    slots: tuple[Slot, ...]
    length: int
    """Elements, with padding: an equal, aligned slice for each shard."""

    def stretches(self) -> Iterator[tuple[ParameterGroup, tuple[Slot, ...], int, int]]:
        """Yield neighbours of one group, with their first element and one past their last and its padding."""
        by_group = itertools.groupby(self.slots, key=lambda slot: ParameterGroup.of(slot.parameter))
        groups = [(group, tuple(slots)) for group, slots in by_group]
        stops = [*(slots[0].start for _, slots in groups[1:]), self.length]
        for (group, slots), stop in zip(groups, stops, strict=True):
            yield group, slots, slots[0].start, stop

    def runs(self, start: int, stop: int) -> Iterator[tuple[ParameterGroup, slice]]:
        """Runs of elements of one group, padding included, among [start, stop) and counted from `start`."""
        for group, _, begin, end in self.stretches():
            low, high = max(begin, start), min(end, stop)
            if low < high:
                yield group, slice(low - start, high - start)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield what stands in [start, stop) and is no padding: parts of logical tensors, their names and places."""
        for slot in self.slots:
            record = slot.parameter.sharding
            columns = math.prod(record.local_shape[1:])
            for piece in record.pieces:
                first = slot.start + piece.row * columns
                low, high = max(first, start), min(first + piece.rows * columns, stop)
                if low < high:
                    yield piece.tensor.name, low, high


def lay_out(sizes: Sequence[int], bucket_size: int | None) -> list[list[tuple[int, int, int]]]:
    """Deal parameters into buckets: for each bucket, (index, start, stop) inside it, in order.

    A bucket is closed once it holds `bucket_size` elements (None: one bucket). Starts are aligned.
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


def bucket_length(places: Sequence[tuple[int, int, int]], shards: int) -> int:
    """Elements of a bucket with its padding: equal, aligned slices for all shards."""
    return _round_up(places[-1][2], shards * ALIGNMENT)


def bucket_layouts(
    parameters: Sequence[Parameter],
    mesh: ParallelMesh,
    bucket_size: int | None,
    chunks_of: Mapping[int, Sequence[int]],
) -> list[BucketLayout]:
    """The buckets of parameters given in order of registration, in about backward's order.

    `chunks_of`: by a parameter's id, the chunks that hold it.
    """
    kinds: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in reversed(parameters):
        record = parameter.sharding
        ranks = (record.expert, record.replica_ranks, record.grad_is_partial)
        kind = (parameter.dtype, *ranks, record.uses, *chunks_of[id(parameter)])
        kinds.setdefault(kind, []).append(parameter)
    layouts: list[BucketLayout] = []
    for alike in kinds.values():
        shards = len(data_parallel_ranks(mesh, alike[0].sharding))
        for places in lay_out([parameter.numel() for parameter in alike], bucket_size):
            slots = tuple(Slot(alike[index], start, stop) for index, start, stop in places)
            layouts.append(BucketLayout(slots, bucket_length(places, shards)))
    return layouts


def data_parallel_ranks(mesh: ParallelMesh, record: Sharding) -> tuple[int, ...]:
    """The ranks over which a parameter's gradient is summed because they see other samples."""
    return mesh.ranks("edp") if record.expert else mesh.ranks("dp", "cp")


def unique_parameters(module: nn.Module) -> list[Parameter]:
    """Each parameter once, in registration order."""
    return list({id(parameter): parameter for parameter, _ in named_pieces(module)}.values())


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
