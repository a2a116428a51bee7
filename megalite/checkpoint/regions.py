"""What a rank holds of the global tensors of a checkpoint, and which of it the rank writes.

All of it follows from the parameters' `Sharding`: no rank needs to ask another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.optim.optimizer import Optimizer
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Box, share

MODEL, OPTIMIZER = "model/", "optimizer/"


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
    """All that a rank holds: its parameters whole, and the optimizer state of its slices."""
    regions = [
        region for p in _parameters(module) for region in _regions(MODEL, Run(p, 0, p.numel()), p.detach().flatten())
    ]
    for state in optimizer.slices() if optimizer is not None else ():
        for name, values in state.tensors.items():
            regions += _regions(f"{OPTIMIZER}{name}/", Run(state.parameter, state.start, state.stop), values)
    return regions


def owned_regions(module: nn.Module, optimizer: Optimizer | None, mesh: ParallelMesh) -> list[Region]:
    """What this rank writes: over all ranks, each element of each global tensor once."""
    runs = {id(run.parameter): run for run in _owned_runs(module, optimizer, mesh)}
    regions: list[Region] = []
    for run in runs.values():
        regions += _regions(MODEL, run, run.parameter.detach().flatten()[run.start : run.stop])
    for state in optimizer.slices() if optimizer is not None else ():
        owned_run = runs.get(id(state.parameter))
        if owned_run is not None:
            for name, values in state.tensors.items():
                owned = values[owned_run.start - state.start : owned_run.stop - state.start]
                regions += _regions(f"{OPTIMIZER}{name}/", owned_run, owned)
    return regions


def _owned_runs(module: nn.Module, optimizer: Optimizer | None, mesh: ParallelMesh) -> Iterator[Run]:
    """Where the optimizer's state is sharded, its slices; else all parameters, one behind the other, dealt equally
    over the ranks that hold the same. Of copies inside a data-parallel replica, the first writes.
    """
    if optimizer is not None and optimizer.sharded:
        for state in optimizer.slices():
            if _writes(state.parameter, mesh):
                yield Run(state.parameter, state.start, state.stop)
        return
    for expert, axes in ((False, ("dp", "cp")), (True, ("edp",))):
        parameters = [p for p in _parameters(module) if p.sharding.expert == expert and _writes(p, mesh)]
        peers = mesh.ranks(*axes)
        yield from deal(parameters, len(peers), peers.index(mesh.rank))


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
