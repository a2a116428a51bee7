"""Plan of a checkpoint: which parts of the global tensors each rank holds and saves, and in which memory.

`_regions` lists the parts of a rank, for this rank with their memory. They are a pure function of the mesh and of the
shardings of the parameters, so that every rank can compute them for every other rank without communication.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from megalite.checkpoint.manifest import MODEL, OPTIMIZER, RANK, STATE
from megalite.checkpoint.relayout import with_replica
from megalite.checkpoint.tensors import TensorBox
from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import DataParallel, plan_buckets
from megalite.optim.layout import BucketLayout, BucketShardSpec, Slot, is_main_replica, unique_parameters
from megalite.optim.offloaded import elements_on_host
from megalite.optim.optimizer import Optimizer
from megalite.optim.packed import Rounded, View
from megalite.optim.replica import ANCHOR, BucketPart, BucketState, Replica, bucket_parts
from megalite.optim.several import optimizer_of
from megalite.optim.shard import StateSlice, all_state_dtypes
from megalite.optim.synchronization import RankStates
from megalite.optim.update_rule import own_states
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Box, LogicalTensor
from megalite.parallel.state import State, states_of


@dataclass(frozen=True)
class Contents:
    """Parameters and state of a rank."""

    trained: Sequence[BucketLayout]
    frozen: Sequence[BucketLayout]
    states: Sequence[tuple[str, State]]
    """State with a placement of its own, each with the prefix of its tensor names."""

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
        return Contents(plan(), plan(frozen=True), _with_prefixes(states_of(nn.ModuleList(networks)), ()))


ContentsAt = Callable[[ParallelMesh], Contents]
"""Function that builds the contents of a rank on the meta device, given the mesh of that rank; of the states only those
of the modules."""


@dataclass(frozen=True)
class Region:
    """Part of a tensor, and the memory on this rank that stores it."""

    part: TensorBox
    kept: Tensor | View | None
    """Flat tensor or view. None: the part of another rank."""

    @property
    def values(self) -> Tensor:
        """Return the values in the shape of the box: a view of the memory, or a new copy if the memory is packed."""
        assert self.kept is not None
        flat = self.kept if isinstance(self.kept, Tensor) else self.kept.read()
        return flat.view(self.part.box.size)


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
        fraction_on_host: Callable[[int], float] = lambda rank: 0.0,
        own: Optimizer | None = None,
        saves_frozen: bool = True,
        optimizers: Mapping[str, OptimizerConfig] = MappingProxyType({}),
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
            fraction_on_host: returns the share of a rank's elements whose state is on the host.
            own: the optimizer of this rank. Ranks that differ from it only in their data-parallel position have the
                same contents, which are then not built.
            saves_frozen: False to leave out frozen weights, which are those of another model.
            optimizers: the hyperparameters by the name of the optimizer, if there are several.
        """
        self.mesh, self._contents_at, self._optimizer, self._optimizers = mesh, contents_at, optimizer, optimizers
        self.saves_frozen = saves_frozen
        self._zero_stage, self._instances, self._fraction_on_host = zero_stage, instances, fraction_on_host
        self._bucket_states, self._rank_states, self._replicas = bucket_states, rank_states, replicas
        self._inner = mesh.at(0).replica(replicas) if replicas > 1 else mesh
        self._known: dict[tuple[int, ...], tuple[int, Contents]] = {}
        """Contents of a rank, by its stage: they are those of all ranks that differ only in data-parallel position."""
        replica, first = self._position(mesh.rank)
        if own is not None and replica == 0:
            trained, frozen = ([bucket.layout for bucket in buckets] for buckets in (own.buckets, own.frozen))
            self._known[self._stage(first)] = first, Contents(trained, frozen, _states_here(own))

    @staticmethod
    def alone(optimizer: Optimizer) -> Plan:
        """Return the plan for a single rank."""
        private = {name: (tuple(values.shape), values.dtype) for name, values in optimizer.rank_states.items()}
        return Plan(
            optimizer.mesh,
            lambda mesh: Contents((), (), ()),
            optimizer.config,
            zero_stage=0,
            instances=1,
            fraction_on_host=lambda rank: optimizer.fraction_on_host,
            bucket_states=list(optimizer.bucket_states),
            rank_states=lambda layouts: private,
            own=optimizer,
        )

    def saved(self, rank: int) -> list[TensorBox]:
        """Return the parts that a rank writes, in file order. Over all ranks, each element is written exactly once."""
        return self._parts(rank, saved=True)

    def held(self, rank: int) -> list[TensorBox]:
        """Return the parts that a rank loads."""
        return self._parts(rank, saved=False)

    def _parts(self, rank: int, *, saved: bool) -> list[TensorBox]:
        """Return the parts that a rank saves, or holds, from the contents of a rank like it."""
        replica, first = self._position(rank)
        known, contents = self._contents(first)
        at = self._inner.coordinates_of(first)
        frozen = contents.frozen if self.saves_frozen or not saved else ()
        specs = [self._shard_spec(layout, known, at) for layout in (*contents.trained, *frozen)]
        trained = specs[: len(contents.trained)]
        on_host = [0] * len(specs)
        if fraction := self._fraction_on_host(rank):
            on_host[: len(trained)] = elements_on_host(trained, fraction)
        slices = (
            (slot.parameter, start, stop, self._dtypes(slot.parameter, trained=number < len(trained)))
            for number, spec in enumerate(specs)
            for slot, start, stop in _slots(spec, *(spec.saved if saved else spec.updated), on_host[number])
        )
        kinds = self._rank_states(contents.trained)
        private = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in kinds.items()}
        owner = _private_owner(self._inner.at(first)) + rank - first if private else rank
        regions = _regions(
            slices,
            [each for each in contents.states if not saved or is_main_replica(each[1].sharding, known, at)],
            replica=None if self._replicas == 1 else Replica(replica, self._replicas, "average"),
            bucket_states=dict.fromkeys(self._bucket_states),
            specs=trained,
            private=_private(private, owner, rank, saved=saved),
            saved=saved,
        )
        return [region.part for region in regions]

    def _position(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's replica, and the rank at the same position in the first one."""
        replica = self.mesh.coordinates_of(rank)["dp"] // self._inner.size("dp")
        return replica, rank - replica * self._inner.size("dp", "cp", "tp")

    def _stage(self, rank: int) -> tuple[int, ...]:
        at = self._inner.coordinates_of(rank)
        return tuple(at[axis] for axis in ("pp", "tp", "ep", "etp"))

    def _contents(self, rank: int) -> tuple[int, Contents]:
        """Return contents that are those of a rank, and the rank for which they are known."""
        stage = self._stage(rank)
        if stage not in self._known:
            mesh = self._inner.at(rank)
            found = self._contents_at(mesh)
            slots = (slot for layout in found.trained for slot in layout.slots)
            parameters = ((slot.parameter, self._config_of(slot.parameter)) for slot in slots)
            own = (named for each, config in parameters for named in own_states(config, each, mesh).items())
            self._known[stage] = rank, replace(found, states=[*found.states, *_with_prefixes((), own)])
        return self._known[stage]

    def _shard_spec(self, layout: BucketLayout, rank: int, at: Mapping[str, int]) -> BucketShardSpec:
        """Return the slice of a bucket of `rank` that belongs to the rank at these coordinates."""
        cp, dp = self._inner.size("cp"), self._inner.size("dp")
        expert = layout.slots[0].parameter.sharding.expert
        return BucketShardSpec.of(
            layout,
            rank,
            peers=self._inner.size("edp") if expert else dp * cp,
            position=at["edp"] if expert else at["dp"] * cp + at["cp"],
            zero_stage=self._zero_stage,
            instances=self._instances,
        )

    def _config_of(self, parameter: Parameter) -> OptimizerConfig:
        return self._optimizers[optimizer_of(parameter)] if self._optimizers else self._optimizer

    def _dtypes(self, parameter: Parameter, *, trained: bool) -> dict[str, torch.dtype]:
        """Return the dtypes of a parameter and of its flat state, by the prefix of their names."""
        states = all_state_dtypes(self._config_of(parameter), parameter) if trained else {}
        return {MODEL: parameter.dtype} | {f"{OPTIMIZER}{name}/": dtype for name, dtype in states.items()}


def _with_prefixes(modules: Iterable[State], own: Iterable[tuple[str, State]]) -> list[tuple[str, State]]:
    return [*((STATE, state) for state in modules), *((f"{OPTIMIZER}{name}/", state) for name, state in own)]


def _slots(spec: BucketShardSpec, begin: int, end: int, on_host: int = 0) -> Iterator[tuple[Slot, int, int]]:
    """Yield the parameters in elements [begin, end) of a bucket.

    Each one is (slot, start, stop), a range of the flattened parameter. One whose state is on the host in part, which
    has the first elements that the rank updates, comes twice.
    """
    slots, middle = spec.layout.slots, spec.updated[0] + on_host
    if begin < middle < end:
        yield from _slots(spec, begin, middle)
        begin = middle
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


def _private_owner(mesh: ParallelMesh) -> int:
    """Return the rank that saves a rank's private state: the first that differs only in its data-parallel position.

    `mesh`: that of the rank's replica.
    """
    return min({*mesh.ranks("dp", "cp")} & {*mesh.ranks("edp")})


def _private(named: Mapping[str, Tensor], owner: int, rank: int, *, saved: bool) -> dict[str, Tensor]:
    """Return the private state that a rank holds, or saves because it is the owner, by the names of the tensors."""
    return {f"{RANK}{owner}/{name}": each for name, each in named.items()} if owner == rank or not saved else {}


_Slice = tuple[Parameter, int, int, Mapping[str, Tensor | View | torch.dtype]]
"""Elements [start, stop) of a parameter, with the memory of the values and of their state, by the prefix of the names
of the tensors. Of another rank, only the dtypes are known."""


def _regions(
    slices: Iterable[_Slice],
    states: Iterable[tuple[str, State]],
    *,
    replica: Replica | None = None,
    bucket_states: Mapping[BucketState, Sequence[Sequence[Tensor]] | None] = MappingProxyType({}),
    specs: Sequence[BucketShardSpec] = (),
    private: Mapping[str, Tensor] = MappingProxyType({}),
    saved: bool = False,
) -> Iterator[Region]:
    """Yield all parts that a rank saves, or holds, in file order: of this rank with their memory.

    Args:
        slices: the slices of parameters, in the order of the buckets.
        states: the state with a placement of its own, each with the prefix of its tensor names.
        replica: the rank's replica, if each has weights of its own.
        bucket_states: the extra state, by bucket and part. None: of another rank.
        specs: the rank's slices of its trained buckets.
        private: the rank's private state, by the name of the tensor.
        saved: True for the parts that it saves.
    """
    weights: list[Region] = []
    flat_state: list[Region] = []
    for parameter, start, stop, kept in reversed(list(slices)):  # from the order of backward to that of the model
        for tensor, box, position in boxes(parameter, start, stop):
            at = slice(position - start, position - start + box.numel)
            for prefix, memory in kept.items():
                dtype, own = (memory, None) if isinstance(memory, torch.dtype) else (memory.dtype, memory[at])
                part = with_replica(TensorBox(prefix + tensor.name, tensor.shape, dtype, box), replica)
                (weights if prefix == MODEL else flat_state).append(Region(part, own))
    yield from weights
    yield from flat_state
    for prefix, state in states:
        for piece in state.sharding.pieces:
            if piece.box.numel:  # padding belongs to no part
                part = TensorBox(prefix + piece.tensor.name, piece.tensor.shape, state.values.dtype, piece.box)
                yield Region(with_replica(part, replica), piece.view(state.values).view(-1))
    for extra, memories in bucket_states.items():
        for number, spec in enumerate(specs):
            for flat, bucket_part in enumerate(bucket_parts(spec, extra, replica)):
                own = None if memories is None else memories[number][flat]
                yield from _extra_regions(extra, spec, bucket_part, own, saved=saved)
    for name, values in private.items():
        shape = tuple(values.shape) or (1,)
        yield Region(TensorBox(name, shape, values.dtype, Box.whole(shape)), values.view(-1))


def _extra_regions(
    state: BucketState, spec: BucketShardSpec, kept: BucketPart, memory: Tensor | None, *, saved: bool
) -> Iterator[Region]:
    """Yield the parts of a flat tensor of a bucket's extra state. An anchor is saved as weights, too."""
    for slot, start, stop in _slots(spec, *(kept.saved if saved else kept.held)):
        dtype = torch.promote_types(slot.parameter.dtype, torch.float32)
        for tensor, box, position in boxes(slot.parameter, start, stop):
            first = slot.start + position - kept.held[0]
            own: Tensor | View | None = None if memory is None else memory[first : first + box.numel]
            part = TensorBox(f"{OPTIMIZER}{state.name}/{tensor.name}", tensor.shape, dtype, box)
            yield Region(with_replica(part, kept.replica), own)
            if saved and state.name == ANCHOR:
                part = TensorBox(MODEL + tensor.name, tensor.shape, slot.parameter.dtype, box)
                if memory is not None and memory.dtype != part.dtype:
                    own = View(Rounded(memory, part.dtype), first, first + box.numel)
                yield Region(part, own)


# ------------------------------------------------------------------------------------------------ this rank's memory


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
    slices, states = held_slices(module, optimizer), held_states(module, optimizer)
    return _regions_here(slices, states, optimizer, saved=False)


def saved_regions(optimizer: Optimizer, *, frozen: bool = True) -> list[Region]:
    """Return the regions that this rank writes. They match its part of the plan. `frozen`: with frozen weights."""
    rank, at = optimizer.mesh.rank, optimizer.mesh.coordinates_of(optimizer.mesh.rank)
    main = [each for each in _states_here(optimizer) if is_main_replica(each[1].sharding, rank, at)]
    return _regions_here(optimizer.saved_slices(frozen=frozen), main, optimizer, saved=True)


def _states_here(optimizer: Optimizer) -> list[tuple[str, State]]:
    return _with_prefixes(optimizer.module_states, optimizer.own_states)


def _regions_here(
    slices: Iterable[StateSlice], states: Iterable[tuple[str, State]], optimizer: Optimizer | None, *, saved: bool
) -> list[Region]:
    """Return the regions of this rank, with all state that its optimizer has beside the slices."""

    def by_prefix(each: StateSlice) -> Mapping[str, Tensor | View | torch.dtype]:
        return {MODEL: each.values, **{f"{OPTIMIZER}{name}/": kept for name, kept in each.state.items()}}

    memory = ((each.parameter, each.start, each.stop, by_prefix(each)) for each in slices)
    if optimizer is None:
        return list(_regions(memory, states))
    owner, rank = _private_owner(optimizer.mesh), optimizer.mesh.rank
    regions = _regions(
        memory,
        states,
        replica=optimizer.replica,
        bucket_states=optimizer.bucket_states,
        specs=[bucket.shard_spec for bucket in optimizer.buckets],
        private=_private(optimizer.rank_states, owner, rank, saved=saved),
        saved=saved,
    )
    return list(regions)
