"""Adafactor (arXiv:1804.04235) with the learning rate of the run, update clipping at 1, and no first moment.

Of the squared gradients of a matrix, it keeps the averages of rows and of columns (`factors.py`). A rank adds up the
rows and columns of its own slice. One sum over all ranks that have parts of the matrix completes them. One of the ranks
adds the decayed averages of the last step, so that every rank gets the new ones, and those that keep them store them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.factors import COLUMNS, ROWS, keeps_averages, lengths
from megalite.optim.learning_rate import Rates
from megalite.optim.shard import Segment, Shard
from megalite.optim.tensor_groups import by_group, places
from megalite.optim.update_rule import UpdateRule
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.sharding import LogicalTensor, Piece
from megalite.parallel.state import State

PART = 1 << 22
"""Number of elements whose average of squares is updated at a time, for tensors that are not factored."""
DECAY, LARGEST_UPDATE = 0.8, 1.0
"""Exponent of the decay 1 - step**-DECAY, and the root mean square above which an update is scaled down."""


@dataclass(frozen=True)
class Part:
    """Elements of a piece that this rank updates."""

    piece: Piece
    segment: Segment
    start: int
    """Number of the first one in the piece."""
    counted: slice
    """Range that this rank adds to sums, in which each element is counted once."""

    @cached_property
    def indices(self) -> tuple[list[int], list[int], list[int]]:
        """Numbers of the matrices, rows and columns of the piece."""
        return self.piece.tensor.matrix_indices(self.piece.box)

    def spread(self, values: Tensor) -> Tensor:
        """Return the counted values in the piece, zero elsewhere: [matrices, rows, columns], or [1, 1, elements]."""
        tensor, box = self.piece.tensor, self.piece.box
        whole = values.new_zeros(box.numel)
        whole[self.start : self.start + len(values)][self.counted] = values[self.counted]
        return whole.view(1, 1, -1) if tensor.matrices is None else tensor.as_matrices(whole.view(box.size))

    def cut(self, matrices: Tensor) -> Tensor:
        """Return those of the values [matrices, rows, columns] of the piece that belong to this rank's elements."""
        flat = self.piece.tensor.from_matrices(matrices, self.piece.box.size).flatten()
        return flat[self.start : self.start + len(self.segment.master)]


@dataclass
class Moment:
    """Second moment of a tensor, or of its matrices of which this rank, as all ranks of the group, has parts."""

    tensor: LogicalTensor
    group: Group
    matrices: int
    """Number of these matrices; 1 for a tensor that is not factored."""
    parts: list[Part] = field(default_factory=list)
    kept: tuple[Tensor, Tensor] | None = None
    """State of this rank: averages of rows [matrices, rows] and of columns [matrices, columns]."""
    adds_kept: bool = False
    """True on the one rank that adds it to the sums."""
    factors: tuple[Tensor, Tensor] | None = None
    """Factors of rows and of columns, within a step: their product is 1 over the root of the second moment."""

    @cached_property
    def sizes(self) -> tuple[int, int]:
        """Numbers of rows and columns of a matrix."""
        return lengths(self.tensor)[1:]

    @property
    def elements(self) -> int:
        """Number of elements of each matrix, or of the tensor."""
        return math.prod(self.tensor.shape if self.tensor.matrices is None else self.sizes)

    def averages(self, decay: float, epsilon: float, device: torch.device) -> Tensor:
        """Return this rank's summand of the new averages, rows and columns, flat in float64."""
        totals = [torch.zeros(self.matrices, size, dtype=torch.float64, device=device) for size in self.sizes]
        for part in self.parts:
            squares = part.spread(part.segment.wide_gradients(1.0).square().add_(epsilon))
            _, rows, columns = part.indices
            totals[0][:, rows] += squares.sum(2, dtype=torch.float64).to(device)
            totals[1][:, columns] += squares.sum(1, dtype=torch.float64).to(device)
        for number, total in enumerate(totals):
            total.mul_((1 - decay) / self.sizes[1 - number])
            if self.adds_kept and self.kept is not None:
                total.add_(self.kept[number], alpha=decay)
        return torch.cat([total.flatten() for total in totals])

    def set_averages(self, averages: Tensor) -> None:
        """Store the new averages, and compute the factors."""
        rows, columns = (
            each.view(self.matrices, -1) for each in averages.split([self.matrices * size for size in self.sizes])
        )
        for kept, values in zip(self.kept or (), (rows, columns), strict=False):
            kept.copy_(values)
        self.factors = (rows / rows.mean(1, keepdim=True)).rsqrt(), columns.rsqrt()

    def update(self, part: Part, scale: Tensor | None = None) -> Tensor:
        """Return the update of a part, times a scale per matrix."""
        gradients = part.segment.wide_gradients(1.0)
        if self.factors is None:
            update = gradients / part.segment.tensors["exp_avg_sq"].sqrt()
            return update if scale is None else update.mul_(scale.to(update.device))
        _, rows, columns = part.indices
        by_row, by_column = self.factors
        if scale is not None:
            by_row = by_row * scale.unsqueeze(1)
        by_row, by_column = by_row[:, rows, None].to(gradients), by_column[:, None, columns].to(gradients)
        return part.cut(by_row * by_column).mul(gradients)

    def squares(self, device: torch.device) -> Tensor:
        """Return this rank's summand of the squares of the update: [matrices], in float64."""
        total = torch.zeros(self.matrices, dtype=torch.float64, device=device)
        for part in self.parts:
            total += part.spread(self.update(part).square()).sum((1, 2), dtype=torch.float64).to(device)
        return total


