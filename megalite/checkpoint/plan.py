"""What each rank holds and saves of a checkpoint's global tensors.

A pure function of the mesh and of the parameters' records: every rank can tell it of every other, and none is asked.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megalite.checkpoint.container import Part
from megalite.checkpoint.manifest import MODEL, OPTIMIZER, STATE
from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel, plan_buckets
from megalite.optim.kept import own_states
from megalite.optim.layout import BucketLayout
from megalite.optim.optimizer import Optimizer
from megalite.optim.packed import View
from megalite.optim.places import BucketPlace, saves_state
from megalite.optim.shard import StateSlice, all_state_dtypes
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter, named_pieces
from megalite.parallel.sharding import Box, LogicalTensor, Piece
from megalite.parallel.state import State, states_of


@dataclass(frozen=True)
class Contents:
    """Parameters and state that a rank holds."""

    layouts: Sequence[BucketLayout]
    states: Sequence[State]
    """The modules' own."""

    @staticmethod
    def of(
        networks: Sequence[nn.Module],
        mesh: ParallelMesh,
        options: DataParallel,
        *,
        blocks: Sequence[Sequence[nn.Module]] = (),
    ) -> Contents:
        """Deal the networks of a rank as `make_optimizer` does."""
        layouts = plan_buckets(networks, mesh, options, blocks=blocks)
        return Contents(layouts, list(states_of(nn.ModuleList(networks))))


ContentsAt = Callable[[ParallelMesh], Contents]
"""Tells them of the rank that a mesh is the place of, on the meta device."""


class Plan:
    """Which parts every rank of a mesh holds and saves."""

    def __init__(
        self, mesh: ParallelMesh, contents_at: ContentsAt, optimizer: OptimizerConfig, *, stage: int, instances: int
    ) -> None:
        """`stage`, `instances`: ZeRO's, as in `DataParallel`."""
        self.mesh, self._contents_at, self._optimizer = mesh, contents_at, optimizer
        self._stage, self._instances = stage, instances
        self._seen: dict[tuple[int, ...], _Seen] = {}

    @staticmethod
    def alone(optimizer: Optimizer) -> Plan:
        """That of a world of one rank."""
        contents = Contents([bucket.layout for bucket in optimizer.buckets], optimizer.module_states)
        return Plan(optimizer.mesh, lambda _: contents, optimizer.config, stage=0, instances=1)

    def saved(self, rank: int) -> list[Part]:
        """What a rank writes, in the order of its file: over all ranks, each element of each tensor once."""
        parts = self._parts((place, *place.saved) for place in self._places(rank))
        seen, at = self._look(rank), self.mesh.coordinates_of(rank)
        return parts + _state_parts(each for each in seen.states if saves_state(each[1].sharding, seen.rank, at))

    def held(self, rank: int) -> list[Part]:
        """What a rank must be given."""
        return self._parts((place, *place.held) for place in self._places(rank)) + _state_parts(self._look(rank).states)

    def _look(self, rank: int) -> _Seen:
        """Look at a rank; once for all that differ in their data-parallel position alone, at the first of them."""
        at = self.mesh.coordinates_of(rank)
        like = tuple(at[axis] for axis in ("pp", "tp", "ep", "etp"))
        if like not in self._seen:
            mesh = self.mesh.at(rank)
            contents = self._contents_at(mesh)
            slots = (slot for layout in contents.layouts for slot in layout.slots)
            own = (named for slot in slots for named in own_states(self._optimizer, slot.parameter, mesh).items())
            self._seen[like] = _Seen(rank, contents.layouts, _with_prefixes(contents.states, own))
        return self._seen[like]

    def _places(self, rank: int) -> Iterator[BucketPlace]:
        """A rank's place in each of its buckets."""
        seen, at = self._look(rank), self.mesh.coordinates_of(rank)
        cp, dp = self.mesh.size("cp"), self.mesh.size("dp")
        for layout in seen.layouts:
            expert = layout.slots[0].parameter.sharding.expert
            yield BucketPlace.of(
                layout,
                seen.rank,
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


@dataclass(frozen=True)
class _Seen:
    """A rank that was looked at."""

    rank: int
    layouts: Sequence[BucketLayout]
    states: Sequence[tuple[str, State]]
    """The modules', then the optimizer's, with what their tensors' names begin with."""


def _with_prefixes(modules: Iterable[State], own: Iterable[tuple[str, State]]) -> list[tuple[str, State]]:
    return [*((STATE, state) for state in modules), *((f"{OPTIMIZER}{name}/", state) for name, state in own)]


def _pieces(states: Iterable[tuple[str, State]]) -> Iterator[tuple[Part, State, Piece]]:
    """Tell which parts of logical tensors states are. Padding is in none."""
    for prefix, state in states:
        for piece in state.sharding.pieces:
            if piece.box.numel:
                yield Part(prefix + piece.tensor.name, piece.tensor.shape, state.values.dtype, piece.box), state, piece


def _state_parts(states: Iterable[tuple[str, State]]) -> list[Part]:
    return [part for part, _, _ in _pieces(states)]


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


def held_states(module: nn.Module, optimizer: Optimizer | None) -> list[tuple[str, State]]:
    """All state of this rank that has a place of its own, with what the names of its tensors begin with."""
    return _with_prefixes(states_of(module), optimizer.own_states if optimizer is not None else ())


def held_regions(module: nn.Module, optimizer: Optimizer | None) -> list[Region]:
    """`held_slices` and `held_states` as parts of the checkpoint."""
    return _regions(held_slices(module, optimizer), held_states(module, optimizer))


def saved_regions(optimizer: Optimizer) -> list[Region]:
    """What this rank writes, as its plan has it."""
    rank = optimizer.mesh.rank
    at = optimizer.mesh.coordinates_of(rank)
    states = _with_prefixes(optimizer.module_states, optimizer.own_states)
    return _regions(optimizer.saved_slices(), [each for each in states if saves_state(each[1].sharding, rank, at)])


def _regions(slices: Iterable[StateSlice], states: Iterable[tuple[str, State]]) -> list[Region]:
    weights: list[Region] = []
    state: list[Region] = []
    for run in reversed(list(slices)):  # as the model has them
        for tensor, box, position in boxes(run.parameter, run.start, run.stop):
            at = slice(position - run.start, position - run.start + box.numel)
            weights.append(_region(MODEL, tensor, box, run.values[at]))
            state += [_region(f"{OPTIMIZER}{name}/", tensor, box, values[at]) for name, values in run.state.items()]
    return [*weights, *state, *(Region(part, piece.view(s.values).view(-1)) for part, s, piece in _pieces(states))]


def _region(prefix: str, tensor: LogicalTensor, box: Box, kept: Tensor | View) -> Region:
    return Region(Part(prefix + tensor.name, tensor.shape, kept.dtype, box), kept)
