"""What each rank holds and saves of a checkpoint's global tensors.

A pure function of the mesh and of the parameters' records: every rank can tell it of every other, and none is asked.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.checkpoint.container import Part
from megalite.config.optimizer import OptimizerConfig
from megalite.optim.layout import BucketLayout
from megalite.optim.optimizer import Optimizer
from megalite.optim.packed import View
from megalite.optim.places import BucketPlace
from megalite.optim.shard import StateSlice, all_state_dtypes
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Box, LogicalTensor

MODEL, OPTIMIZER = "model/", "optimizer/"
MASTER = OPTIMIZER + "master/"

LayoutsAt = Callable[[ParallelMesh], list[BucketLayout]]
"""The buckets of the rank that a mesh is the place of, its parameters on the meta device."""


class Plan:
    """Which parts every rank of a mesh holds and saves."""

    def __init__(
        self, mesh: ParallelMesh, layouts_at: LayoutsAt, optimizer: OptimizerConfig, *, stage: int, instances: int
    ) -> None:
        """`stage`, `instances`: ZeRO's, as in `DataParallel`."""
        self.mesh, self._layouts_at, self._optimizer = mesh, layouts_at, optimizer
        self._stage, self._instances = stage, instances
        self._layouts: dict[tuple[int, ...], tuple[int, list[BucketLayout]]] = {}

    @staticmethod
    def alone(optimizer: Optimizer) -> Plan:
        """That of a world of one rank."""
        layouts = [bucket.layout for bucket in optimizer.buckets]
        return Plan(optimizer.mesh, lambda _: layouts, optimizer.config, stage=0, instances=1)

    def saved(self, rank: int) -> list[Part]:
        """What a rank writes, in the order of its file: over all ranks, each element of each tensor once."""
        return self._parts((place, *place.saved) for place in self._places(rank))

    def held(self, rank: int) -> list[Part]:
        """What a rank must be given."""
        return self._parts((place, *place.held) for place in self._places(rank))

    def _places(self, rank: int) -> Iterator[BucketPlace]:
        """A rank's place in each of its buckets. Ranks that differ in their data-parallel position alone have the same
        buckets, so these are found once."""
        at = self.mesh.coordinates_of(rank)
        like = tuple(at[axis] for axis in ("pp", "tp", "ep", "etp"))
        if like not in self._layouts:
            self._layouts[like] = rank, self._layouts_at(self.mesh.at(rank))
        first, layouts = self._layouts[like]
        cp, dp = self.mesh.size("cp"), self.mesh.size("dp")
        for layout in layouts:
            expert = layout.slots[0].parameter.sharding.expert
            yield BucketPlace.of(
                layout,
                first,
                peers=self.mesh.size("edp") if expert else dp * cp,
                position=at["edp"] if expert else at["dp"] * cp + at["cp"],
                stage=self._stage,
                instances=self._instances,
            )

    def _parts(self, ranges: Iterable[tuple[BucketPlace, int, int]]) -> list[Part]:
        weights: list[Part] = []
        state: list[Part] = []
        for parameter, start, stop in reversed([run for each in ranges for run in _runs(*each)]):
            dtypes = all_state_dtypes(self._optimizer, parameter)
            for tensor, box, _ in boxes(parameter, start, stop):
                weights.append(Part(MODEL + tensor.name, tensor.shape, parameter.dtype, box))
                state += [
                    Part(f"{OPTIMIZER}{name}/{tensor.name}", tensor.shape, dtype, box) for name, dtype in dtypes.items()
                ]
        return weights + state


def _runs(place: BucketPlace, begin: int, end: int) -> Iterator[tuple[Parameter, int, int]]:
    """What elements [begin, end) of a bucket are of its parameters, flattened: (parameter, start, stop)."""
    slots = place.layout.slots
    for slot in slots[max(bisect_right(slots, begin, key=lambda slot: slot.start) - 1, 0) :]:
        if slot.start >= end:
            return
        low, high = max(slot.start, begin), min(slot.stop, end)
        if low < high:
            yield slot.parameter, low - slot.start, high - slot.start


def boxes(parameter: Parameter, start: int, stop: int) -> Iterator[tuple[LogicalTensor, Box, int]]:
    """What elements [start, stop) of a local parameter, flattened, are of logical tensors: boxes, each with the number
    of its first element. Padding is in none."""
    columns = math.prod(parameter.shape[1:])
    for piece in parameter.sharding.pieces:
        first = piece.row * columns
        low, high = max(start, first), min(stop, first + piece.box.numel)
        for box, position in piece.box.flat_range(low - first, high - first):
            yield piece.tensor, box, first + position


# ------------------------------------------------------------------------------------------------ this rank's memory


@dataclass(frozen=True)
class Region:
    """A part, and what stands for it on this rank."""

    part: Part
    kept: Tensor | View
    """Flat."""

    @property
    def values(self) -> Tensor:
        """Of the box's shape: the memory itself, or where that is packed a copy made now."""
        flat = self.kept if isinstance(self.kept, Tensor) else self.kept.read()
        return flat.view(self.part.box.size)


def held_slices(module: nn.Module, optimizer: Optimizer | None) -> list[StateSlice]:
    """All that this rank must be given: its parameters whole, or what its optimizer updates of weights and state."""
    if optimizer is not None:
        return list(optimizer.slices())
    parameters = {id(parameter): parameter for parameter, _ in named_pieces(module)}.values()
    return [StateSlice(p, 0, p.numel(), p.detach().flatten(), {}) for p in parameters]


def held_regions(module: nn.Module, optimizer: Optimizer | None) -> list[Region]:
    """`held_slices` as parts of the checkpoint."""
    return _regions(held_slices(module, optimizer))


def saved_regions(optimizer: Optimizer) -> list[Region]:
    """What this rank writes, as its plan has it."""
    return _regions(optimizer.saved_slices())


def _regions(slices: Iterable[StateSlice]) -> list[Region]:
    weights: list[Region] = []
    state: list[Region] = []
    for run in reversed(list(slices)):  # as the model has them
        for tensor, box, position in boxes(run.parameter, run.start, run.stop):
            at = slice(position - run.start, position - run.start + box.numel)
            weights.append(_region(MODEL, tensor, box, run.values[at]))
            state += [_region(f"{OPTIMIZER}{name}/", tensor, box, values[at]) for name, values in run.state.items()]
    return weights + state


def _region(prefix: str, tensor: LogicalTensor, box: Box, kept: Tensor | View) -> Region:
    return Region(Part(prefix + tensor.name, tensor.shape, kept.dtype, box), kept)