class Adafactor(UpdateRule):
    """Update rule of all tensors on this rank's shards."""

    def __init__(self, shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> None:
        self._config, self._device = config, mesh.device
        self._segments = [segment for shard in shards for segment in shard.segments]
        moments = _moments(shards, mesh)
        self._all = by_group(moments)
        self._factored = by_group(moment for moment in moments if moment.tensor.matrices is not None)

    def update(self, rates: Rates, step: int, factor: float) -> None:
        """Update second moments, then weights, with two sums over each group that shares matrices."""
        for segment in self._segments:
            segment.gradients.mul_(factor)
        self._add_gradients(1 - step**-DECAY)
        for group, moments in self._all:
            squares = torch.cat([moment.squares(self._device) for moment in moments])
            totals = collectives.all_reduce_(squares, group).split([moment.matrices for moment in moments])
            for moment, total in zip(moments, totals, strict=True):
                scale = (total / moment.elements).sqrt_().div_(LARGEST_UPDATE).clamp_(min=1.0).reciprocal_()
                for part in moment.parts:
                    rate, decay = rates.of(part.segment.group)
                    update = moment.update(part, scale)
                    part.segment.master.mul_(1 - rate * decay).sub_(update, alpha=rate)
                moment.factors = None
        for segment in self._segments:
            segment.round_parameters()

    def _add_gradients(self, decay: float) -> None:
        """Update all second moments."""
        epsilon = self._config.adafactor_eps
        vectors = (segment for segment in self._segments if not segment.group.matrices)
        for part in (part for segment in vectors for part in segment.parts(PART)):
            part.tensors["exp_avg_sq"].lerp_(part.wide_gradients(1.0).square().add_(epsilon), 1 - decay)
        for group, moments in self._factored:
            mine = [moment.averages(decay, epsilon, self._device) for moment in moments]
            whole = collectives.all_reduce_(torch.cat(mine), group)
            for moment, averages in zip(moments, whole.split([len(each) for each in mine]), strict=True):
                moment.set_averages(averages)

    def collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for kind, groups in (("averages of squares", self._factored), ("sizes of updates", self._all)):
            for group, _ in groups:
                yield kind, group.ranks


def _moments(shards: Sequence[Shard], mesh: ParallelMesh) -> list[Moment]:
    """Return the moments of the tensors in this rank's shards, in an order that all ranks of a group share."""
    found: dict[str, Moment] = {}
    states = {id(slot): own for shard in shards for slot, own in zip(shard.bucket.slots, shard.own_states, strict=True)}
    for place in places(shards, mesh):
        piece, tensor = place.piece, place.piece.tensor
        matrices = 1 if tensor.matrices is None else len(tensor.matrix_indices(piece.box)[0])
        moment = found.setdefault(tensor.name, Moment(tensor, place.group, matrices))
        if keeps_averages(piece):
            own = states[id(place.slot)]
            moment.kept = _view(own[ROWS], piece), _view(own[COLUMNS], piece)
            moment.adds_kept = place.counted[0] <= place.start < place.counted[1]
        for run in place.runs(place.start, place.start + piece.box.numel):
            moment.parts.append(Part(piece, run.segment, run.segment.start - place.start, run.counted))
    return sorted(found.values(), key=lambda moment: moment.tensor.name)


def _view(state: State, piece: Piece) -> Tensor:
    (own,) = (each for each in state.sharding.pieces if each.tensor.name == piece.tensor.name)
    return own.view(state.values)
