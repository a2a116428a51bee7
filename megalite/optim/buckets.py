"""Flat buckets of parameters and their gradients, for every ZeRO stage (arXiv:1910.02054).

The ZeRO stage determines what is sharded:

- 0: nothing.
- 1: the optimizer state.
- 2: the gradients too. They are reduced after every micro-batch and accumulated in this rank's slice.
- 3: the parameters too. They are gathered before each use and freed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalite.offload.transfers import Copy, Transfers
from megalite.optim.accumulator import Accumulator, StepCollective
from megalite.optim.codes import BucketCodes
from megalite.optim.fixed_point import FixedPoint
from megalite.optim.flat import allocate_storage, free_storage, is_storage_free, owned
from megalite.optim.layout import BucketLayout, BucketShardSpec, Slot, bucket_layouts, unique_parameters
from megalite.optim.reduction import Reduction, ReductionGroups, ReductionOf
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import (
    NOTHING,
    DeferredGradients,
    DenseGradient,
    Gradient,
    Parameter,
    accumulate_grad,
)
from megalite.parallel.sharding import Sharding, Use


@dataclass(frozen=True)
class DataParallel:
    """Options of data parallelism: what is sharded, and which communication overlaps computation."""

    gradient_dtype: torch.dtype
    """Dtype of the buffers in which gradients are summed."""
    zero_stage: int = 0
    """ZeRO stage, 0 to 3."""
    instances: int = 1
    """Number of instances of hybrid sharding. The ranks of one instance have all shards together."""
    bucket_size: int | None = None
    """Number of elements at which a bucket is closed. None: one bucket, or one per block under ZeRO 2 and 3."""
    overlap_reduce: bool = False
    """Reduce a bucket as soon as its last gradient has arrived."""
    overlap_gather: bool = False
    """Gather parameters while the modules before them compute."""
    allow_unused: bool | None = None
    """Take the gradients of parameters that a step does not use as zero. Ranks may use different ones: reductions start
    in the order of the list of actions, and under ZeRO 3 a chunk must be one block, which all ranks run. None: no, and
    the run has no setting for it."""
    overlap_arrival: bool = False
    """Compute while weights that the host has updated arrive."""
    slices_on_host: Transfers | None = None
    """Engine that fetches this rank's slices of the parameters from the host (ZeRO 3); None: they are on the device."""
    fragments: int = 1
    """Least number of buckets of a chunk, if it has as many parameters."""
    reduction: ReductionOf = Reduction
    """Sum of the gradients over ranks."""
    fixed_point: FixedPoint | None = None
    """Rounding of each gradient before it is added; None: there is none."""

    def gradients_of(self, layout: BucketLayout) -> torch.dtype:
        """Return the dtype in which the gradients of a bucket are summed."""
        kept_in_fp32 = layout.slots[0].parameter.sharding.pieces[0].tensor.fp32
        return torch.promote_types(self.gradient_dtype, torch.float32) if kept_in_fp32 else self.gradient_dtype

    @property
    def overlaps_forward(self) -> bool:
        """True if forward begins before all parameters are there."""
        return self.overlap_gather or self.overlap_arrival


