"""Flat buckets: where parameters live and gradients are gathered, for every ZeRO stage (arXiv:1910.02054).

The stage says what stays sharded between uses. 0: nothing. 1: the optimizer's state. 2: gradients too: they are reduced
after every micro-batch and accumulated in this rank's slice. 3: parameters too: gathered before a use, freed after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.optim.layout import BucketLayout, Slot, bucket_layouts
from megalite.optim.reduction import ReduceScatter, Reduction
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter

REDUCTIONS_IN_FLIGHT = 2
"""Under ZeRO 2 and 3: whole gradients of so many buckets are kept while they are reduced beside backward."""


@dataclass(frozen=True)
class DataParallel:
    """How a run spreads what it keeps over its data-parallel ranks, and what of the talking overlaps computation."""

    gradient_dtype: torch.dtype
    """Of the buffers in which gradients are gathered and summed."""
    stage: int = 0
    """ZeRO 0 to 3."""
    instances: int = 1
    """Groups of ranks that each hold a whole set of shards (hybrid sharding)."""
    bucket_size: int | None = None
    """Elements at which a bucket is closed; None: one bucket, under ZeRO 2 and 3 one a block."""
    overlap_reduce: bool = False
    """Reduce a bucket as soon as its last gradient has arrived."""
    overlap_gather: bool = False
    """Gather parameters while what comes before them still computes."""


class Bucket:
    """One message: flat parameters, flat gradients, and the counting of what has arrived.

    Gradients enter through `accumulate` alone.
    """

    def __init__(
        self,
        layout: BucketLayout,
        options: DataParallel,
        shard_group: Group,
        reduction: Reduction,
        *,
        counted_here: bool,
        in_flight: list[Bucket] | None = None,
        set_values: Callable[[Parameter], None] | None = None,
    ) -> None:
        """`set_values` gives a parameter its values in its place here; None: it brings them.

        `in_flight` lists, for all buckets together, those of ZeRO 2 and 3 that are being reduced.
        """
        self.layout, self.slots, self.length = layout, layout.slots, layout.length
        self.shard_group, self.reduction = shard_group, reduction
        self.stage = options.stage if shard_group.size > 1 else 0
        self.counted_here = counted_here
        """Whether the norm counts this rank's copy."""
        self._overlap = options.overlap_reduce
        self._in_flight = in_flight if in_flight is not None else []
        self.prefetch = options.overlap_gather
        """Whether ZeRO 3 gathers it before its block's turn."""
        first = self.slots[0].parameter
        self.parameters = torch.zeros(layout.length, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros(layout.length, dtype=options.gradient_dtype, device=first.device)
        self.owned_runs = list(layout.runs(*self.owned_range))
        """This rank's slice, by parameter group."""
        self._slot_of = {id(slot.parameter): slot for slot in self.slots}
        for slot in self.slots:
            self._adopt(slot, set_values)
        self.parameter_shard, self.gradient_shard = self.owned(self.parameters), self.owned(self.gradients)
        """This rank's slices."""
        if self.stage >= 2:
            self.gradient_shard = self.gradient_shard.clone()
            _free(self.gradients)
        if self.stage == 3:
            self.parameter_shard = self.parameter_shard.clone()
            _free(self.parameters)
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), layout.length]
        self._gaps = [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]
        self._rounds = self._rounds_due = self._micro_batches_a_round = 0  # the step's reductions: begun, due
        self._arrived: dict[int, int] = {}
        self._due: dict[int, int] = {}
        self._outstanding = 0
        self._pending_reduction: collectives.Pending | None = None
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
        parameter.register_post_accumulate_grad_hook(self._take_ordinary_gradient)

    def owned(self, flat: Tensor) -> Tensor:
        """This rank's slice of a tensor of the bucket's length."""
        return flat.view(self.shard_group.size, -1)[self.shard_group.rank]

    @property
    def owned_range(self) -> tuple[int, int]:
        """First and behind the last element of this rank's slice."""
        length = self.length // self.shard_group.size
        return self.shard_group.rank * length, (self.shard_group.rank + 1) * length

    def gradient(self, parameter: Parameter) -> Tensor:
        """The gathered gradient of one of the bucket's parameters, in its shape."""
        slot = self._slot_of[id(parameter)]
        return self.gradients[slot.start : slot.stop].view(parameter.shape)

    # ------------------------------------------------------------------------------------------------ gradients

    def begin_step(self, micro_batches: int) -> None:
        """Expect one gradient for each use of each parameter in each of `micro_batches`."""
        self._rounds, self._rounds_due = 0, micro_batches if self.stage >= 2 else 1
        self._micro_batches_a_round = micro_batches // self._rounds_due
        self._begin_round(self._micro_batches_a_round)

    def _begin_round(self, micro_batches: int) -> None:
        self._arrived = dict.fromkeys(self._slot_of, 0)
        self._due = {id(slot.parameter): slot.parameter.sharding.uses * micro_batches for slot in self.slots}
        self._outstanding = sum(self._due.values())

    def _take_ordinary_gradient(self, parameter: Tensor) -> None:
        if isinstance(parameter, Parameter) and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.accumulate(parameter, DenseGradient(gradient))

    def accumulate(self, parameter: Parameter, gradient: Gradient) -> None:
        """Add a gradient. With the last that is due in a round the parameters have been used; the reduction starts
        where it overlaps backward, or where the next round needs the room.
        """
        key = id(parameter)
        if self._arrived[key] == self._due[key]:
            name = parameter.sharding.name
            raise MegaliteError(f"{name} received more than the {self._due[key]} gradients due: its `uses` is wrong")
        if self.stage >= 2 and self._outstanding == sum(self._due.values()):
            self._make_room()
        gradient.add_to(self.gradient(parameter), overwrite=self._arrived[key] == 0)
        self._arrived[key] += 1
        self._outstanding -= 1
        if self._outstanding == 0:
            self.free_parameters()
            if self._overlap or self.stage >= 2:
                self._begin_reduction()

    def _make_room(self) -> None:
        self._finish_round()
        _fill(self.gradients)
        for start, stop in self._gaps:
            self.gradients[start:stop].zero_()

    def _begin_reduction(self) -> None:
        for slot in self.slots:
            arrived, due = self._arrived[id(slot.parameter)], self._due[id(slot.parameter)]
            if arrived != due:
                name = slot.parameter.sharding.name
                raise MegaliteError(f"{name} received {arrived} of the {due} gradients due: is it used in forward?")
        self._pending_reduction = self.reduction.begin(self.gradients, None if self.stage >= 2 else self.gradient_shard)
        self._rounds += 1
        if self._rounds < self._rounds_due:
            self._begin_round(1)
        if self.stage >= 2:
            self._in_flight.append(self)
            while len(self._in_flight) > (REDUCTIONS_IN_FLIGHT if self._overlap else 0):
                self._in_flight[0]._finish_round()

    def _finish_round(self) -> None:
        """Wait for the reduction under way, if there is one; ZeRO 2 and 3 add its slice to this rank's and free the
        room.
        """
        if self._pending_reduction is None:
            return
        slice_of_sum = self._pending_reduction.wait()
        self._pending_reduction = None
        if self.stage >= 2:
            self._in_flight.remove(self)
            DenseGradient(slice_of_sum).add_to(self.gradient_shard, overwrite=self._rounds == 1)
            _free(self.gradients)

    def begin_reduction(self, micro_batches: int) -> None:
        """Reduce what so many micro-batches complete, unless that has begun. Raises MegaliteError, naming a parameter,
        where gradients have not arrived.
        """
        if self._rounds < micro_batches // self._micro_batches_a_round:
            self._begin_reduction()

    def finish_reduction(self) -> None:
        """Complete this rank's slice of the step's gradients."""
        if self._rounds < self._rounds_due:
            raise RuntimeError(f"of {self._rounds_due} reductions that a step has, {self._rounds} were begun")
        self._finish_round()
        self.reduction.finish(self.gradient_shard)

    # ------------------------------------------------------------------------------------------------ parameters

    def gather(self, flat: Tensor) -> collectives.Pending:
        """Begin to fill a flat tensor of the bucket's length from the slices of it that its ranks own."""
        return collectives.all_gather_async(self.owned(flat), self.shard_group, out=flat)

    def begin_parameter_gather(self) -> None:
        """Start to make the parameters whole from the ranks' slices, unless they are or are being made so."""
        if self.stage == 3:
            if not _is_free(self.parameters):
                return
            _fill(self.parameters)
        self._pending_gather = collectives.all_gather_async(self.parameter_shard, self.shard_group, out=self.parameters)

    def finish_parameter_gather(self) -> None:
        if self._pending_gather is not None:
            self._pending_gather.wait()
            self._pending_gather = None

    def free_parameters(self) -> None:
        """Under ZeRO 3: keep this rank's slice alone."""
        if self.stage == 3:
            self.finish_parameter_gather()
            _free(self.parameters)


