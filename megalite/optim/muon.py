"""Muon (Jordan et al. 2024): the momentum of each matrix, made orthogonal, is its update.

The momentum is kept like any other state, flat on the shards. A matrix is orthogonalized whole: the ranks of a shard
group send their parts of its update to one of them, its tensor-parallel peers add theirs, and what comes out goes back
the same ways. The tensors are dealt over the shard group, so that each is computed once in it. What a matrix is, the
record says (`LogicalTensor.matrices`): of a fused parameter each of the query, key, value, gate and up by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import ParameterGroup, Slot
from megalite.optim.learning_rate import Rates
from megalite.optim.newton_schulz import orthogonalized, update_scale
from megalite.optim.shard import Run, Shard
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.sharding import LogicalTensor, Piece

PRODUCTS: Mapping[str, torch.dtype] = {"medium": torch.bfloat16, "high": torch.float32}
"""The precision of --muon-fp32-matmul-prec; what float64 weights need is always computed in float64."""


@dataclass(frozen=True)
class Part:
    """A piece of a logical tensor, and who among the ranks of the shard group updates what of it."""

    piece: Piece
    counted: bool
    """Whether the piece enters the whole tensor from this rank: from the first that holds it."""
    held: tuple[slice, ...]
    """By rank of the shard group: elements of the piece, flattened. Under ZeRO 0 everything is everyone's."""
    group: ParameterGroup
    master: Tensor
    gradients: Tensor
    momentum: Tensor
    """Flat views of what this rank updates, perhaps nothing."""

    def next_update(self, factor: float, momentum: float, *, nesterov: bool) -> Tensor:
        """Take the gradients times a factor into the momentum; what is to be made orthogonal of it."""
        wide = torch.promote_types(self.master.dtype, torch.float32)
        gradients, average = self.gradients.to(wide), self.momentum.to(wide)
        if factor != 1.0:
            gradients.mul_(factor)
        self.momentum.copy_(average.lerp_(gradients, 1 - momentum))  # nothing to copy where it is wide itself
        return gradients.lerp(average, momentum) if nesterov else average

    def apply(self, update: Tensor, rates: Rates) -> None:
        """`update` is in the precision to compute in."""
        rate, decay = rates.of(self.group)
        weights = self.master.to(update.dtype).mul_(1 - rate * decay).add_(update, alpha=-rate)
        self.master.copy_(weights)


@dataclass(frozen=True)
class SplitTensor:
    """A logical tensor with a matrix view, as it lies on the ranks of a shard group."""

    tensor: LogicalTensor
    parts: tuple[Part, ...]
    """Those on this rank and its data-parallel peers."""
    shard_group: Group
    sharded: bool
    split_group: Group
    """The ranks that hold the other pieces."""

    def sizes(self, rank: int) -> list[int]:
        """Elements of each part that a rank of the shard group updates."""
        return [part.held[rank].stop - part.held[rank].start for part in self.parts]