class ParameterBucket:
    """Flat parameters, which are sharded and gathered together. Those of frozen parameters have nothing more."""

    def __init__(
        self,
        shard_spec: BucketShardSpec,
        shard_group: Group,
        options: DataParallel,
        *,
        set_values: Callable[[Parameter], None] | None = None,
    ) -> None:
        """Allocate the bucket and move its parameters into it. The arguments are those of `Bucket`."""
        layout = shard_spec.layout
        self.shard_spec, self.layout, self.slots, self.length = shard_spec, layout, layout.slots, layout.length
        self.shard_group, self.zero_stage = shard_group, shard_spec.zero_stage
        self.prefetch = options.overlap_gather
        """True if ZeRO 3 gathers this bucket while the previous block computes."""
        self.waits_before_use = options.overlaps_forward
        """True if forward may begin before the parameters are there, under ZeRO 0 to 2."""
        self.arriving: list[Copy] = []
        """Copies of weights that the host has updated and that are on their way."""
        first = self.slots[0].parameter
        self.parameters = torch.zeros(layout.length, dtype=first.dtype, device=first.device)
        for slot in self.slots:
            self._adopt(slot, set_values)
        self.parameter_shard = owned(self.parameters, self.shard_group)
        """Slice of the parameters that this rank owns."""
        self._transfers = options.slices_on_host if self.zero_stage == 3 else None
        self._fetched: tuple[Tensor, Copy] | None = None
        self._last_fetch: Copy | None = None
        self.codes: BucketCodes | None = None
        """Codes of the parameters, if they are gathered in place of values."""
        if self.zero_stage == 3:
            own = self.parameter_shard
            self.parameter_shard = own.clone() if self._transfers is None else self._transfers.copied_to_host(own)
            if first.coded is not None:
                self.codes = BucketCodes(self.slots, self.owned_range[0], shard_group)
                self.parameters = torch.empty(layout.length, dtype=torch.uint8, device=first.device)
            free_storage(self.parameters)
        self._pending_gather: collectives.Pending | None = None
        self.keeps_gathered = False
        """True while `free_parameters` must not free them."""

    @property
    def owned_range(self) -> tuple[int, int]:
        """Range of this rank's slice, [start, stop)."""
        return self.shard_spec.owned

    @property
    def slice_on_host(self) -> bool:
        """True if `parameter_shard` is in the host's memory."""
        return self._transfers is not None

    def _adopt(self, slot: Slot, set_values: Callable[[Parameter], None] | None) -> None:
        parameter = slot.parameter
        place = self.parameters[slot.start : slot.stop].view(parameter.shape)
        if set_values is None:
            place.copy_(parameter.detach())
        parameter.data = place
        if set_values is not None:
            set_values(parameter)

    def parameter_gather(self) -> StepCollective[None]:
        """Return the collective that starts to gather the parameters."""
        return StepCollective("gather of parameters", self.shard_group.ranks, self.begin_parameter_gather)

    def begin_parameter_gather(self) -> None:
        """Start to gather the parameters from the ranks' slices, unless they are gathered or in flight."""
        if self.arriving:
            self._await_arrivals()
        own = self.parameter_shard
        if self.zero_stage == 3:
            if not is_storage_free(self.parameters):
                return
            self.begin_fetch()
            if self._fetched is not None:
                (own, copy), self._fetched = self._fetched, None
                copy.wait()
            if self.codes is not None:
                own = self.codes.of_slice(own)
            allocate_storage(self.parameters)
        self._pending_gather = collectives.all_gather_async(own, self.shard_group, out=self.parameters)

    def begin_fetch(self) -> None:
        """Begin to fetch this rank's slice from the host, for the next gather, unless it is there or on its way."""
        if self._transfers is not None and self._fetched is None and is_storage_free(self.parameters):
            place = torch.empty_like(self.parameter_shard, device=self.parameters.device)
            self._last_fetch = self._transfers.begin("to device", self.parameter_shard, place)
            self._fetched = place, self._last_fetch

    def begin_uses(self) -> None:
        """Take this rank's slice as unchanged until `end_uses`: its codes are made once, if it is on the device."""
        if self.codes is not None and not self.slice_on_host:
            self.codes.keep()

    def end_uses(self) -> None:
        """Forget codes, and a slice that was fetched for a block that was not reached: a gather makes them again."""
        self._fetched = None
        if self.codes is not None:
            self.codes.drop()

    def release_slice(self) -> None:
        """Wait until the slice on the host may change. One that was fetched before is not used."""
        if self._last_fetch is not None:
            self._last_fetch.release()
        self._fetched = self._last_fetch = None

    def _await_arrivals(self) -> None:
        for copy in self.arriving:
            copy.wait()
        self.arriving.clear()

    def finish_parameter_gather(self) -> None:
        if self.arriving:
            self._await_arrivals()
        if self._pending_gather is not None:
            self._pending_gather.wait()
            self._pending_gather = None
            if self.codes is not None:
                self.codes.hand_over(self.parameters)

    def free_parameters(self) -> None:
        """Free the gathered parameters under ZeRO 3; this rank's slice is kept."""
        if self.zero_stage == 3 and not self.keeps_gathered:
            self.finish_parameter_gather()
            free_storage(self.parameters)
            for slot in self.slots:
                slot.parameter.codes = None


