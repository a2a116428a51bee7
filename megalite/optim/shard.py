"""Part of a bucket that a rank updates, divided into segments by parameter group, with the optimizer state."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import Bucket, ParameterBucket
from megalite.optim.layout import ParameterGroup, Slot
from megalite.optim.offloaded import HostCopy, HostPart, cuts, fetch_gradients
from megalite.optim.packed import Joined, Packed, Remainders, View
from megalite.optim.update_rule import own_states, state_names
from megalite.optim.weight_mean import EMA, advance_
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite_kernels.moments import BLOCK, Quantized

FORMATS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Formats of moments in 8 bits, by their names in flags."""


@dataclass(frozen=True)
class StateSlice:
    """Range of a parameter's elements on this rank, with their values and state as flat views."""

    parameter: Parameter
    start: int
    stop: int
    """Elements [start, stop) of the flattened local parameter."""
    values: Tensor
    """Values of the parameter."""
    state: dict[str, Tensor | View]
    """Optimizer state by name, `master` if the parameter has a lower precision than its master, and the mean.

    Packed state is given as a `View`, except within `Optimizer.settable_for_load`.
    """

    @property
    def tensors(self) -> dict[str, Tensor]:
        """State that can be written. Within `Optimizer.settable_for_load` this is all of the state."""
        return {name: kept for name, kept in self.state.items() if isinstance(kept, Tensor)}


def state_dtype(config: OptimizerConfig, name: str, parameters: torch.dtype) -> torch.dtype:
    """Return the dtype of a state or of `master`, given the dtype of the parameters.

    For packed state, it is the dtype of the unpacked values.
    """
    chosen = {"master": config.main_params_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}.get(name, config.exp_avg_dtype)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrow.get(chosen) or torch.promote_types(parameters, torch.float32)


def mean_dtype(config: OptimizerConfig, parameters: torch.dtype) -> torch.dtype | None:
    """Return the dtype of the mean of parameters, or None if none is kept."""
    return None if config.ema_decay is None else torch.promote_types(parameters, torch.float32)


def quantized_dtype(config: OptimizerConfig, name: str) -> torch.dtype | None:
    """Return the dtype of a state's 8-bit codes, or None if the state is not in 8 bits.

    `exp_avg_sq` has a flag of its own. All other state follows the flag of `exp_avg`.
    """
    return FORMATS.get({"exp_avg_sq": config.exp_avg_sq_dtype}.get(name, config.exp_avg_dtype))


def bytes_per_element(config: OptimizerConfig, group: ParameterGroup, parameters: torch.dtype) -> float:
    """Return the number of bytes of state and of the weights' mean per element, without masters."""
    eight = 1 + torch.float32.itemsize / BLOCK
    kept = sum(
        eight if quantized_dtype(config, name) else state_dtype(config, name, parameters).itemsize
        for name in state_names(config, group)
    )
    return kept + (mean.itemsize if (mean := mean_dtype(config, parameters)) is not None else 0)


def _new_state(config: OptimizerConfig, name: str, parameters: Tensor) -> Tensor | Quantized:
    """Return state of zeros for flat parameters."""
    format = quantized_dtype(config, name)
    if format is not None:
        return Quantized.zeros(parameters, format, root=name == "exp_avg_sq")
    return torch.zeros_like(parameters, dtype=state_dtype(config, name, parameters.dtype))


def all_state_dtypes(config: OptimizerConfig, parameter: Parameter) -> dict[str, torch.dtype]:
    """Return the dtypes of what is kept per element of a trained parameter, in the order of `StateSlice.state`."""
    names = *state_names(config, ParameterGroup.of(parameter)), "master"
    dtypes = {name: state_dtype(config, name, parameter.dtype) for name in names}
    kept = {name: dtype for name, dtype in dtypes.items() if name != "master" or dtype != parameter.dtype}
    mean = mean_dtype(config, parameter.dtype)
    return kept if mean is None else {**kept, EMA: mean}


