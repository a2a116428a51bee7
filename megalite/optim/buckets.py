"""Flat buckets of parameters and their gradients, for every ZeRO stage (arXiv:1910.02054).

The stage says what is sharded. 0: nothing. 1: the optimizer's state. 2: gradients too: they are reduced after every
micro-batch and accumulated in this rank's slice. 3: parameters too: gathered before a use, freed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalite.optim.accumulator import Accumulator, Collective, ReductionGroups
from megalite.optim.bucket_shard import BucketShardSpec
from megalite.optim.flat import allocate_storage, free_storage, is_storage_free, owned
from megalite.optim.layout import BucketLayout, Slot, bucket_layouts, data_parallel_ranks, unique_parameters
from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DeferredGradients, DenseGradient, Gradient, Parameter, accumulate_grad
from megalite.parallel.sharding import Sharding


@dataclass(frozen=True)
class DataParallel:
    """Options: how a run spreads its state over data-parallel ranks, and which communication overlaps computation."""

    gradient_dtype: torch.dtype
    """Dtype of the buffers in which gradients are summed."""
    stage: int = 0
    """ZeRO 0 to 3."""
    instances: int = 1
    """Number of groups of ranks that each hold all shards (hybrid sharding)."""
    bucket_size: int | None = None
    """Elements at which a bucket is closed; None: one bucket, under ZeRO 2 and 3 one per block."""
    overlap_reduce: bool = False
    """Reduce a bucket as soon as its last gradient has arrived."""
    overlap_gather: bool = False
    """Gather parameters while the modules before them compute."""


class Bucket:
    """One unit of communication: flat parameters, and an accumulator of flat gradients for each chunk that uses them.

    Gradients enter through `accumulate` alone.
    """

    def __init__(
        self,
        shard_spec: BucketShardSpec,
        options: DataParallel,
        groups: ReductionGroups,
        *,
        uses: Mapping[int, Mapping[int, int]],
        in_flight: list[Accumulator],
        set_values: Callable[[Parameter], None] | None = None,
    ) -> None:
        """`uses`: by chunk, the numbers of the parameters' uses there, each with its gradients per micro-batch.

        `set_values` sets a parameter's values in its place here; None: its own are copied. `in_flight` lists, for all
        buckets together, those of ZeRO 2 and 3 that are being reduced.
        """
        layout = shard_spec.layout
        self.shard_spec, self.layout, self.slots, self.length = shard_spec, layout, layout.slots, layout.length
        self.shard_group, self.stage = groups.shards, shard_spec.stage
        self.prefetch = options.overlap_gather
        """True if ZeRO 3 gathers it before its block's turn."""
        self.accumulators = tuple(
            Accumulator(
                layout,
                groups,
                in_flight,
                chunk=chunk,
                uses=there,
                stage=self.stage,
                overlap=options.overlap_reduce,
                dtype=options.gradient_dtype,
            )
            for chunk, there in uses.items()
        )
        """One per chunk, the lowest first. `completion` adds the sums of the others to that of the first."""
        self.gradients, self.gradient_shard = self.accumulators[0].gradients, self.accumulators[0].gradient_shard
        self._accumulator_of = {use: a for a in self.accumulators for use in a.flats}
        self._handed_over = dict.fromkeys(uses, 0)  # by chunk, gradients of the step
        self.deferred: DeferredGradients | None = None
        first = self.slots[0].parameter
        self.parameters = torch.zeros(layout.length, dtype=first.dtype, device=first.device)
        self.owned_runs = list(layout.runs(*self.owned_range))
        """This rank's slice, by parameter group."""
        for slot in self.slots:
            self._adopt(slot, set_values)
        self.parameter_shard = owned(self.parameters, self.shard_group)
        """This rank's slice."""
        if self.stage == 3:
            self.parameter_shard = self.parameter_shard.clone()
            free_storage(self.parameters)
        self._pending_gather: collectives.Pending | None = None

    def _adopt(self, slot: Slot, set_values: Callable[[Parameter], None] | None) -> None:
        parameter = slot.parameter
        place = self.parameters[slot.start : slot.stop].view(parameter.shape)
        if set_values is None:
            place.copy_(parameter.detach())
        parameter.data = place
        if set_values is not None:
            set_values(parameter)
        parameter.gradient_buffer = self
        parameter.register_post_accumulate_grad_hook(_take_ordinary_gradient)

    @property
    def owned_range(self) -> tuple[int, int]:
        """This rank's slice, [start, stop)."""
        return self.shard_spec.owned

    # ------------------------------------------------------------------------------------------------ gradients

    def begin_step(self, micro_batches: int) -> None:
        """Expect the gradients of this number of micro-batches."""
        for accumulator in self.accumulators:
            self._handed_over[accumulator.chunk] = 0
            accumulator.begin_step(micro_batches)

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        """Add the gradient of a use, or keep it for later if gradients are deferred. After a chunk's last gradient of a
        micro-batch, added or kept, ZeRO 3 frees the parameters.
        """
        accumulator = self._accumulator_of[use]
        if self.deferred is not None:
            self.deferred.keep(partial(accumulator.add, parameter, gradient, use))
        else:
            accumulator.add(parameter, gradient, use)
        self._handed_over[accumulator.chunk] += 1
        if self._handed_over[accumulator.chunk] % accumulator.gradients_per_micro_batch == 0:
            self.free_parameters()

    @property
    def frees_parameters(self) -> bool:
        return self.stage == 3

    def begin_reduction(self, chunk: int, micro_batches: int) -> None:
        """Begin the reduction that is due after this number of a chunk's micro-batches, unless it has begun."""
        for accumulator in self.accumulators:
            if accumulator.chunk == chunk:
                accumulator.begin_reduction(micro_batches)

    def completion(self) -> Iterator[Collective[object]]:
        """Yield the operations that complete this rank's slice of the gradients, with those of uses in other chunks."""
        for accumulator in self.accumulators:
            yield from accumulator.completion()
        for other in self.accumulators[1:]:
            yield Collective("sum of the uses", (), partial(self.gradient_shard.add_, other.gradient_shard))

    def gradient_gather(self) -> Collective[collectives.Pending]:
        """Return the collective that begins to gather the gradients from the ranks' slices."""
        gather = partial(collectives.all_gather_async, self.gradient_shard, self.shard_group, out=self.gradients)
        return Collective("gather of gradients", self.shard_group.ranks, gather)

    # ------------------------------------------------------------------------------------------------ parameters

    def parameter_gather(self) -> Collective[None]:
        """Return the collective that begins to gather the parameters."""
        return Collective("gather of parameters", self.shard_group.ranks, self.begin_parameter_gather)

    def begin_parameter_gather(self) -> None:
        """Start to gather the parameters from the ranks' slices, unless they are gathered or in flight."""
        if self.stage == 3:
            if not is_storage_free(self.parameters):
                return
            allocate_storage(self.parameters)
        self._pending_gather = collectives.all_gather_async(self.parameter_shard, self.shard_group, out=self.parameters)

    def finish_parameter_gather(self) -> None:
        if self._pending_gather is not None:
            self._pending_gather.wait()
            self._pending_gather = None

    def free_parameters(self) -> None:
        """Free all but this rank's slice, under ZeRO 3."""
        if self.stage == 3:
            self.finish_parameter_gather()
            free_storage(self.parameters)