def _is_free(tensor: Tensor) -> bool:
    return tensor.untyped_storage().size() == 0


def _free(tensor: Tensor) -> None:
    """Give back the memory under a tensor and all its views; they keep their shapes."""
    tensor.untyped_storage().resize_(0)


def _fill(tensor: Tensor) -> None:
    """Give a freed tensor memory again, not yet set. (Saved for backward, its views are as good as before: refilling
    does not touch the version counters of parameters, which are theirs alone.)
    """
    if _is_free(tensor):
        tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)


def make_buckets(
    module: nn.Module,
    mesh: ParallelMesh,
    options: DataParallel,
    *,
    blocks: Sequence[nn.Module] = (),
    set_values: Callable[[Parameter], None] | None = None,
) -> list[Bucket]:
    """Move the parameters of `module` into flat buckets, in about backward's order.

    `set_values` gives a parameter its values in its place; None: it has them. Under ZeRO 2 and 3 no bucket holds
    parameters of two of the `blocks`.
    """
    dense, expert = mesh.ranks("dp", "cp"), mesh.ranks("edp")
    buckets: list[Bucket] = []
    in_flight: list[Bucket] = []
    for part in [*(reversed(blocks) if options.stage >= 2 else ()), module]:
        for layout in bucket_layouts(part, options.bucket_size, len(dense), len(expert)):
            record = layout.slots[0].parameter.sharding
            shard_group, instance_group = _instance(mesh, expert if record.expert else dense, options.instances)
            replica_group = mesh.group_of(record.replica_group or (mesh.rank,))
            bucket = Bucket(
                layout,
                options,
                shard_group,
                ReduceScatter(shard_group, instance_group, replica_group),
                counted_here=mesh.rank == min(record.copies) and instance_group.rank == 0,
                in_flight=in_flight,
                set_values=set_values,
            )
            buckets.append(bucket)
    return buckets


def _instance(mesh: ParallelMesh, ranks: tuple[int, ...], instances: int) -> tuple[Group, Group]:
    """The ranks among which this one's instance is sharded, and those with the same slice in the other instances."""
    size = len(ranks) // instances
    instance, position = divmod(ranks.index(mesh.rank), size)
    return mesh.group_of(ranks[instance * size : (instance + 1) * size]), mesh.group_of(ranks[position::size])
