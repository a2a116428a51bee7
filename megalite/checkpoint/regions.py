"""What a rank holds of the global tensors of a checkpoint, and which of it the rank writes.

All of it follows from the parameters' `Sharding`: no rank needs to ask another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.optim.optimizer import Optimizer
from megalite.optim.shard import StateSlice
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Box, share

MODEL, OPTIMIZER = "model/", "optimizer/"
MASTER = OPTIMIZER + "master/"


@dataclass(frozen=True)
class Region:
    """A box of a global tensor, and the memory that stands for it on this rank."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's."""
    box: Box
    values: Tensor
    """A view, of the box's shape."""


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a local parameter, flattened."""

    parameter: Parameter
    start: int
    stop: int


def held_regions(module: nn.Module, optimizer: Optimizer | None) -> list[Region]:
    """All that a rank must be given: its parameters whole, or what its optimizer updates of weights and state."""
    if optimizer is not None:
        return _regions_of_slices(optimizer.slices())
    return [
        region for p in _parameters(module) for region in _regions(MODEL, Run(p, 0, p.numel()), p.detach().flatten())
    ]


def owned_regions(module: nn.Module, optimizer: Optimizer | None, mesh: ParallelMesh) -> list[Region]:
    """What this rank writes: over all ranks, each element of each global tensor once.

    Without an optimizer to say who owns what, all parameters, one behind the other, are dealt equally over the ranks
    that hold the same; of copies inside a data-parallel replica, the first writes.
    """
    if optimizer is not None:
        return _regions_of_slices(optimizer.owned_slices())
    regions: list[Region] = []
    for expert, axes in ((False, ("dp", "cp")), (True, ("edp",))):
        parameters = [p for p in _parameters(module) if p.sharding.expert == expert and _writes(p, mesh)]
        peers = mesh.ranks(*axes)
        for run in deal(parameters, len(peers), peers.index(mesh.rank)):
            regions += _regions(MODEL, run, run.parameter.detach().flatten()[run.start : run.stop])
    return regions


def _regions_of_slices(slices: Iterable[StateSlice]) -> list[Region]:
    weights: list[Region] = []
    state: list[Region] = []
    for part in reversed(list(slices)):  # as the model has them
        run = Run(part.parameter, part.start, part.stop)
        weights += _regions(MODEL, run, part.values)
        for name, values in part.state.items():
            state += _regions(f"{OPTIMIZER}{name}/", run, values)
    return weights + state


def deal(parameters: Iterable[Parameter], parts: int, index: int) -> Iterator[Run]:
    """Part `index` of `parts` equal parts of the parameters, one behind the other."""
    parameters = list(parameters)
    start, length = share(sum(parameter.numel() for parameter in parameters), parts, index)
    position = 0
    for parameter in parameters:
        low, high = max(start - position, 0), min(start + length - position, parameter.numel())
        if low < high:
            yield Run(parameter, low, high)
        position += parameter.numel()


def _writes(parameter: Parameter, mesh: ParallelMesh) -> bool:
    return mesh.rank == min(parameter.sharding.copies)


def _parameters(module: nn.Module) -> Sequence[Parameter]:
    return list({id(parameter): parameter for parameter, _ in named_pieces(module)}.values())


def _regions(prefix: str, run: Run, values: Tensor) -> Iterator[Region]:
    """The boxes of a run, whose flat values are given; padding is in none."""
    columns = math.prod(run.parameter.shape[1:])
    for piece in run.parameter.sharding.pieces:
        first = piece.row * columns
        low, high = max(run.start, first), min(run.stop, first + piece.box.numel)
        for box, position in piece.box.flat_range(low - first, high - first):
            begin = first + position - run.start
            view = values[begin : begin + box.numel].view(box.size)
            yield Region(prefix + piece.tensor.name, piece.tensor.shape, box, view)
