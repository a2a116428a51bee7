"""What a rank updates of a bucket, cut into runs that are treated alike, and the state that is kept of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.optimizer import OptimizerConfig
from megalite.optim.buckets import Bucket
from megalite.optim.layout import Slot
from megalite.optim.learning_rate import Rates
from megalite.parallel.parameter import Parameter


@dataclass(frozen=True)
class StateSlice:
    """A run of a parameter's elements, and what stands for it on this rank: flat views."""

    parameter: Parameter
    start: int
    stop: int
    """Elements [start, stop) of the local parameter, flattened."""
    values: Tensor
    """The parameter's own."""
    state: dict[str, Tensor]
    """By name: the optimizer's, and `master` where the parameter is of lower precision."""


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that the optimizer treats alike."""

    decays: bool
    token_table: bool
    matrices: bool
    """Whether a matrix-wise optimizer sees them as matrices."""

    @staticmethod
    def of(parameter: Parameter) -> ParameterGroup:
        record = parameter.sharding
        return ParameterGroup(record.weight_decay, record.token_table, record.has_matrices)

    def learning_rate(self, rates: Rates) -> float:
        return rates.token_table_learning_rate if self.token_table else rates.learning_rate

    def weight_decay(self, rates: Rates) -> float:
        return rates.weight_decay if self.decays else 0.0


def state_names(config: OptimizerConfig, group: ParameterGroup) -> tuple[str, ...]:
    """The tensors that are kept beside each parameter of a group."""
    if config.optimizer == "muon" and group.matrices:
        return ("momentum_buffer",)
    if config.optimizer == "sgd":
        return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()
    return ("exp_avg", "exp_avg_sq")


def all_state_names(config: OptimizerConfig) -> set[str]:
    """Those of all groups together."""
    kinds = (ParameterGroup(decays=False, token_table=False, matrices=matrices) for matrices in (False, True))
    return {name for group in kinds for name in state_names(config, group)}


def kept_dtype(config: OptimizerConfig, name: str, parameters: torch.dtype) -> torch.dtype:
    """In what dtype a state, or `master`, is kept for parameters of one."""
    chosen = {"master": config.main_params_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}.get(name, config.exp_avg_dtype)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return narrow.get(chosen) or torch.promote_types(parameters, torch.float32)


@dataclass(frozen=True)
class Run:
    """Consecutive elements of a shard that are treated alike: flat views, and the state that an update rule keeps."""

    group: ParameterGroup
    slots: tuple[Slot, ...]
    """Of all the parameters that the run belongs to; the first and the last may reach into other ranks' shards."""
    start: int
    stop: int
    """Elements [start, stop) of the bucket."""
    master: Tensor
    gradients: Tensor
    state: dict[str, Tensor]


class Shard:
    """What this rank updates of one bucket: its slice, or under ZeRO 0 everything."""

    def __init__(self, bucket: Bucket, config: OptimizerConfig) -> None:
        self.bucket = bucket
        sharded = bucket.stage > 0
        self.parameters = bucket.parameter_shard if sharded else bucket.parameters
        self.gradients = bucket.gradient_shard if sharded else bucket.gradients
        self.start = bucket.shard_group.rank * self.parameters.numel() if sharded else 0
        dtype = self.parameters.dtype
        self.master = self.parameters.to(kept_dtype(config, "master", dtype))  # the parameters themselves where alike
        self.runs = list(self._runs(config))

    @property
    def has_master(self) -> bool:
        return self.master.dtype != self.parameters.dtype

    def _runs(self, config: OptimizerConfig) -> Iterator[Run]:
        by_group = itertools.groupby(self.bucket.slots, key=lambda slot: ParameterGroup.of(slot.parameter))
        groups = [(group, tuple(slots)) for group, slots in by_group]
        stops = [*(slots[0].start for _, slots in groups[1:]), self.bucket.length]
        for (group, slots), end in zip(groups, stops, strict=True):
            start, stop = max(slots[0].start, self.start), min(end, self.start + self.master.numel())
            if start < stop:
                own = slice(start - self.start, stop - self.start)
                master, gradients = self.master[own], self.gradients[own]
                state = {
                    name: torch.zeros_like(master, dtype=kept_dtype(config, name, self.parameters.dtype))
                    for name in state_names(config, group)
                }
                yield Run(group, slots, start, stop, master, gradients, state)

    def slices(self, *, owned: bool) -> Iterator[StateSlice]:
        """This shard by parameter; with `owned` only what no other rank of the shard group is to answer for."""
        begin, length = self.start, self.master.numel()
        if owned:
            length = self.bucket.parameter_shard.numel()
            begin = self.bucket.shard_group.rank * length
        for run in self.runs:
            state = run.state | ({"master": run.master} if self.has_master else {})
            for slot in run.slots:
                low, high = max(slot.start, run.start, begin), min(slot.stop, run.stop, begin + length)
                if low < high:
                    values = self.parameters[low - self.start : high - self.start]
                    views = {name: tensor[low - run.start : high - run.start] for name, tensor in state.items()}
                    yield StateSlice(slot.parameter, low - slot.start, high - slot.start, values, views)