@dataclass(frozen=True)
class Segment:
    """Consecutive elements of a shard that belong to one parameter group: flat views, and the update rule's state."""

    group: ParameterGroup
    slots: tuple[Slot, ...]
    """Slots of all parameters in the segment. The first and the last may extend into the shards of other ranks."""
    start: int
    stop: int
    """Elements [start, stop) of the bucket."""
    parameters: Tensor
    master: Tensor
    """Master weights. They are the parameters themselves if the dtypes are equal, remainders if the dtype is int16."""
    gradients: Tensor
    state: dict[str, Tensor | Quantized]
    mean: Tensor | None = None
    """Mean of the master weights over the updates, with --ema-decay."""
    copies: Sequence[HostCopy] = ()
    """Copies to and from the device, if all of these tensors are on the host: consecutive elements."""
    settable: dict[str, Tensor] = field(default_factory=dict)
    """Packed state as fp32 tensors, only while a checkpoint is loaded (see `Optimizer.settable_for_load`)."""

    @property
    def has_master(self) -> bool:
        return self.master.dtype != self.parameters.dtype

    @property
    def tensors(self) -> dict[str, Tensor]:
        """State that is not packed."""
        return {name: state for name, state in self.state.items() if isinstance(state, Tensor)}

    def kept(self) -> dict[str, Tensor | Packed]:
        """Return the state by name, `master` if the masters are not the parameters themselves, and the mean."""
        packed = self.master.dtype == torch.int16
        kept: dict[str, Tensor | Packed] = dict(self.state)
        if self.has_master:
            kept["master"] = Remainders(self.parameters, self.master) if packed else self.master
        if self.mean is not None:
            kept[EMA] = self.mean
        return kept

    def packed(self) -> dict[str, Packed]:
        """Return the state that is packed."""
        return {name: kept for name, kept in self.kept().items() if not isinstance(kept, Tensor)}

    def part(self, start: int, stop: int) -> Segment:
        """Return elements [start, stop), counted from the start of the segment. State that is packed is left out."""
        own = slice(start, min(stop, len(self.master)))
        return replace(
            self,
            start=self.start + own.start,
            stop=self.start + own.stop,
            parameters=self.parameters[own],
            master=self.master[own],
            gradients=self.gradients[own],
            state={name: tensor[own] for name, tensor in self.tensors.items()},
            mean=None if self.mean is None else self.mean[own],
        )

    def parts(self, elements: int) -> Iterator[Segment]:
        """Yield the segment in parts of at most this number of elements."""
        for start in range(0, len(self.master), elements):
            yield self.part(start, start + elements)

    def copied(self) -> Iterator[Segment]:
        """Yield the elements of each of the copies, with all of their state."""
        for copy in self.copies:
            own = slice(copy.start - self.start, copy.stop - self.start)
            state = {name: kept[own] for name, kept in self.state.items()}
            yield replace(self.part(own.start, own.stop), state=state, copies=(copy,))

    def copies_of(self, start: int, stop: int) -> list[HostCopy]:
        """Return the copies of elements [start, stop) of the bucket to and from the device, if there are any."""
        return [copy for copy in self.copies if copy.start < stop and start < copy.stop]

    def wide_gradients(self, factor: float) -> Tensor:
        """Return the gradients times a factor, in the dtype of the masters.

        If the gradients already have this dtype, they are changed in place.
        """
        wide = self.gradients.to(self.master.dtype)
        return wide if factor == 1.0 else wide.mul_(factor)

    def round_parameters(self) -> None:
        """Set the parameters from their masters, for an update rule that changes only the masters."""
        if self.has_master:
            self.parameters.copy_(self.master)


@dataclass(frozen=True)
class _Part:
    """Elements [start, stop) of a bucket whose state is in one place: flat views."""

    start: int
    stop: int
    parameters: Tensor
    gradients: Tensor
    master: Tensor
    host: HostPart | None = None


