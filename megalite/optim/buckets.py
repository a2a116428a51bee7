"""Flat buffers: where parameters live and gradients are gathered, cut into buckets that travel as one message.

Parameters of one kind (dtype, data-parallel peers, copies) stand one behind the other in reverse order of registration,
about the order in which backward reaches them. Each rank of the bucket's shard group owns one equal slice of it.
The layout is a pure function of the parameters' sizes, so that all members of a shard or replica group have the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.errors import MegaliteError
from megalite.parallel import collectives
from megalite.parallel.mesh import Group, ParallelMesh
from megalite.parallel.parameter import DenseGradient, Gradient, Parameter, named_pieces

ALIGNMENT = 64
"""Elements to whose multiple a parameter's start is aligned: 256 bytes of fp32, a vector load of any device."""


@dataclass(frozen=True)
class Slot:
    """A parameter's place in its bucket."""

    parameter: Parameter
    start: int
    stop: int


def lay_out(sizes: Sequence[int], bucket_size: int | None) -> list[list[tuple[int, int, int]]]:
    """Deal parameters into buckets: for each bucket, (index, start, stop) inside it, in order.

    A bucket is closed once it holds `bucket_size` elements (None: one bucket). Starts are aligned.
    """
    buckets: list[list[tuple[int, int, int]]] = []
    end = 0
    for index, size in enumerate(sizes):
        if not buckets or (bucket_size is not None and end >= bucket_size):
            buckets.append([])
            end = 0
        start = _round_up(end, ALIGNMENT)
        end = start + size
        buckets[-1].append((index, start, end))
    return buckets


