"""The step of the optimizer on the slices that this rank owns: norm, clip, update in fp32, and back to the parameters.

All ZeRO stages run the same sums over the same slices. Stage 0 then gathers the gradients and updates everything; 1 and
2 update their slices and gather the parameters; 3 leaves the gather to the next use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalite.config.optimizer import OptimizerConfig
from megalite.optim import statistics
from megalite.optim.buckets import Bucket, DataParallel, make_buckets
from megalite.optim.gathering import gather_around_forward
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter


@dataclass(frozen=True)
class StepResult:
    gradient_norms: Mapping[str, float]
    """By parameter group: norms before clipping, over the whole model, each of its elements once."""

    @property
    def gradient_norm(self) -> float:
        """The global norm before clipping."""
        return math.hypot(*self.gradient_norms.values())

    @property
    def skipped(self) -> bool:
        """Whether a gradient that is not finite, anywhere, made every rank skip the update."""
        return not math.isfinite(self.gradient_norm)


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


class Shard:
    """What this rank updates of one bucket: its slice, or under ZeRO 0 everything."""

    def __init__(self, bucket: Bucket, state_names: Sequence[str]) -> None:
        self.bucket = bucket
        sharded = bucket.stage > 0
        self.parameters = bucket.parameter_shard if sharded else bucket.parameters
        self.gradients = bucket.gradient_shard if sharded else bucket.gradients
        self.start, self.stop = bucket.owned_range if sharded else (0, bucket.length)
        self.runs = bucket.owned_runs if sharded else list(bucket.layout.runs(0, bucket.length))
        """Its elements by group."""
        wide = torch.promote_types(self.parameters.dtype, torch.float32)
        self.master = self.parameters.to(wide)  # the parameters themselves where they are wide already
        self.state = {name: torch.zeros_like(self.master) for name in state_names}

    @property
    def has_master(self) -> bool:
        return self.master.dtype != self.parameters.dtype

    @property
    def owned_part(self) -> slice:
        """What of this shard no other rank of the shard group is to answer for."""
        start, stop = self.bucket.owned_range
        return slice(start - self.start, stop - self.start)

    def slices(self, *, owned: bool) -> Iterator[StateSlice]:
        """This shard by parameter; with `owned` only what no other rank of the shard group is to answer for."""
        begin, end = self.bucket.owned_range if owned else (self.start, self.stop)
        state = dict(self.state) | ({"master": self.master} if self.has_master else {})
        for slot in self.bucket.slots:
            low, high = max(slot.start, begin), min(slot.stop, end)
            if low < high:
                own = slice(low - self.start, high - self.start)
                views = {name: tensor[own] for name, tensor in state.items()}
                yield StateSlice(slot.parameter, low - slot.start, high - slot.start, self.parameters[own], views)


def state_names(config: OptimizerConfig) -> tuple[str, ...]:
    """The tensors that the optimizer keeps beside each parameter."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum > 0.0 else ()