def _take_ordinary_gradient(parameter: Tensor) -> None:
    # A function, no method of the bucket: torch would never release the bucket, its network and its process groups.
    if isinstance(parameter, Parameter) and parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        accumulate_grad(parameter, DenseGradient(gradient))


def make_buckets(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
    set_values: Callable[[Parameter], None] | None = None,
) -> list[Bucket]:
    """Move the parameters of `networks`, one per chunk, into the flat buckets of `plan_buckets`.

    `set_values` sets a parameter's values in its place there; None: its own are copied.
    """
    chunks_of = _chunks_by_parameter(networks)
    in_flight: list[Accumulator] = []
    buckets = []
    for layout in plan_buckets(networks, mesh, options, blocks=blocks):
        first = layout.slots[0].parameter
        peers, instances = data_parallel_ranks(mesh, first.sharding), options.instances
        groups = _reduction_groups(mesh, peers, instances, first.sharding.replica_group)
        position, stage = peers.index(mesh.rank), options.stage
        shard_spec = BucketShardSpec.of(
            layout, mesh.rank, peers=len(peers), position=position, stage=stage, instances=instances
        )
        uses = _uses_by_chunk(first.sharding, chunks_of[id(first)])
        buckets.append(Bucket(shard_spec, options, groups, uses=uses, in_flight=in_flight, set_values=set_values))
    return buckets


def plan_buckets(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
) -> list[BucketLayout]:
    """The buckets that `make_buckets` makes, in about backward's order, without memory or communication.

    No bucket holds parameters of two chunks, nor under ZeRO 2 and 3 of two of the `blocks` of a chunk. A parameter of
    several chunks stands with the lowest.
    """
    layouts: list[BucketLayout] = []
    chunks_of = _chunks_by_parameter(networks)
    dealt: set[int] = set()
    by_chunk = [unique_parameters(network) for network in networks]
    for chunk in reversed(range(len(networks))):
        in_lower = {id(parameter) for parameters in by_chunk[:chunk] for parameter in parameters}
        for part in [*(reversed(blocks[chunk]) if blocks and options.stage >= 2 else ()), networks[chunk]]:
            parameters = [parameter for parameter in unique_parameters(part) if id(parameter) not in dealt | in_lower]
            dealt.update(map(id, parameters))
            layouts += bucket_layouts(parameters, mesh, options.bucket_size, chunks_of)
    return layouts


def _chunks_by_parameter(networks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """The chunks that hold each parameter, by its id."""
    chunks: dict[int, list[int]] = {}
    for chunk, network in enumerate(networks):
        for parameter in unique_parameters(network):
            chunks.setdefault(id(parameter), []).append(chunk)
    return chunks


def _uses_by_chunk(record: Sharding, chunks: Sequence[int]) -> dict[int, dict[int, int]]:
    """Return, by chunk, the numbers of the uses there, each with its gradients per micro-batch.

    Raises ValueError if a chunk holds the parameter and has no use of it, or the other way round.
    """
    if {use.chunk for use in record.uses} != set(range(len(chunks))):
        raise ValueError(f"{record.name} is held by {len(chunks)} chunks; its uses are {record.uses}")
    return {
        chunk: {number: use.times for number, use in enumerate(record.uses) if use.chunk == position}
        for position, chunk in enumerate(chunks)
    }


def _reduction_groups(
    mesh: ParallelMesh, ranks: tuple[int, ...], instances: int, replicas: tuple[int, ...]
) -> ReductionGroups:
    """Cut the data-parallel `ranks` into instances of hybrid sharding.

    Raises ValueError if the instances would have different numbers of ranks.
    """
    if len(ranks) % instances:
        raise ValueError(f"{instances} instances (hybrid sharding) do not divide {len(ranks)} data-parallel ranks")
    size = len(ranks) // instances
    instance, position = divmod(ranks.index(mesh.rank), size)
    return ReductionGroups(
        shards=mesh.group_of(ranks[instance * size : (instance + 1) * size]),
        instances=mesh.group_of(ranks[position::size]),
        replicas=mesh.group_of(replicas or (mesh.rank,)),
    )
