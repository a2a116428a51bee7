"""Muon (Jordan et al. 2024): the momentum of each matrix, made orthogonal, is its update.

The momentum is kept like any other state, flat on the shards. A matrix is orthogonalized whole: the ranks of a shard
group send their parts of its update to one of them, its tensor-parallel peers add theirs, and what comes out goes back
the same ways. The matrices are dealt over the shard group, so that each is computed once in it. What a matrix is, the
record says (`LogicalTensor.matrices`): of a fused parameter each of the query, key, value, gate and up by itself, of a
layer's experts each one's; ranks that are dealt whole experts have nothing to tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import ParameterGroup, Slot
from megalite.optim.learning_rate import Rates
from megalite.optim.newton_schulz import orthogonalized, update_scale
from megalite.optim.shard import Segment, Shard
from megalite.optim.update_rule import UpdateRule
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.sharding import Box, LogicalTensor, Piece

PRODUCTS: Mapping[str, torch.dtype] = {"medium": torch.bfloat16, "high": torch.float32}
"""The precision of --muon-fp32-matmul-prec; what float64 weights need is always computed in float64."""


@dataclass(frozen=True)
class Elements:
    """Part of a matrix in one parameter that this rank updates, perhaps nothing: views of any shape."""

    group: ParameterGroup
    master: Tensor
    gradients: Tensor
    momentum: Tensor

    def next_update(self, factor: float, momentum: float, *, nesterov: bool) -> Tensor:
        """Take the gradients times a factor into the momentum; what is to be made orthogonal of it, flat."""
        wide = torch.promote_types(self.master.dtype, torch.float32)
        gradients, average = self.gradients.to(wide), self.momentum.to(wide)
        if factor != 1.0:
            gradients.mul_(factor)
        self.momentum.copy_(average.lerp_(gradients, 1 - momentum))  # nothing to copy where it is wide itself
        return (gradients.lerp(average, momentum) if nesterov else average).flatten()

    def apply(self, update: Tensor, rates: Rates) -> None:
        """`update` is flat, and in the precision to compute in."""
        rate, decay = rates.of(self.group)
        update = update.view(self.master.shape)
        weights = self.master.to(update.dtype).mul_(1 - rate * decay).add_(update, alpha=-rate)
        self.master.copy_(weights)


@dataclass(frozen=True)
class MatrixPart:
    """Part of one matrix that a piece of the tensor has, and how much of it each rank of the shard group updates."""

    box: Box
    counted: bool
    """True if the part enters the matrix from this rank: from the first that holds it."""
    sizes: tuple[int, ...]
    """Number of elements by rank of the shard group, in order. Under ZeRO 0 every rank has all of them."""
    own: tuple[Elements, ...]


@dataclass(frozen=True)
class Matrix:
    """A matrix of a logical tensor, as it lies on the ranks of a shard group."""

    tensor: LogicalTensor
    box: Box
    parts: tuple[MatrixPart, ...]
    """Parts on this rank and its data-parallel peers."""
    shard_group: Group
    sharded: bool
    split_group: Group
    """The ranks that hold the other parts."""

    @property
    def own(self) -> list[Elements]:
        return [elements for part in self.parts for elements in part.own]

    def sizes(self, rank: int) -> list[int]:
        """Elements of each part that a rank of the shard group updates."""
        return [part.sizes[rank] for part in self.parts]


class Muon(UpdateRule):
    """The rule of all matrices on a rank's shards."""

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> None:
        self._config = config
        self._segments = [segment for shard in shards for segment in shard.segments if segment.group.matrices]
        self._rounds = list(_rounds(_matrices(shards, mesh)))

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for matrices in self._rounds:
            self._update(matrices, rates, factor)
        for segment in self._segments:
            segment.round_parameters()

    def collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield each round's collectives: parts to ranks that orthogonalize, over their matrices' split, and back."""
        for matrices in self._rounds:
            group = matrices[0].shard_group
            if matrices[0].sharded:
                yield "exchange of matrices' parts", group.ranks
            if group.rank < len(matrices):
                yield "sum of a matrix' parts", matrices[group.rank].split_group.ranks
            yield "exchange of matrices' updates", group.ranks

    def _update(self, matrices: Sequence[Matrix], rates: Rates, factor: float) -> None:
        """Rank i of the shard group orthogonalizes matrix i. What a rank sends or gets is flat, part by part."""
        group, rank, count = matrices[0].shard_group, matrices[0].shard_group.rank, len(matrices)
        own = matrices[rank] if rank < count else None
        momentum, nesterov = self._config.muon_momentum, self._config.muon_nesterov
        updates = [
            torch.cat([elements.next_update(factor, momentum, nesterov=nesterov) for elements in matrix.own])
            for matrix in matrices
        ]
        nothing = [updates[0].new_empty(0)] * group.size
        if matrices[0].sharded:
            sizes = [sum(own.sizes(peer)) if own else 0 for peer in range(group.size)]
            updates = collectives.all_to_all([*updates, *nothing[count:]], sizes, group)
        else:
            updates = updates[rank : rank + 1]
        results = self._orthogonalize(own, updates) if own else nothing
        sizes = [sum(matrix.sizes(rank)) for matrix in matrices] + [0] * (group.size - count)
        for matrix, update in zip(matrices, collectives.all_to_all(results, sizes, group), strict=False):
            lengths = [elements.master.numel() for elements in matrix.own]
            for elements, values in zip(matrix.own, update.split(lengths), strict=True):
                elements.apply(values, rates)

    def _orthogonalize(self, own: Matrix, updates: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize a matrix, given the updates that the ranks of the shard group own; return the update for each
        rank."""
        config, tensor, parts = self._config, own.tensor, own.parts
        whole = updates[0].new_zeros(own.box.size)
        chunks = [update.split(own.sizes(peer)) for peer, update in enumerate(updates)]
        for part, values in zip(parts, zip(*chunks, strict=True), strict=True):
            if part.counted:
                whole[part.box.relative_to(own.box).slices()] = torch.cat(values).view(part.box.size)
        collectives.all_reduce_(whole, own.split_group)  # exact: of each element all but one are zero
        matrices = tensor.as_matrices(whole)
        dtype = torch.float64 if whole.dtype == torch.float64 else PRODUCTS[config.muon_fp32_matmul_prec]
        scale = config.muon_extra_scale_factor * update_scale(config.muon_scale_mode, *matrices.shape[1:])
        made = orthogonalized(matrices[0], config.muon_coefficient_type, config.muon_num_ns_steps, dtype)
        matrices[0].copy_(made).mul_(scale)
        whole = tensor.from_matrices(matrices, own.box.size)
        cut = [whole[part.box.relative_to(own.box).slices()].flatten() for part in parts]
        if not own.sharded:
            return [torch.cat(cut)] * own.shard_group.size
        dealt = [values.split(part.sizes) for part, values in zip(parts, cut, strict=True)]
        return [torch.cat(to_peer) for to_peer in zip(*dealt, strict=True)]