def of_slot(slot: Slot, segments: Iterable[Segment]) -> list[Segment]:
    """Return those of a shard's segments that have elements of a slot of its bucket."""
    return [each for each in segments if slot.start < each.stop and each.start < slot.stop]


class Shard:
    """Part of one bucket that this rank updates: its slice, or the full bucket under ZeRO 0."""

    def __init__(self, bucket: Bucket, mesh: ParallelMesh, config: OptimizerConfig, host: HostPart | None) -> None:
        """Allocate the state. `host`: has the first elements; None: all are on the device."""
        self.bucket = bucket
        self.own_states = [own_states(config, slot.parameter, mesh) for slot in bucket.slots]
        """State whose shape differs from that of its parameter, by slot and name. It is not sharded."""
        sharded = bucket.zero_stage > 0
        self.parameters = bucket.parameter_shard if sharded else bucket.parameters
        self.gradients = bucket.gradient_shard if sharded else bucket.gradients
        self.start, self.stop = bucket.shard_spec.updated
        self._parts = list(self._divide(host, config))
        self.segments = [segment for part in self._parts for segment in self._segments(part, config)]
        """All elements, divided by parameter group and by where their state is."""
        self.ema_decay = config.ema_decay
        self.advance_means(0.0)

    def advance_means(self, decay: float) -> None:
        """Take the weights into their means, if these are kept."""
        for segment in self.segments:
            if segment.mean is not None:
                master = segment.master if segment.has_master else None
                advance_(segment.mean, segment.parameters, master, decay)

    def _divide(self, host: HostPart | None, config: OptimizerConfig) -> Iterator[_Part]:
        middle = self.start + (host.elements if host is not None else 0)
        if host is not None:
            mirror = self.parameters if self.bucket.slice_on_host else host.mirror(self.parameters)
            gradients = host.buffer(self.gradients)
            yield _Part(self.start, middle, mirror, gradients, _masters(mirror, config), host)
        if middle < self.stop or host is None:
            parameters, gradients = self.parameters[middle - self.start :], self.gradients[middle - self.start :]
            yield _Part(middle, self.stop, parameters, gradients, _masters(parameters, config))

    @property
    def has_master(self) -> bool:
        return self._parts[0].master.dtype != self.parameters.dtype

    @property
    def master(self) -> Tensor:
        """Master weights of all elements, if they are in one place."""
        (part,) = self._parts
        return part.master

    @property
    def owned_masters(self) -> Tensor | View:
        """Master weights of the slice that this rank owns. No other rank of the shard group owns this slice."""
        start, stop = (end - self.start for end in self.bucket.owned_range)  # under ZeRO 0 a part of the shard
        values = [
            View(Remainders(part.parameters, part.master), 0, len(part.master))
            if part.master.dtype == torch.int16
            else part.master
            for part in self._parts
        ]
        if self._parts[0].host is not None:
            return View(Joined(tuple(values), self.bucket.parameters.device), start, stop)
        return values[0][start:stop]

    @property
    def on_host(self) -> range:
        """Elements of the bucket whose state is on the host."""
        part = self._parts[0]
        return range(part.start, part.stop if part.host is not None else part.start)

    @property
    def copies(self) -> list[HostCopy]:
        """Copies of the elements on the host, in order."""
        return [copy for segment in self.segments for copy in segment.copies]

    def fetch_early(self) -> None:
        """Let gradients leave for the host as soon as their sum is complete, if it is so before the end of the step."""
        (accumulator, *others), copies = self.bucket.accumulators, self.copies
        reduction, whole = accumulator.reduction, self.bucket.zero_stage > 0 or self.bucket.shard_group.size == 1
        if copies and whole and not others and reduction.shards_have_all:
            accumulator.leaving = partial(fetch_gradients, copies)

    def tensors(self, *, on_host: bool = False) -> list[Tensor]:
        """Return the tensors of the master weights and of all state, on the device or on the host.

        Those on the host include its copies of parameters and gradients. They are no tensors of the bucket.
        """
        parts = [part for part in self._parts if (part.host is not None) == on_host]
        segments = [segment for segment in self.segments if bool(segment.copies) == on_host]
        states = [state for segment in segments for state in segment.state.values()]
        states += [segment.mean for segment in segments if segment.mean is not None]
        packed = itertools.chain(*(state.tensors() for state in states if isinstance(state, Quantized)))
        copies = [tensor for part in parts if on_host for tensor in (part.parameters, part.gradients)]
        own = [] if on_host else [state.values for named in self.own_states for state in named.values()]
        masters = (part.master for part in parts)
        return [*masters, *(state for state in states if isinstance(state, Tensor)), *packed, *own, *copies]

    def _segments(self, part: _Part, config: OptimizerConfig) -> Iterator[Segment]:
        """Yield the segments of a part, with new state."""
        for group, slots, begin, end in self.bucket.layout.stretches():
            low, high = max(begin, part.start), min(end, part.stop)
            if low < high:
                own = slice(low - part.start, high - part.start)
                parameters, gradients = part.parameters[own], part.gradients[own]
                names = state_names(config, group)
                state = {name: _new_state(config, name, parameters) for name in names}
                dtype = mean_dtype(config, parameters.dtype)
                mean = None if dtype is None else torch.zeros_like(parameters, dtype=dtype)
                copies = [self._copy(part, *ends) for ends in cuts(low, high)] if part.host is not None else ()
                yield Segment(group, slots, low, high, parameters, part.master[own], gradients, state, mean, copies)

    def _copy(self, part: _Part, start: int, stop: int) -> HostCopy:
        assert part.host is not None
        of_shard, of_part = slice(start - self.start, stop - self.start), slice(start - part.start, stop - part.start)
        device = self.parameters[of_shard], self.gradients[of_shard]
        host = part.parameters[of_part], part.gradients[of_part]
        return HostCopy(self.bucket, part.host.options.transfers, start, stop, device, host)

    def slices(self, begin: int, end: int) -> Iterator[StateSlice]:
        """Yield the elements [begin, end) of the bucket that are in this shard, by parameter."""
        for segment in self.segments:
            state = segment.kept() | segment.settable
            for slot in segment.slots:
                low, high = max(slot.start, segment.start, begin), min(slot.stop, segment.stop, end)
                if low < high:
                    values = self.parameters[low - self.start : high - self.start]
                    views = {
                        name: _view(kept, low - segment.start, high - segment.start) for name, kept in state.items()
                    }
                    yield StateSlice(slot.parameter, low - slot.start, high - slot.start, values, views)


def _masters(parameters: Tensor, config: OptimizerConfig) -> Tensor:
    """Return the master weights of flat parameters, which are the parameters themselves if the dtypes are equal."""
    if config.store_param_remainders and parameters.dtype == torch.bfloat16:
        return torch.zeros_like(parameters, dtype=torch.int16)
    return parameters.to(state_dtype(config, "master", parameters.dtype))  # no copy if the dtypes are equal


def frozen_slices(bucket: ParameterBucket, begin: int, end: int) -> Iterator[StateSlice]:
    """Yield the elements [begin, end) of a bucket of frozen parameters that this rank stores, by parameter."""
    values, first = bucket.parameters, 0
    if bucket.zero_stage == 3:
        values, first = bucket.parameter_shard, bucket.owned_range[0]
    for slot in bucket.slots:
        low, high = max(slot.start, begin), min(slot.stop, end)
        if low < high:
            own = values[low - first : high - first]
            yield StateSlice(slot.parameter, low - slot.start, high - slot.start, own, {})


def _view(kept: Tensor | Packed, start: int, stop: int) -> Tensor | View:
    return kept[start:stop] if isinstance(kept, Tensor) else View(kept, start, stop)
