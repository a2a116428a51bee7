"""Muon (Jordan et al. 2024): the update of each matrix is its momentum, orthogonalized.

The momentum is stored like any other state, flat on the shards. To orthogonalize a matrix, one rank of the shard group
needs all of it:

1. The ranks of the shard group send their parts of the momentum to that rank.
2. The rank sums the matrix with its tensor-parallel peers, which have the other parts.
3. After orthogonalization, the parts of the update are sent back to the ranks that own them.

Different ranks of a shard group orthogonalize different matrices, so each matrix is computed once per shard group.
`LogicalTensor.matrices` defines the matrices of a parameter: the query, key, value, gate and up of a fused parameter
are separate matrices, and so is each expert's. Ranks that have complete experts need no communication for step 2. With
--muon-split-qkv-per-head, `LogicalTensor.by_head` defines them, and a rank's heads of a tensor travel together. With
--no-muon-split-qkv, tensors with the same `LogicalTensor.fused` are one matrix: the order of its rows does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import ParameterGroup, Slot
from megalite.optim.learning_rate import Rates
from megalite.optim.newton_schulz import orthogonalized, update_scale
from megalite.optim.shard import Segment, Shard, of_slot
from megalite.optim.update_rule import UpdateRule
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.sharding import Box, LogicalTensor, Piece

PRODUCTS: Mapping[str, torch.dtype] = {"medium": torch.bfloat16, "high": torch.float32}
"""Dtype of matrix products by --muon-fp32-matmul-prec. For float64 weights it is always float64."""


@dataclass(frozen=True)
class Elements:
    """Elements of a matrix in one parameter that this rank updates: views of any shape, possibly empty."""

    group: ParameterGroup
    master: Tensor
    gradients: Tensor
    momentum: Tensor

    def next_update(self, factor: float, momentum: float, *, nesterov: bool) -> Tensor:
        """Update the momentum with the gradients times a factor; return the flat values to orthogonalize."""
        wide = torch.promote_types(self.master.dtype, torch.float32)
        gradients, average = self.gradients.to(wide), self.momentum.to(wide)
        if factor != 1.0:
            gradients.mul_(factor)
        self.momentum.copy_(average.lerp_(gradients, 1 - momentum))  # no copy if the momentum itself is wide
        return (gradients.lerp(average, momentum) if nesterov else average).flatten()

    def apply(self, update: Tensor, rates: Rates) -> None:
        """Apply a flat update to the masters, computed in the dtype of the update."""
        rate, decay = rates.of(self.group)
        update = update.view(self.master.shape)
        weights = self.master.to(update.dtype).mul_(1 - rate * decay).add_(update, alpha=-rate)
        self.master.copy_(weights)


@dataclass(frozen=True)
class MatrixPart:
    """Part of a matrix in a piece of the tensor, and the number of its elements that each rank updates."""

    slab: int
    """Number of the matrix' slab in which it lies."""
    box: Box
    counted: bool
    """True if this rank contributes the part to the sum that forms the matrix.

    Of the ranks that have the same part, only the first one contributes it.
    """
    sizes: tuple[int, ...]
    """Number of elements that each rank of the shard group updates. Under ZeRO 0 each rank updates all of them."""
    own: tuple[Elements, ...]


@dataclass(frozen=True)
class Slab:
    """Rows of a matrix that are those of a logical tensor, or the matrices of several of its heads."""

    tensor: LogicalTensor
    box: Box


@dataclass(frozen=True)
class Matrix:
    """Matrix of a logical tensor, or of several fused ones, with its distribution over the ranks of a shard group."""

    slabs: tuple[Slab, ...]
    """Rows of each tensor; those of several are one matrix."""
    parts: tuple[MatrixPart, ...]
    """Parts on this rank and its data-parallel peers."""
    shard_group: Group
    sharded: bool
    split_group: Group
    """Ranks that have the other parts of the matrix, for example the tensor-parallel peers."""

    @property
    def own(self) -> list[Elements]:
        return [elements for part in self.parts for elements in part.own]

    @property
    def cost(self) -> int:
        """Number to which the products of a Newton-Schulz step are proportional."""
        sizes = [slab.tensor.matrix_size for slab in self.slabs]
        rows, columns = sum(math.prod(size) for size in sizes) // sizes[0][1], sizes[0][1]
        return self.numel * min(min(sizes[0]) if len(sizes) == 1 else rows, columns)

    @property
    def numel(self) -> int:
        return sum(slab.box.numel for slab in self.slabs)

    def sizes(self, rank: int) -> list[int]:
        """Return the number of elements of each part that a rank of the shard group updates."""
        return [part.sizes[rank] for part in self.parts]