def _matrices(shards: Sequence[Shard], mesh: ParallelMesh) -> list[Matrix]:
    """All of which a part is here, largest first: an order that is the same on all ranks that share some of them."""
    places: dict[str, list[tuple[Shard, Slot, Piece]]] = {}
    for shard in shards:
        for slot in shard.bucket.slots:
            for piece in slot.parameter.sharding.pieces:
                if piece.tensor.matrices is not None:
                    places.setdefault(piece.tensor.name, []).append((shard, slot, piece))
    segment_of = {id(slot): segment for shard in shards for segment in shard.segments for slot in segment.slots}
    found = []
    for _, held in sorted(places.items()):
        (shard, _, piece), *_ = held
        tensor, bucket = piece.tensor, shard.bucket
        numbered = tensor.matrix_dimensions
        split_group = mesh.group(*(axis for dimension, axis in piece.splits if dimension not in numbered))
        parts: dict[Box, list[MatrixPart]] = {}
        for shard, slot, piece in held:
            for box, part in tensor.matrices_in(piece.box):
                made = _part(shard, slot, piece, part, segment_of.get(id(slot)), split_group)
                parts.setdefault(box, []).append(made)
        for box, members in parts.items():
            found.append(Matrix(tensor, box, tuple(members), bucket.shard_group, bucket.stage > 0, split_group))
    return sorted(found, key=lambda matrix: matrix.box.numel, reverse=True)


def _part(shard: Shard, slot: Slot, piece: Piece, box: Box, segment: Segment | None, split_group: Group) -> MatrixPart:
    """`segment` is the one of this rank with the parameter in it, if there is one."""
    record, ranks = slot.parameter.sharding, shard.bucket.shard_group
    start, length = slot.start + piece.row * math.prod(slot.parameter.shape[1:]), shard.master.numel()
    runs = [(start + first, start + last) for first, last in piece.box.runs_of(box)]
    sizes = [0 if shard.bucket.stage > 0 else box.numel] * ranks.size
    if shard.bucket.stage > 0:
        for first, last in runs:
            for rank in range(first // length, -(-last // length)):
                sizes[rank] += min(last, (rank + 1) * length) - max(first, rank * length)
    first_holder = min(rank for rank in record.replica_ranks if rank in split_group.ranks)
    counted = split_group.ranks[split_group.rank] == first_holder
    own = tuple(_elements(runs, segment, ParameterGroup.of(slot.parameter))) if segment is not None else ()
    nothing = Elements(ParameterGroup.of(slot.parameter), *[shard.master[:0]] * 3)
    return MatrixPart(box, counted, tuple(sizes), own or (nothing,))


def _elements(runs: Iterable[tuple[int, int]], segment: Segment, group: ParameterGroup) -> Iterator[Elements]:
    """Views of some runs of the bucket's elements in a segment of the shard; neighbours as far apart and as long as
    each other are one view.
    """
    alike: list[list[tuple[int, int]]] = []
    for first, last in runs:
        low, high = max(first, segment.start) - segment.start, min(last, segment.stop) - segment.start
        if low >= high:
            continue
        rows = alike[-1] if alike else []
        as_long = bool(rows) and high - low == rows[0][1] - rows[0][0]
        if as_long and (len(rows) == 1 or low - rows[-1][0] == rows[1][0] - rows[0][0]):
            rows.append((low, high))
        else:
            alike.append([(low, high)])
    for rows in alike:
        (low, high), (_, end) = rows[0], rows[-1]
        step = rows[1][0] - low if len(rows) > 1 else high - low
        flat = (segment.master, segment.gradients, segment.tensors["momentum_buffer"])
        yield Elements(group, *(values[low:end].unfold(0, high - low, step) for values in flat))


def _rounds(matrices: Sequence[Matrix]) -> Iterator[list[Matrix]]:
    """At most one matrix for each rank of the shard group, of about the same size.

    All in a round have the same peers: those of another view of the mesh may have another number of matrices.
    """
    by_peers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Matrix]] = {}
    for matrix in matrices:
        by_peers.setdefault((matrix.shard_group.ranks, matrix.split_group.ranks), []).append(matrix)
    for (ranks, _), members in by_peers.items():
        for first in range(0, len(members), len(ranks)):
            yield members[first : first + len(ranks)]