def bucket_length(slots: Sequence[tuple[int, int, int]], shards: int) -> int:
    """Elements of a bucket with its padding: equal, aligned slices for all shards."""
    return _round_up(slots[-1][2], math.lcm(shards, ALIGNMENT) if shards > 1 else ALIGNMENT)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Bucket:
    """One message: flat parameters, flat gradients, and the counting of what has arrived.

    Gradients enter through `accumulate` alone.
    """

    def __init__(
        self,
        slots: Sequence[Slot],
        parameters: Tensor,
        gradients: Tensor,
        shard_group: Group,
        replica_group: Group,
        *,
        counted_here: bool,
        overlap: bool,
    ) -> None:
        self.slots = tuple(slots)
        self.parameters, self.gradients = parameters, gradients
        self.shard_group, self.replica_group = shard_group, replica_group
        self.counted_here = counted_here
        """Whether the norm counts this rank's copy."""
        self._overlap = overlap
        self._slot_of = {id(slot.parameter): slot for slot in self.slots}
        self._arrived: dict[int, int] = {}
        self._expected: dict[int, int] = {}
        self._outstanding = 0
        self._reduction: collectives.Pending | None = None
        self._gather: collectives.Pending | None = None
        for slot in self.slots:
            self._adopt(slot)

    def _adopt(self, slot: Slot) -> None:
        parameter = slot.parameter
        place = self.parameters[slot.start : slot.stop].view(parameter.shape)
        if not place.is_meta:
            place.copy_(parameter.detach())
        parameter.data = place
        parameter.gradient_buffer = self
        parameter.register_post_accumulate_grad_hook(self._take_ordinary_gradient)

    def _take_ordinary_gradient(self, parameter: Tensor) -> None:
        if isinstance(parameter, Parameter) and parameter.grad is not None:
            gradient, parameter.grad = parameter.grad, None
            self.accumulate(parameter, DenseGradient(gradient))

    def owned(self, flat: Tensor) -> Tensor:
        """This rank's slice of a tensor of the bucket's length."""
        return flat.view(self.shard_group.size, -1)[self.shard_group.rank]

    def gradient(self, parameter: Parameter) -> Tensor:
        """The gathered gradient of one of the bucket's parameters, in its shape."""
        slot = self._slot_of[id(parameter)]
        return self.gradients[slot.start : slot.stop].view(parameter.shape)

    def begin_step(self, micro_batches: int) -> None:
        """Expect one gradient for each use of each parameter in each of `micro_batches`."""
        self._arrived = dict.fromkeys(self._slot_of, 0)
        self._expected = {id(s.parameter): s.parameter.sharding.uses * micro_batches for s in self.slots}
        self._outstanding = sum(self._expected.values())

    def accumulate(self, parameter: Parameter, gradient: Gradient) -> None:
        """Add a gradient; the last one expected sets off the bucket's reduction where that overlaps backward."""
        key = id(parameter)
        gradient.add_to(self.gradient(parameter), overwrite=self._arrived[key] == 0)
        self._arrived[key] += 1
        self._outstanding -= 1
        if self._outstanding == 0 and self._overlap:
            self.begin_reduction()

    def begin_reduction(self) -> None:
        """Start summing the gradients over the shard group, into this rank's slice."""
        for slot in self.slots:
            arrived, expected = self._arrived[id(slot.parameter)], self._expected[id(slot.parameter)]
            if arrived != expected:
                name = slot.parameter.sharding.name
                raise MegaliteError(f"{name} received {arrived} gradients in this step where {expected} were due")
        if self._reduction is None:
            self._reduction = collectives.reduce_scatter_async(
                self.gradients, self.shard_group, out=self.owned(self.gradients)
            )

    def finish_reduction(self) -> None:
        """Wait for the sum over the shard group, then sum this rank's slice over the replica group."""
        self.begin_reduction()
        assert self._reduction is not None
        self._reduction.wait()
        self._reduction = None
        collectives.all_reduce_(self.owned(self.gradients), self.replica_group)

    def gather(self, flat: Tensor) -> collectives.Pending:
        """Begin to fill a flat tensor of the bucket's length from the slices that its ranks own."""
        return collectives.all_gather_async(self.owned(flat), self.shard_group, out=flat)

    def begin_parameter_gather(self) -> None:
        self._gather = self.gather(self.parameters)

    def finish_parameter_gather(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None


def make_buckets(
    module: nn.Module,
    mesh: ParallelMesh,
    *,
    gradient_dtype: torch.dtype,
    bucket_size: int | None,
    overlap: bool,
) -> list[Bucket]:
    """Move the parameters of `module` into flat buffers and return their buckets, in about backward's order.

    `overlap`: reduce a bucket as soon as its last gradient has arrived.
    """
    kinds: dict[tuple[object, ...], list[Parameter]] = {}
    for parameter in reversed(_parameters(module)):
        record = parameter.sharding
        kinds.setdefault((parameter.dtype, record.expert, record.copies, record.summed), []).append(parameter)
    buckets: list[Bucket] = []
    for parameters in kinds.values():
        record = parameters[0].sharding
        shard_group = mesh.group("edp") if record.expert else mesh.group("dp", "cp")
        replica_group = mesh.group_of(record.replica_group or (mesh.rank,))
        layout = lay_out([parameter.numel() for parameter in parameters], bucket_size)
        for places in layout:
            length = bucket_length(places, shard_group.size)
            device = parameters[0].device
            buckets.append(
                Bucket(
                    [Slot(parameters[index], start, stop) for index, start, stop in places],
                    torch.zeros(length, dtype=parameters[0].dtype, device=device),
                    torch.zeros(length, dtype=gradient_dtype, device=device),
                    shard_group,
                    replica_group,
                    counted_here=mesh.rank == min(record.copies),
                    overlap=overlap,
                )
            )
    return buckets


def _parameters(module: nn.Module) -> list[Parameter]:
    return list({id(parameter): parameter for parameter, _ in named_pieces(module)}.values())


def gather_before_use(module: nn.Module, buckets: Iterable[Bucket]) -> None:
    """Make every submodule wait, before its forward, for the gathers of the parameters that it holds."""
    bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
    for submodule in module.modules():
        needed = {id(p): bucket_of[id(p)] for p in _direct_parameters(submodule)}.values()
        if needed:
            submodule.register_forward_pre_hook(_waiter(tuple(dict.fromkeys(needed))))


def _direct_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    yield from module.parameters(recurse=False)
    for child in module.children():
        if isinstance(child, nn.ParameterList):
            yield from child.parameters()


def _waiter(buckets: tuple[Bucket, ...]) -> Callable[[nn.Module, object], None]:
    def wait(module: nn.Module, arguments: object) -> None:
        for bucket in buckets:
            bucket.finish_parameter_gather()

    return wait
