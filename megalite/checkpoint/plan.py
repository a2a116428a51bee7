"""Plan of a checkpoint: which parts of the global tensors each rank holds and saves.

The plan is a pure function of the mesh and of the shardings of the parameters. Every rank can compute it for every
other rank without communication.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from megalite.checkpoint.manifest import MODEL, OPTIMIZER, RANK, STATE
from megalite.checkpoint.relayout import of_replica
from megalite.checkpoint.tensors import TensorBox
from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel, plan_buckets
from megalite.optim.layout import BucketLayout, BucketShardSpec, Slot, is_main_replica, unique_parameters
from megalite.optim.optimizer import Optimizer
from megalite.optim.packed import Rounded, View
from megalite.optim.replica import ANCHOR, BucketState, Replica, bucket_parts
from megalite.optim.shard import StateSlice, all_state_dtypes
from megalite.optim.synchronization import RankStates
from megalite.optim.update_rule import own_states
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Box, LogicalTensor, Piece
from megalite.parallel.state import State, states_of


@dataclass(frozen=True)
class Contents:
    """Parameters and state of a rank."""

    layouts: Sequence[BucketLayout]
    states: Sequence[State]
    """State of the modules."""

    @staticmethod
    def of(
        networks: Sequence[nn.Module],
        mesh: ParallelMesh,
        options: DataParallel,
        *,
        blocks: Sequence[Sequence[nn.Module]] = (),
    ) -> Contents:
        """Assign the networks of a rank to buckets as `make_optimizer` does."""
        plan = partial(plan_buckets, networks, mesh, options, blocks=blocks)
        return Contents(plan() + plan(frozen=True), list(states_of(nn.ModuleList(networks))))


ContentsAt = Callable[[ParallelMesh], Contents]
"""Function that builds the contents of a rank on the meta device, given the mesh of that rank."""


class Plan:
    """Plan of the parts that each rank of a mesh holds and saves."""

    def __init__(
        self,
        mesh: ParallelMesh,
        contents_at: ContentsAt,
        optimizer: OptimizerConfig,
        *,
        zero_stage: int,
        instances: int,
        bucket_states: Sequence[BucketState] = (),
        rank_states: Callable[[Sequence[BucketLayout]], RankStates] = lambda layouts: {},
        replicas: int = 1,
    ) -> None:
        """Create the plan.

        Args:
            mesh: the mesh of all ranks.
            contents_at: builds the contents of a rank.
            optimizer: the hyperparameters.
            zero_stage: ZeRO's stage, as in `DataParallel`.
            instances: its number of instances, within a replica.
            bucket_states: the kinds of `Optimizer.bucket_states`, in order.
            rank_states: returns a rank's private state, given the layouts of its trained buckets.
            replicas: the number of blocks of data-parallel ranks with weights and state of their own. `contents_at`
                gets the mesh of a rank in the first of them.
        """
        self.mesh, self._contents_at, self._optimizer = mesh, contents_at, optimizer
        self._zero_stage, self._instances = zero_stage, instances
        self._bucket_states, self._rank_states, self._replicas = bucket_states, rank_states, replicas
        self._inner = mesh.at(0).replica(replicas) if replicas > 1 else mesh
        self._seen: dict[tuple[int, ...], _Seen] = {}

    @staticmethod
    def alone(optimizer: Optimizer) -> Plan:
        """Return the plan for a single rank."""
        contents = Contents([each.layout for each in (*optimizer.buckets, *optimizer.frozen)], optimizer.module_states)
        private = {name: (_shape(values), values.dtype) for name, values in optimizer.rank_states.items()}
        return Plan(
            optimizer.mesh,
            lambda _: contents,
            optimizer.config,
            zero_stage=0,
            instances=1,
            bucket_states=list(optimizer.bucket_states),
            rank_states=lambda layouts: private,
        )

    def saved(self, rank: int) -> list[TensorBox]:
        """Return the parts that a rank writes, in file order. Over all ranks, each element is written exactly once."""
        parts = self._parts((spec, *spec.saved) for spec in self._shard_specs(rank))
        seen, at = self._look(rank), self._inner.coordinates_of(self._in_first_replica(rank))
        states = [each for each in seen.states if is_main_replica(each[1].sharding, seen.rank, at)]
        return self._completed(rank, parts + _state_parts(states), saved=True)

    def held(self, rank: int) -> list[TensorBox]:
        """Return the parts that a rank loads."""
        parts = self._parts((spec, *spec.updated) for spec in self._shard_specs(rank))
        return self._completed(rank, parts + _state_parts(self._look(rank).states), saved=False)

    def _completed(self, rank: int, parts: Iterable[TensorBox], *, saved: bool) -> list[TensorBox]:
        """Return the parts as those of the rank's replica, followed by its extra state."""
        replica = self._replica_of(rank)
        specs = [spec for spec in self._shard_specs(rank) if not spec.layout.frozen] if self._bucket_states else []
        extra = (each.part for each in _extra_parts(self._bucket_states, specs, replica, saved=saved))
        return [*(of_replica(part, replica) for part in parts), *extra, *self._private(rank, saved=saved)]

    def _private(self, rank: int, *, saved: bool) -> list[TensorBox]:
        seen = self._look(rank)
        named = self._rank_states([layout for layout in seen.layouts if not layout.frozen])
        if not named:
            return []
        first = self._in_first_replica(rank)
        owner = _private_owner(self._inner.at(first)) + rank - first
        return [_private_part(owner, *kind) for kind in named.items()] if owner == rank or not saved else []

    def _in_first_replica(self, rank: int) -> int:
        """Return the rank at the same position in the first replica."""
        replica = self.mesh.coordinates_of(rank)["dp"] // self._inner.size("dp")
        return rank - replica * self._inner.size("dp", "cp", "tp")

    def _replica_of(self, rank: int) -> Replica | None:
        if self._replicas == 1:
            return None
        return Replica(self.mesh.coordinates_of(rank)["dp"] // self._inner.size("dp"), self._replicas, "average")

    def _look(self, rank: int) -> _Seen:
        """Inspect a rank. Ranks that differ only in their data-parallel position share one cached result."""
        rank = self._in_first_replica(rank)
        at = self._inner.coordinates_of(rank)
        like = tuple(at[axis] for axis in ("pp", "tp", "ep", "etp"))
        if like not in self._seen:
            mesh = self._inner.at(rank)
            contents = self._contents_at(mesh)
            slots = (slot for layout in contents.layouts for slot in layout.slots)
            own = (named for slot in slots for named in own_states(self._optimizer, slot.parameter, mesh).items())
            self._seen[like] = _Seen(rank, contents.layouts, _with_prefixes(contents.states, own))
        return self._seen[like]

    def _shard_specs(self, rank: int) -> Iterator[BucketShardSpec]:
        """Yield the slice of each bucket that belongs to a rank."""
        seen, at = self._look(rank), self._inner.coordinates_of(self._in_first_replica(rank))
        cp, dp = self._inner.size("cp"), self._inner.size("dp")
        for layout in seen.layouts:
            expert = layout.slots[0].parameter.sharding.expert
            yield BucketShardSpec.of(
                layout,
                seen.rank,
                peers=self._inner.size("edp") if expert else dp * cp,
                position=at["edp"] if expert else at["dp"] * cp + at["cp"],
                zero_stage=self._zero_stage,
                instances=self._instances,
            )

    def _parts(self, ranges: Iterable[tuple[BucketShardSpec, int, int]]) -> list[TensorBox]:
        weights: list[TensorBox] = []
        state: list[TensorBox] = []
        for slot, start, stop in reversed([run for each in ranges for run in _runs(*each)]):
            parameter = slot.parameter
            dtypes = all_state_dtypes(self._optimizer, parameter)
            for tensor, box, _ in boxes(parameter, start, stop):
                weights.append(TensorBox(MODEL + tensor.name, tensor.shape, parameter.dtype, box))
                state += [
                    TensorBox(f"{OPTIMIZER}{name}/{tensor.name}", tensor.shape, dtype, box)
                    for name, dtype in dtypes.items()
                ]
        return weights + state


@dataclass(frozen=True)
class _Seen:
    """Cached contents of a rank, which also stand for the ranks that differ only in their data-parallel position."""

    rank: int
    layouts: Sequence[BucketLayout]
    states: Sequence[tuple[str, State]]
    """State of the modules, then of the optimizer, each with the prefix of its tensor names."""


def _with_prefixes(modules: Iterable[State], own: Iterable[tuple[str, State]]) -> list[tuple[str, State]]:
    return [*((STATE, state) for state in modules), *((f"{OPTIMIZER}{name}/", state) for name, state in own)]


def _pieces(states: Iterable[tuple[str, State]]) -> Iterator[tuple[TensorBox, State, Piece]]:
    """Yield the parts of logical tensors in the states. Padding belongs to no part."""
    for prefix, state in states:
        for piece in state.sharding.pieces:
            if piece.box.numel:
                tensor = piece.tensor
                yield TensorBox(prefix + tensor.name, tensor.shape, state.values.dtype, piece.box), state, piece


def _state_parts(states: Iterable[tuple[str, State]]) -> list[TensorBox]:
    return [part for part, _, _ in _pieces(states)]


def _runs(spec: BucketShardSpec, begin: int, end: int) -> Iterator[tuple[Slot, int, int]]:
    """Yield the parameters in elements [begin, end) of a bucket.

    Each one is (slot, start, stop), a range of the flattened parameter.
    """
    slots = spec.layout.slots
    for slot in slots[max(bisect_right(slots, begin, key=lambda slot: slot.start) - 1, 0) :]:
        if slot.start >= end:
            return
        low, high = max(slot.start, begin), min(slot.stop, end)
        if low < high:
            yield slot, low - slot.start, high - slot.start


def boxes(parameter: Parameter, start: int, stop: int) -> Iterator[tuple[LogicalTensor, Box, int]]:
    """Yield the boxes of logical tensors in elements [start, stop) of a flattened local parameter.

    Each box is yielded with its tensor and the number of its first element. Padding belongs to no box.
    """
    columns = math.prod(parameter.shape[1:])
    for piece in parameter.sharding.pieces:
        first = piece.row * columns
        low, high = max(start, first), min(stop, first + piece.box.numel)
        for box, position in piece.box.flat_range(low - first, high - first):
            yield piece.tensor, box, first + position


# ------------------------------------------------------------------------------------------------ extra state


@dataclass(frozen=True)
class _ExtraPart:
    """Part of a tensor of `Optimizer.bucket_states`, which is elements [start, stop) of a flat tensor."""

    part: TensorBox
    state: BucketState
    bucket: int
    flat: int
    start: int
    stop: int


def _extra_parts(
    states: Iterable[BucketState], specs: Sequence[BucketShardSpec], outer: Replica | None, *, saved: bool
) -> Iterator[_ExtraPart]:
    """Yield the parts of a rank's state that it saves, or holds.

    `specs`: the slices of its trained buckets. `outer`: its replica, if each has weights of its own.
    """
    for state, (bucket, spec) in product(states, enumerate(specs)):
        for flat, kept in enumerate(bucket_parts(spec, state, outer)):
            for slot, start, stop in _runs(spec, *(kept.saved if saved else kept.held)):
                dtype = torch.promote_types(slot.parameter.dtype, torch.float32)
                for tensor, box, position in boxes(slot.parameter, start, stop):
                    part = TensorBox(f"{OPTIMIZER}{state.name}/{tensor.name}", tensor.shape, dtype, box)
                    first = slot.start + position - kept.held[0]
                    yield _ExtraPart(of_replica(part, kept.replica), state, bucket, flat, first, first + box.numel)
                    if saved and state.name == ANCHOR:
                        part = TensorBox(MODEL + tensor.name, tensor.shape, slot.parameter.dtype, box)
                        yield _ExtraPart(part, state, bucket, flat, first, first + box.numel)


def _private_owner(mesh: ParallelMesh) -> int:
    """Return the rank that saves a rank's private state: the first that differs only in its data-parallel position.

    `mesh`: that of the rank's replica.
    """
    return min({*mesh.ranks("dp", "cp")} & {*mesh.ranks("edp")})


def _private_part(owner: int, name: str, kind: tuple[tuple[int, ...], torch.dtype]) -> TensorBox:
    shape, dtype = kind
    return TensorBox(f"{RANK}{owner}/{name}", shape, dtype, Box.whole(shape))


def _shape(values: Tensor) -> tuple[int, ...]:
    return tuple(values.shape) or (1,)


# ------------------------------------------------------------------------------------------------ this rank's memory


@dataclass(frozen=True)
class Region:
    """Part of a tensor, and the memory on this rank that stores it."""

    part: TensorBox
    kept: Tensor | View
    """Flat tensor or view."""

    @property
    def values(self) -> Tensor:
        """Return the values in the shape of the box: a view of the memory, or a new copy if the memory is packed."""
        flat = self.kept if isinstance(self.kept, Tensor) else self.kept.read()
        return flat.view(self.part.box.size)


def held_slices(module: nn.Module, optimizer: Optimizer | None) -> list[StateSlice]:
    """Return the slices that this rank loads.

    With an optimizer, these are the slices that it updates, with their state; otherwise the complete parameters.
    """
    if optimizer is not None:
        return list(optimizer.slices())
    return [StateSlice(p, 0, p.numel(), p.detach().flatten(), {}) for p in unique_parameters(module)]


def held_states(module: nn.Module, optimizer: Optimizer | None) -> list[tuple[str, State]]:
    """Return all state of this rank that has its own placement, each with the prefix of its tensor names."""
    return _with_prefixes(states_of(module), optimizer.own_states if optimizer is not None else ())


def held_regions(module: nn.Module, optimizer: Optimizer | None) -> list[Region]:
    """Return `held_slices`, `held_states` and the extra state as regions."""
    regions = _regions(held_slices(module, optimizer), held_states(module, optimizer))
    return _completed(regions, optimizer, saved=False) if optimizer is not None else regions


def saved_regions(optimizer: Optimizer) -> list[Region]:
    """Return the regions that this rank writes. They match its part of the plan."""
    rank = optimizer.mesh.rank
    at = optimizer.mesh.coordinates_of(rank)
    states = _with_prefixes(optimizer.module_states, optimizer.own_states)
    own = [each for each in states if is_main_replica(each[1].sharding, rank, at)]
    return _completed(_regions(optimizer.saved_slices(), own), optimizer, saved=True)


def _completed(regions: Iterable[Region], optimizer: Optimizer, *, saved: bool) -> list[Region]:
    """Return the regions as those of the rank's replica, followed by its extra state."""
    replica, mesh = optimizer.replica, optimizer.mesh
    found = [replace(region, part=of_replica(region.part, replica)) for region in regions]
    specs = [bucket.shard_spec for bucket in optimizer.buckets] if optimizer.bucket_states else []
    for each in _extra_parts(optimizer.bucket_states, specs, replica, saved=saved):
        flat = optimizer.bucket_states[each.state][each.bucket][each.flat]
        kept: Tensor | View = flat[each.start : each.stop]
        if flat.dtype != each.part.dtype:
            kept = View(Rounded(flat, each.part.dtype), each.start, each.stop)
        found.append(Region(each.part, kept))
    owner = _private_owner(mesh)
    for name, values in optimizer.rank_states.items() if owner == mesh.rank or not saved else ():
        found.append(Region(_private_part(owner, name, (_shape(values), values.dtype)), values.view(-1)))
    return found


def _regions(slices: Iterable[StateSlice], states: Iterable[tuple[str, State]]) -> list[Region]:
    weights: list[Region] = []
    state: list[Region] = []
    for run in reversed(list(slices)):  # buckets have the order of backward; this restores the order of the model
        for tensor, box, position in boxes(run.parameter, run.start, run.stop):
            at = slice(position - run.start, position - run.start + box.numel)
            weights.append(_region(MODEL, tensor, box, run.values[at]))
            state += [_region(f"{OPTIMIZER}{name}/", tensor, box, values[at]) for name, values in run.state.items()]
    return [*weights, *state, *(Region(part, piece.view(s.values).view(-1)) for part, s, piece in _pieces(states))]


def _region(prefix: str, tensor: LogicalTensor, box: Box, kept: Tensor | View) -> Region:
    return Region(TensorBox(prefix + tensor.name, tensor.shape, kept.dtype, box), kept)