class Bucket(ParameterBucket):
    """Unit of communication: flat parameters, and one accumulator of flat gradients per chunk that uses them.

    Gradients are added only through `accumulate`.
    """

    def __init__(
        self,
        shard_spec: BucketShardSpec,
        options: DataParallel,
        groups: ReductionGroups,
        *,
        uses: Mapping[int, Mapping[int, Use]],
        in_flight: list[Accumulator],
        set_values: Callable[[Parameter], None] | None = None,
    ) -> None:
        """Allocate the bucket and move its parameters into it.

        Args:
            shard_spec: the layout of the bucket and this rank's slices of it.
            options: the options of data parallelism.
            groups: the process groups of the gradient reduction.
            uses: maps a chunk to the uses of the parameters in it, by their numbers.
            in_flight: the accumulators that are being reduced under ZeRO 2 and 3; one list shared by all buckets.
            set_values: sets the values of a parameter after it has been moved. None: its current values are copied.
        """
        super().__init__(shard_spec, groups.shards, options, set_values=set_values)
        self.accumulators = tuple(
            Accumulator(
                self.layout,
                options.reduction(shard_spec, groups),
                in_flight,
                chunk=chunk,
                uses=there,
                stage=self.zero_stage,
                overlap=options.overlap_reduce,
                dtype=options.gradients_of(self.layout),
                allow_unused=options.allow_unused,
            )
            for chunk, there in uses.items()
        )
        """One per chunk, in the order of chunks. `completion` adds the sums of the others to the sum of the first."""
        self.gradients, self.gradient_shard = self.accumulators[0].gradients, self.accumulators[0].gradient_shard
        self._accumulator_of = {use: a for a in self.accumulators for use in a.uses}
        self._handed_over = dict.fromkeys(uses, 0)  # number of gradients accumulated in this step, by chunk
        self._allow_unused, self.fixed_point = options.allow_unused, options.fixed_point
        if self.fixed_point is not None:
            for slot in self.slots:
                self.fixed_point.require(slot.parameter.sharding)
        self.deferred: DeferredGradients | None = None
        self.owned_runs = list(self.layout.runs(*self.owned_range))
        """This rank's slice, divided into runs of elements of one parameter group."""
        for slot in self.slots:
            slot.parameter.gradient_buffer = self
            slot.parameter.register_post_accumulate_grad_hook(_take_ordinary_gradient)

    def begin_step(self, micro_batches: int) -> None:
        """Expect the gradients of this number of micro-batches."""
        for accumulator in self.accumulators:
            self._handed_over[accumulator.chunk] = 0
            accumulator.begin_step(micro_batches)

    def accumulate(self, parameter: Parameter, gradient: Gradient, use: int = 0) -> None:
        """Add the gradient of one use, or keep it for later if gradients are deferred.

        Under ZeRO 3, the last gradient of a micro-batch in a chunk also frees the parameters; if some may be unused,
        `begin_reduction` does.
        """
        accumulator = self._accumulator_of[use]
        if self.fixed_point is not None:
            gradient = self.fixed_point.gradient(gradient)
        if self.deferred is not None:
            self.deferred.keep(partial(accumulator.add, parameter, gradient, use))
        else:
            accumulator.add(parameter, gradient, use)
        if self._allow_unused:
            return
        self._handed_over[accumulator.chunk] += 1
        if self._handed_over[accumulator.chunk] % accumulator.gradients_per_micro_batch == 0:
            self.free_parameters()

    @property
    def frees_parameters(self) -> bool:
        return self.zero_stage == 3

    def begin_reduction(self, chunk: int, micro_batches: int) -> None:
        """Start the reduction that is due after this number of micro-batches of a chunk, unless it has started."""
        for accumulator in self.accumulators:
            if accumulator.chunk == chunk:
                accumulator.begin_reduction(micro_batches)
                if self._allow_unused:
                    self.free_parameters()

    def completion(self) -> Iterator[StepCollective[object]]:
        """Yield the operations that complete this rank's slice of the gradients, summed over the uses in all chunks."""
        for accumulator in self.accumulators:
            yield from accumulator.completion()
        for other in self.accumulators[1:]:
            yield StepCollective("sum of the uses", (), partial(self.gradient_shard.add_, other.gradient_shard))
        first = self.accumulators[0]
        yield first.sum_partial()
        yield StepCollective("what is applied", (), partial(first.reduction.complete, self.gradient_shard))

    def apply(self) -> None:
        """Keep what the messages of this step have left out: its update will be applied."""
        for accumulator in self.accumulators:
            accumulator.reduction.apply()

    def gradient_gather(self) -> StepCollective[collectives.Pending]:
        """Return the collective that starts to gather the gradients from the ranks' slices."""
        gather = partial(self.accumulators[0].reduction.begin_gather, self.gradient_shard, self.gradients)
        return StepCollective("gather of gradients", self.shard_group.ranks, gather)