class Muon(UpdateRule):
    """Update rule of all matrices on this rank's shards."""

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> None:
        self._config, self._device = config, mesh.device
        self._segments = [segment for shard in shards for segment in shard.segments if segment.group.matrices]
        self._rounds = list(_rounds(_matrices(shards, mesh, config)))

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for matrices in self._rounds:
            self._update(matrices, rates, factor)
        for segment in self._segments:
            segment.round_parameters()

    def collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the collectives of each round.

        They gather the parts on the ranks that orthogonalize, sum over the tensor-parallel split of each matrix, and
        send the updates back.
        """
        for matrices in self._rounds:
            group = matrices[0].shard_group
            if matrices[0].sharded:
                yield "exchange of matrices' parts", group.ranks
            if group.rank < len(matrices):
                yield "sum of a matrix' parts", matrices[group.rank].split_group.ranks
            yield "exchange of matrices' updates", group.ranks

    def _update(self, matrices: Sequence[Matrix], rates: Rates, factor: float) -> None:
        """Update the matrices of one round; rank i of the shard group orthogonalizes matrix i.

        Messages are flat, with the parts of a matrix one after the other.
        """
        group, rank, count = matrices[0].shard_group, matrices[0].shard_group.rank, len(matrices)
        own = matrices[rank] if rank < count else None
        momentum, nesterov = self._config.muon_momentum, self._config.muon_nesterov
        updates = [
            torch.cat(
                [elements.next_update(factor, momentum, nesterov=nesterov).to(self._device) for elements in matrix.own]
            )
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
                elements.apply(values.to(elements.master.device), rates)

    def _orthogonalize(self, own: Matrix, updates: Sequence[Tensor]) -> list[Tensor]:
        """Orthogonalize a matrix.

        Args:
            own: the matrix that this rank orthogonalizes.
            updates: the flat values from each rank of the shard group; under ZeRO 0 only those of this rank.

        Returns:
            The flat update for each rank of the shard group.
        """
        config, parts, slabs = self._config, own.parts, own.slabs
        flat = updates[0].new_zeros(own.numel)
        values_of = flat.split([slab.box.numel for slab in slabs])
        wholes = [values.view(slab.box.size) for values, slab in zip(values_of, slabs, strict=True)]
        chunks = [update.split(own.sizes(peer)) for peer, update in enumerate(updates)]
        for part, values in zip(parts, zip(*chunks, strict=True), strict=True):
            if part.counted:
                place = part.box.relative_to(slabs[part.slab].box).slices()
                wholes[part.slab][place] = torch.cat(values).view(part.box.size)
        collectives.all_reduce_(flat, own.split_group)  # exact: each element is nonzero on at most one rank
        matrices = [slab.tensor.as_matrices(whole) for slab, whole in zip(slabs, wholes, strict=True)]
        joined = matrices[0] if len(slabs) == 1 else torch.cat([each.flatten(0, 1) for each in matrices]).unsqueeze(0)
        dtype = torch.float64 if flat.dtype == torch.float64 else PRODUCTS[config.muon_fp32_matmul_prec]
        scale = config.muon_extra_scale_factor * update_scale(config.muon_scale_mode, *joined.shape[1:])
        each = joined[0] if len(joined) == 1 else joined
        each.copy_(orthogonalized(each, config.muon_coefficient_type, config.muon_num_ns_steps, dtype)).mul_(scale)
        if len(slabs) > 1:
            rows = each.split([len(of_slab.flatten(0, 1)) for of_slab in matrices])
            matrices = [of_rows.view(of_slab.shape) for of_rows, of_slab in zip(rows, matrices, strict=True)]
        wholes = [slab.tensor.from_matrices(each, slab.box.size) for slab, each in zip(slabs, matrices, strict=True)]
        cut = [wholes[part.slab][part.box.relative_to(slabs[part.slab].box).slices()].flatten() for part in parts]
        if not own.sharded:
            return [torch.cat(cut)] * own.shard_group.size
        dealt = [values.split(part.sizes) for part, values in zip(parts, cut, strict=True)]
        return [torch.cat(to_peer) for to_peer in zip(*dealt, strict=True)]


_Held = list[tuple[Shard, Slot, Piece]]
"""Places of a tensor on this rank."""


def _matrices(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[Matrix]:
    """Return all matrices that have a part on this rank, the most expensive first.

    The order is the same on all ranks that share some of the matrices.
    """
    places: dict[str, _Held] = {}
    for shard in shards:
        for slot in shard.bucket.slots:
            for piece in slot.parameter.sharding.pieces:
                if piece.tensor.matrices is not None:
                    places.setdefault(piece.tensor.name, []).append((shard, slot, piece))
    found, fused = list[Matrix](), dict[str, list[Matrix]]()
    for _, held in sorted(places.items()):
        tensor = held[0][2].tensor
        if config.muon_split_qkv_per_head and (per_head := tensor.by_head()) is not tensor:
            found += _of_tensor(per_head, held, mesh, together=True)
        elif tensor.fused and not config.muon_split_qkv:
            fused.setdefault(tensor.fused, []).extend(_of_tensor(tensor, held, mesh, together=True))
        else:
            found += _of_tensor(tensor, held, mesh, together=False)
    found += map(_joined, fused.values())
    return sorted(found, key=lambda matrix: matrix.cost, reverse=True)


def _of_tensor(tensor: LogicalTensor, held: _Held, mesh: ParallelMesh, *, together: bool) -> list[Matrix]:
    """Return the matrices of a tensor. `together`: those that a piece overlaps travel as one."""
    (shard, _, piece), bucket = held[0], held[0][0].bucket
    numbered = tensor.matrix_dimensions
    split_group = mesh.group(*(axis for dimension, axis in piece.splits if dimension not in numbered))
    parts: dict[Box, list[MatrixPart]] = {}
    for shard, slot, piece in held:
        whole = [(tensor.whole_matrices(piece.box), piece.box)] if together else tensor.matrices_in(piece.box)
        for box, part in whole:
            made = _part(shard, slot, piece, part, of_slot(slot, shard.segments), split_group)
            parts.setdefault(box, []).append(made)
    options = bucket.shard_group, bucket.zero_stage > 0, split_group
    return [Matrix((Slab(tensor, box),), tuple(members), *options) for box, members in parts.items()]


def _joined(matrices: Sequence[Matrix]) -> Matrix:
    """Return the matrix whose rows are those of several, which are on the same ranks."""
    parts = [replace(part, slab=number) for number, matrix in enumerate(matrices) for part in matrix.parts]
    return replace(matrices[0], slabs=tuple(slab for each in matrices for slab in each.slabs), parts=tuple(parts))


def _part(
    shard: Shard, slot: Slot, piece: Piece, box: Box, segments: Sequence[Segment], split_group: Group
) -> MatrixPart:
    """Return the part `box` of a matrix; `segments` are those of this rank with elements of the parameter, in order."""
    record, ranks = slot.parameter.sharding, shard.bucket.shard_group
    start, length = slot.start + piece.row * math.prod(slot.parameter.shape[1:]), shard.stop - shard.start
    runs = [(start + first, start + last) for first, last in piece.box.runs_of(box)]
    sizes = [0 if shard.bucket.zero_stage > 0 else box.numel] * ranks.size
    if shard.bucket.zero_stage > 0:
        for first, last in runs:
            for rank in range(first // length, -(-last // length)):
                sizes[rank] += min(last, (rank + 1) * length) - max(first, rank * length)
    first_holder = min(rank for rank in record.replica_ranks if rank in split_group.ranks)
    counted = split_group.ranks[split_group.rank] == first_holder
    group = ParameterGroup.of(slot.parameter)
    own = tuple(elements for segment in segments for elements in _elements(runs, segment, group))
    nothing = Elements(group, *[shard.parameters[:0]] * 3)
    return MatrixPart(0, box, counted, tuple(sizes), own or (nothing,))


def _elements(runs: Iterable[tuple[int, int]], segment: Segment, group: ParameterGroup) -> Iterator[Elements]:
    """Yield views of runs of the bucket's elements that are in a segment of the shard.

    Consecutive runs of equal length and equal distance are combined into one strided view.
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
    """Yield rounds of matrices of similar size, with at most one matrix per rank of the shard group.

    All matrices of a round have the same shard group and the same split group: ranks of other groups may have a
    different number of matrices.
    """
    by_peers: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Matrix]] = {}
    for matrix in matrices:
        by_peers.setdefault((matrix.shard_group.ranks, matrix.split_group.ranks), []).append(matrix)
    for (ranks, _), members in by_peers.items():
        for first in range(0, len(members), len(ranks)):
            yield members[first : first + len(ranks)]