class Optimizer:
    """AdamW or SGD over flat shards, with clipping by the global norm and a common decision to skip."""

    def __init__(
        self, buckets: Sequence[Bucket], mesh: ParallelMesh, config: OptimizerConfig, *, overlap_gather: bool
    ) -> None:
        """`overlap_gather`: leave the gather of the parameters running into the next forward."""
        self.buckets, self.mesh, self.config = buckets, mesh, config
        self._overlap_gather = overlap_gather
        self.steps = 0
        """Updates made; a skipped step is none."""
        self._micro_batches = self._micro_batches_reduced = 0  # of the step
        names = state_names(config)
        self.shards = [Shard(bucket, names) for bucket in buckets]
        self._runs = [(group, shard, run) for shard in self.shards for group, run in shard.runs]
        self._masters = [shard.master[run].requires_grad_() for _, shard, run in self._runs]
        self._torch = self._build(names)

    def _build(self, names: Sequence[str]) -> torch.optim.Optimizer:
        masters: dict[ParameterGroup, list[Tensor]] = {}
        for (group, _, _), master in zip(self._runs, self._masters, strict=True):
            masters.setdefault(group, []).append(master)
        groups = [{"params": members, "kind": group} for group, members in masters.items()]
        made: torch.optim.Optimizer
        if self.config.optimizer == "adam":
            betas = (self.config.adam_beta1, self.config.adam_beta2)
            made = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=self.config.adam_eps, fused=True)
        else:
            made = torch.optim.SGD(groups, lr=0.0, momentum=self.config.sgd_momentum, fused=True)
        for master, (_, shard, run) in zip(self._masters, self._runs, strict=True):
            made.state[master] = {name: shard.state[name][run] for name in names}
            if self.config.optimizer == "adam":
                made.state[master]["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        return made

    def load_steps(self, steps: int) -> None:
        """Continue after `steps` updates; the state's values are written through `slices`."""
        self.steps = steps
        for state in self._torch.state.values():
            if "step" in state:
                state["step"].fill_(steps)

    def slices(self) -> Iterator[StateSlice]:
        """All that this rank updates, by parameter."""
        for shard in self.shards:
            yield from shard.slices(owned=False)

    def owned_slices(self) -> Iterator[StateSlice]:
        """Over all ranks, each element of each global tensor once."""
        for shard in self.shards:
            if shard.bucket.counted_here:
                yield from shard.slices(owned=True)

    @property
    def reduces_each_micro_batch(self) -> bool:
        """Whether gradients are reduced behind each micro-batch (ZeRO 2 and 3), or once a step."""
        return any(bucket.stage >= 2 for bucket in self.buckets)

    def begin_step(self, micro_batches: int) -> None:
        """Expect the gradients of so many micro-batches."""
        self._micro_batches, self._micro_batches_reduced = micro_batches, 0
        for bucket in self.buckets:
            bucket.begin_step(micro_batches)

    def reduce(self) -> None:
        """Begin the reductions that are due: once a step or, where that is so, behind each micro-batch."""
        self._micro_batches_reduced += 1 if self.reduces_each_micro_batch else self._micro_batches
        for bucket in self.buckets:
            bucket.begin_reduction(self._micro_batches_reduced)

    def step(self, rates: Rates, loss_scale: float = 1.0) -> StepResult:
        """Finish the gradients' reduction, clip and update. The same decision and the same bits on every rank.

        `loss_scale` is what the loss was multiplied by: the gradients are divided by it.
        """
        for bucket in self.buckets:
            bucket.finish_reduction()
        norms = statistics.norms([(bucket, bucket.gradient_shard) for bucket in self.buckets], self.mesh)
        result = StepResult({name: norm / loss_scale for name, norm in norms.items()})
        if result.skipped:
            return result
        for pending in [bucket.gather(bucket.gradients) for bucket in self.buckets if bucket.stage == 0]:
            pending.wait()
        self._scale(self._clipping(result.gradient_norm) / loss_scale)
        self._update(rates)
        return result

    def _clipping(self, norm: float) -> float:
        return min(1.0, self.config.clip_grad / (norm + 1e-6)) if self.config.clip_grad > 0.0 else 1.0

    def _scale(self, factor: float) -> None:
        if factor != 1.0:
            for shard in self.shards:
                shard.gradients.mul_(factor)

    def _update(self, rates: Rates) -> None:
        for group in self._torch.param_groups:
            kind = group["kind"]
            group["lr"] = rates.token_table_learning_rate if kind.token_table else rates.learning_rate
            group["weight_decay"] = rates.weight_decay if kind.weight_decay else 0.0
        for master, (_, shard, run) in zip(self._masters, self._runs, strict=True):
            master.grad = shard.gradients[run].to(master.dtype)
        self._torch.step()
        self.steps += 1
        for master in self._masters:
            master.grad = None
        for shard in self.shards:
            if shard.has_master:
                shard.parameters.copy_(shard.master)
        self.begin_parameter_gather()
        if not self._overlap_gather:
            self.finish_parameter_gather()

    def begin_parameter_gather(self) -> None:
        """Start to make whole, under ZeRO 1 and 2, the parameters whose slices have changed."""
        for bucket in reversed(self.buckets):
            if bucket.stage in (1, 2):
                bucket.begin_parameter_gather()

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Within it every parameter is whole, for whoever reads weights outside a forward pass."""
        self.finish_parameter_gather()
        for bucket in self.buckets:
            if bucket.stage == 3:
                bucket.begin_parameter_gather()
        self.finish_parameter_gather()
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.free_parameters()

    def parameter_norms(self) -> dict[str, float]:
        """Norms of the parameters, at the precision in which they are updated, by parameter group."""
        return statistics.norms([(s.bucket, s.master[s.owned_part]) for s in self.shards], self.mesh)

    def finish_parameter_gather(self) -> None:
        """Wait for the gathers that overlap what comes after the step."""
        for bucket in self.buckets:
            bucket.finish_parameter_gather()


def make_optimizer(
    network: nn.Module,
    mesh: ParallelMesh,
    config: OptimizerConfig,
    options: DataParallel,
    *,
    blocks: Sequence[nn.Module] = (),
    set_values: Callable[[Parameter], None] | None = None,
) -> Optimizer:
    """Move the parameters of `network` into flat buckets and make the optimizer of this rank's part of them.

    `blocks`: the parts of the network that run one after the other, which ZeRO 3 needs. `set_values` gives a parameter
    its initial values; None where they have them.
    """
    buckets = make_buckets(network, mesh, options, blocks=blocks, set_values=set_values)
    gather_around_forward(network, blocks, buckets)
    return Optimizer(buckets, mesh, config, overlap_gather=options.overlap_gather)