def _take_ordinary_gradient(parameter: Tensor) -> None:
    # This is a function and not a method: a hook that refers to the bucket would create a reference cycle through
    # torch, and the bucket, its network and its process groups would never be released.
    if isinstance(parameter, Parameter) and parameter.grad is not None:
        gradient, parameter.grad = parameter.grad, None
        accumulate_grad(parameter, DenseGradient(gradient))
        for _ in range(parameter.sharding.uses[0].times - 1):  # autograd has added the others to it
            accumulate_grad(parameter, NOTHING)


def make_buckets(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
    set_values: Callable[[Parameter], None] | None = None,
) -> list[Bucket]:
    """Move the trained parameters of `networks` into the flat buckets that `plan_buckets` returns.

    Args:
        networks: one per chunk of this rank.
        mesh: the mesh of ranks.
        options: the options of data parallelism.
        blocks: the blocks of each network, in order of execution.
        set_values: sets the values of a parameter after it has been moved. None: its current values are copied.
    """
    chunks_of = _chunks_by_parameter(networks)
    in_flight: list[Accumulator] = []
    buckets = []
    for layout in plan_buckets(networks, mesh, options, blocks=blocks):
        first = layout.slots[0].parameter
        peers = mesh.ranks(*first.sharding.data_parallel_axes)
        groups = _reduction_groups(mesh, peers, options.instances, first.sharding.partial_group)
        spec, uses = shard_spec(layout, mesh, options), _uses_by_chunk(first.sharding, chunks_of[id(first)])
        buckets.append(Bucket(spec, options, groups, uses=uses, in_flight=in_flight, set_values=set_values))
    return buckets


def make_frozen_buckets(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
    set_values: Callable[[Parameter], None] | None = None,
) -> list[ParameterBucket]:
    """Move the frozen parameters of `networks` into flat buckets, as `make_buckets` does with the trained ones."""
    buckets = []
    for layout in plan_buckets(networks, mesh, options, blocks=blocks, frozen=True):
        peers = mesh.ranks(*layout.slots[0].parameter.sharding.data_parallel_axes)
        shards = _reduction_groups(mesh, peers, options.instances, ()).shards
        spec = shard_spec(layout, mesh, options)
        buckets.append(ParameterBucket(spec, shards, options, set_values=set_values))
    return buckets