class Muon:
    """The rule of all matrices on a rank's shards."""

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> None:
        self._config = config
        self._runs = [run for shard in shards for run in shard.runs if run.group.matrices]
        self._rounds = list(_rounds(_split_tensors(shards, mesh)))

    def update(self, rates: Rates, step: int, factor: float) -> None:
        for tensors in self._rounds:
            self._update(tensors, rates, factor)
        for run in self._runs:
            run.round_parameters()

    def collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Of each round: the parts to the ranks that orthogonalize, over the split of their tensors, and back."""
        for tensors in self._rounds:
            group = tensors[0].shard_group
            if tensors[0].sharded:
                yield "exchange of matrices' parts", group.ranks
            if group.rank < len(tensors):
                yield "sum of a matrix' parts", tensors[group.rank].split_group.ranks
            yield "exchange of matrices' updates", group.ranks

    def _update(self, tensors: Sequence[SplitTensor], rates: Rates, factor: float) -> None:
        """Rank i of the shard group orthogonalizes tensor i. What a rank sends or gets is flat, part by part."""
        group, rank, count = tensors[0].shard_group, tensors[0].shard_group.rank, len(tensors)
        own = tensors[rank] if rank < count else None
        momentum, nesterov = self._config.muon_momentum, self._config.muon_nesterov
        updates = [
            torch.cat([part.next_update(factor, momentum, nesterov=nesterov) for part in tensor.parts])
            for tensor in tensors
        ]
        nothing = [updates[0].new_empty(0)] * group.size
        if tensors[0].sharded:
            sizes = [sum(own.sizes(peer)) if own else 0 for peer in range(group.size)]
            updates = collectives.all_to_all([*updates, *nothing[count:]], sizes, group)
        else:
            updates = updates[rank : rank + 1]
        results = self._orthogonalize(own, updates) if own else nothing
        sizes = [sum(tensor.sizes(rank)) for tensor in tensors] + [0] * (group.size - count)
        for tensor, update in zip(tensors, collectives.all_to_all(results, sizes, group), strict=False):
            for part, values in zip(tensor.parts, update.split(tensor.sizes(rank)), strict=True):
                part.apply(values, rates)

    def _orthogonalize(self, split: SplitTensor, updates: Sequence[Tensor]) -> list[Tensor]:
        """From what each rank of the shard group holds of a tensor's update to what each is to apply."""
        config, tensor = self._config, split.tensor
        whole = updates[0].new_zeros(tensor.shape)
        chunks = [update.split(split.sizes(peer)) for peer, update in enumerate(updates)]
        for part, runs in zip(split.parts, zip(*chunks, strict=True), strict=True):
            if part.counted:
                whole[part.piece.box.slices()] = torch.cat(runs).view(part.piece.box.size)
        collectives.all_reduce_(whole, split.split_group)  # exact: of each element all but one are zero
        matrices = tensor.as_matrices(whole)
        dtype = torch.float64 if whole.dtype == torch.float64 else PRODUCTS[config.muon_fp32_matmul_prec]
        scale = config.muon_extra_scale_factor * update_scale(config.muon_scale_mode, *matrices.shape[1:])
        for matrix in matrices:
            values = orthogonalized(matrix, config.muon_coefficient_type, config.muon_num_ns_steps, dtype)
            matrix.copy_(values).mul_(scale)
        whole = tensor.from_matrices(matrices)
        cut = [whole[part.piece.box.slices()].flatten() for part in split.parts]
        return [
            torch.cat([values[part.held[peer]] for part, values in zip(split.parts, cut, strict=True)])
            for peer in range(split.shard_group.size)
        ]


def _split_tensors(shards: Sequence[Shard], mesh: ParallelMesh) -> list[SplitTensor]:
    """All that have a matrix view, largest first: an order that is the same on all ranks that share some of them."""
    places: dict[str, list[tuple[Shard, Slot, Piece]]] = {}
    for shard in shards:
        for slot in shard.bucket.slots:
            for piece in slot.parameter.sharding.pieces:
                if piece.tensor.matrices is not None:
                    places.setdefault(piece.tensor.name, []).append((shard, slot, piece))
    run_of = {id(slot): run for shard in shards for run in shard.runs for slot in run.slots}
    found = []
    for _, held in sorted(places.items()):
        (shard, _, piece), *_ = held
        split_group = mesh.group(*(axis for _, axis in piece.splits))
        parts = tuple(_part(*place, run_of.get(id(place[1])), split_group) for place in held)
        found.append(SplitTensor(piece.tensor, parts, shard.bucket.shard_group, shard.bucket.stage > 0, split_group))
    return sorted(found, key=lambda split: math.prod(split.tensor.shape), reverse=True)


def _part(shard: Shard, slot: Slot, piece: Piece, run: Run | None, split_group: Group) -> Part:
    """`run` is the one of this rank with the parameter in it, if there is one."""
    record, ranks = slot.parameter.sharding, shard.bucket.shard_group
    start, size = slot.start + piece.row * math.prod(slot.parameter.shape[1:]), piece.box.numel
    length = shard.master.numel()

    def held_by(rank: int) -> slice:
        first = (rank * length if shard.bucket.stage > 0 else 0) - start
        return slice(min(max(first, 0), size), min(max(first + length, 0), size))

    held = tuple(held_by(rank) for rank in range(ranks.size))
    views = [shard.master[:0]] * 3
    if run is not None:
        here = slice(*(start + edge - run.start for edge in (held[ranks.rank].start, held[ranks.rank].stop)))
        views = [values[here] for values in (run.master, run.gradients, run.tensors["momentum_buffer"])]
    first_holder = min(rank for rank in record.copies if rank in split_group.ranks)
    counted = split_group.ranks[split_group.rank] == first_holder
    return Part(piece, counted, held, ParameterGroup.of(slot.parameter), *views)


def _rounds(tensors: Sequence[SplitTensor]) -> Iterator[list[SplitTensor]]:
    """At most one tensor for each rank of the shard group, of about the same size."""
    by_group: dict[tuple[int, ...], list[SplitTensor]] = {}
    for tensor in tensors:
        by_group.setdefault(tensor.shard_group.ranks, []).append(tensor)
    for ranks, members in by_group.items():
        for first in range(0, len(members), len(ranks)):
            yield members[first : first + len(ranks)]