def shard_spec(layout: BucketLayout, mesh: ParallelMesh, options: DataParallel) -> BucketShardSpec:
    """Return the slices of a bucket that this rank has."""
    peers = mesh.ranks(*layout.slots[0].parameter.sharding.data_parallel_axes)
    return BucketShardSpec.of(
        layout,
        mesh.rank,
        peers=len(peers),
        position=peers.index(mesh.rank),
        zero_stage=options.zero_stage,
        instances=options.instances,
        alone=options.slices_on_host is not None,
    )


def plan_buckets(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
    frozen: bool = False,
) -> list[BucketLayout]:
    """Return the layouts of the buckets that `make_buckets` makes, without allocation or communication; or, if
    `frozen`, those of `make_frozen_buckets`.

    The buckets are approximately in the order in which backward completes them. A bucket contains parameters of one
    chunk only, and under ZeRO 2 and 3 of one of the `blocks` only. A parameter that several chunks share is in a bucket
    of the lowest of these chunks.
    """
    layouts: list[BucketLayout] = []
    chunks_of = _chunks_by_parameter(networks)
    by_chunk = [unique_parameters(network) for network in networks]
    dealt = {id(p) for parameters in by_chunk for p in parameters if p.requires_grad is frozen}  # in other buckets
    for chunk in reversed(range(len(networks))):
        in_lower = {id(parameter) for parameters in by_chunk[:chunk] for parameter in parameters}
        for part in [*(reversed(blocks[chunk]) if blocks and options.zero_stage >= 2 else ()), networks[chunk]]:
            parameters = [parameter for parameter in unique_parameters(part) if id(parameter) not in dealt | in_lower]
            dealt.update(map(id, parameters))
            size = options.bucket_size
            if options.fragments > 1:
                size = -(-sum(parameter.numel() for parameter in by_chunk[chunk]) // options.fragments)
            layouts += bucket_layouts(parameters, mesh, size, chunks_of)
    return layouts


def _chunks_by_parameter(networks: Sequence[nn.Module]) -> dict[int, list[int]]:
    """Return the chunks that contain each parameter, by the id of the parameter."""
    chunks: dict[int, list[int]] = {}
    for chunk, network in enumerate(networks):
        for parameter in unique_parameters(network):
            chunks.setdefault(id(parameter), []).append(chunk)
    return chunks


def _uses_by_chunk(record: Sharding, chunks: Sequence[int]) -> dict[int, dict[int, Use]]:
    """Return the uses of a parameter by chunk and number.

    Raises:
        ValueError: a chunk contains the parameter but does not use it, or uses it but does not contain it.
    """
    if {use.chunk for use in record.uses} != set(range(len(chunks))):
        raise ValueError(f"{record.name} is in {len(chunks)} chunks, but its uses are {record.uses}")
    return {
        chunk: {number: use for number, use in enumerate(record.uses) if use.chunk == position}
        for position, chunk in enumerate(chunks)
    }


def _reduction_groups(
    mesh: ParallelMesh, ranks: tuple[int, ...], instances: int, partial_group: tuple[int, ...]
) -> ReductionGroups:
    """Divide the data-parallel `ranks` into instances of hybrid sharding, and return this rank's groups.

    Raises:
        ValueError: the number of ranks is not divisible by the number of instances.
    """
    if len(ranks) % instances:
        raise ValueError(f"{instances} instances (hybrid sharding) do not divide {len(ranks)} data-parallel ranks")
    size = len(ranks) // instances
    instance, position = divmod(ranks.index(mesh.rank), size)
    return ReductionGroups(
        shards=mesh.group_of(ranks[instance * size : (instance + 1) * size]),
        instances=mesh.group_of(ranks[position::size]),
        partial=mesh.group_of(partial_group or (mesh.rank,)),
    )
