"""Optimizer step on the slices that this rank owns: gradient norm, clipping, update in fp32, cast to the parameters.

All ZeRO stages compute the same sums over the same slices. Then they differ:

- Stage 0 gathers the gradients and updates all parameters on each rank.
- Stages 1 and 2 update the slices and gather the parameters.
- Stage 3 updates the slices; the next use gathers the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain

import torch
from torch import nn

from megalite.config.optimizer import OptimizerConfig
from megalite.errors import MegaliteError
from megalite.optim import statistics
from megalite.optim.accumulator import StepCollective
from megalite.optim.adafactor import Adafactor
from megalite.optim.buckets import Bucket, DataParallel, ParameterBucket, make_buckets, make_frozen_buckets
from megalite.optim.elementwise import elementwise_rule
from megalite.optim.gathering import gather_around_forward
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from megalite.optim.lion import Lion
from megalite.optim.logit_clip import clip_logits
from megalite.optim.muon import Muon
from megalite.optim.offloaded import HostState, OnHost, check_copies, declared_copies
from megalite.optim.shard import Shard, StateSlice, frozen_slices
from megalite.optim.synchronization import Synchronization
from megalite.optim.trust_ratio import Lamb, Lars
from megalite.optim.update_rule import UpdateRule, all_state_names, state_names
from megalite.parallel.collectives import Pending
from megalite.parallel.largest_logits import LargestLogits, largest_logits_of
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import DeferredGradients, Parameter
from megalite.parallel.state import State, Tally, end_step, states_of, tallies_of


@dataclass(frozen=True)
class StepResult:
    gradient_norms: Mapping[str, float]
    """Gradient norms of the full model before clipping, by parameter group. Each element is counted once."""
    refused: bool = False
    """True if the update is left out although the gradient is finite."""

    @cached_property
    def gradient_norm(self) -> float:
        """Global gradient norm before clipping."""
        return math.hypot(*self.gradient_norms.values())

    @cached_property
    def skipped(self) -> bool:
        """True if every rank skipped the update: it was refused, or a gradient on some rank is not finite."""
        return self.refused or not math.isfinite(self.gradient_norm)


class Optimizer:
    """Distributed optimizer: update rules on flat shards, with clipping by the global norm.

    All ranks decide together to skip a step with gradients that are not finite.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mesh: ParallelMesh,
        config: OptimizerConfig,
        options: DataParallel,
        *,
        frozen: Sequence[ParameterBucket] = (),
        reduces_each_micro_batch: bool = False,
        module_states: Sequence[State] = (),
        tallies: Sequence[Tally] = (),
        logits: Sequence[LargestLogits] = (),
        synchronization: Synchronization | None = None,
        host: HostState | None = None,
    ) -> None:
        """Allocate the optimizer state.

        Args:
            buckets: the buckets of this rank.
            mesh: the mesh of ranks.
            config: the hyperparameters.
            options: the options of data parallelism.
            frozen: the buckets of frozen parameters, which updates do not change.
            reduces_each_micro_batch: gradients are reduced after each micro-batch (ZeRO 2 and 3) instead of once per
                step. The value is the same on all ranks, including ranks whose stages have no parameters.
            module_states: state of the network's modules.
            tallies: tallies of the network's modules.
            logits: largest logits of the network's attention layers, if they are measured.
            synchronization: has the update rules and the extra state; None: that of plain data parallelism.
            host: the share of the state that is on the host; None: none of it.
        """
        self.buckets, self.mesh, self.config, self.options = buckets, mesh, config, options
        self.frozen = frozen
        """Buckets of frozen parameters."""
        self.module_states = module_states
        """State of the network's modules. Updates do not change it."""
        self._tallies: dict[tuple[int, ...], list[Tally]] = {}
        """Tallies of modules, by the ranks over which they are summed."""
        for tally in tallies:
            self._tallies.setdefault(tally.group.ranks, []).append(tally)
        self._logits = logits
        self.reduces_each_micro_batch = reduces_each_micro_batch
        self.steps = 0
        """Number of applied updates, without skipped steps. It is loaded from a checkpoint together with the state."""
        self.updated = buckets
        """Buckets that a step updates."""
        self.host = host
        """The share of the state that is on the host, if there is one."""
        configs = [self.config_of(bucket.slots[0].parameter) for bucket in buckets]
        parts = host.parts([bucket.shard_spec for bucket in buckets]) if host is not None else [None] * len(buckets)
        self.shards = [
            Shard(bucket, mesh, config, part) for bucket, config, part in zip(buckets, configs, parts, strict=True)
        ]
        self._host_copies = [copy for shard in self.shards for copy in shard.copies]
        if host is not None and host.overlap:
            for shard in self.shards:
                shard.fetch_early()
        self.synchronization = synchronization or Synchronization(mesh)
        self.rules = self.synchronization.rules(self._make_rules(), self.shards)
        if host is not None:
            there = [number for number, bucket in enumerate(buckets) if bucket.slice_on_host]
            check_copies(declared_copies(self.rules, buckets), [shard.on_host for shard in self.shards], there)
        extra = self.synchronization.extra_state(self.shards)
        self.bucket_states, self.rank_states = extra.bucket_states, extra.rank_states
        self.replica, self.exchange = extra.replica, extra.exchange
        self.before_update: Callable[[], None] | None = None
        """Called on all ranks once gradients are complete, before they are applied; None: nothing is. A judge of `step`
        comes before it: under ZeRO 0 the slices of other ranks are gathered only once it has allowed the update."""

    def config_of(self, parameter: Parameter) -> OptimizerConfig:
        """Return the hyperparameters of a parameter."""
        return self.config

    def _make_rules(self) -> list[UpdateRule]:
        return make_rules(self.shards, self.mesh, self.config)

    @property
    def fraction_on_host(self) -> float:
        """Share of this rank's elements whose state is on the host."""
        return self.host.fraction if self.host is not None else 0.0

    @property
    def state_kinds(self) -> set[str]:
        """Names of the kinds of state that this rank has."""
        found = {"master" for shard in self.shards if shard.has_master}
        for shard in self.shards:
            for slot, own in zip(shard.bucket.slots, shard.own_states, strict=True):
                found.update(own, state_names(self.config_of(slot.parameter), ParameterGroup.of(slot.parameter)))
        return found

    @property
    def possible_state_kinds(self) -> set[str]:
        """Names of the kinds of state that some rank may have: a model may have no matrices, or no vectors."""
        return all_state_names(self.config) | {"master" for shard in self.shards if shard.has_master}

    @property
    def has_tallies(self) -> bool:
        """True if modules count something during a step."""
        return bool(self._tallies)

    @property
    def own_states(self) -> list[tuple[str, State]]:
        """State whose shape differs from that of its parameter, with its name."""
        return [named for shard in self.shards for states in shard.own_states for named in states.items()]

    def slices(self) -> Iterator[StateSlice]:
        """Yield the values and state that this rank updates, by parameter, and the frozen values that it stores."""
        for shard in self.shards:
            yield from shard.slices(*shard.bucket.shard_spec.updated)
        for bucket in self.frozen:
            yield from frozen_slices(bucket, *bucket.shard_spec.updated)

    def saved_slices(self, *, frozen: bool = True) -> Iterator[StateSlice]:
        """Yield the values and state that this rank saves. Over all ranks, each element is saved once.

        `frozen`: with the frozen values.
        """
        for shard in self.shards:
            yield from shard.slices(*shard.bucket.shard_spec.saved)
        for bucket in self.frozen if frozen else ():
            yield from frozen_slices(bucket, *bucket.shard_spec.saved)

    @contextmanager
    def settable_for_load(self) -> Iterator[None]:
        """Make all state writable, for the load of a checkpoint.

        Within the block, packed state is replaced by fp32 tensors of zeros, so its old values cannot be read. At the
        end of the block these tensors are packed, unless an exception is raised. They are in host memory, because the
        device may have no memory for them.
        """
        for bucket in (*self.buckets, *self.frozen):
            bucket.release_slice()
        segments = [segment for shard in self.shards for segment in shard.segments]
        try:
            for segment in segments:
                segment.settable.update((name, torch.zeros(len(segment.parameters))) for name in segment.packed())
            yield
            for segment in segments:
                for copy in segment.copies:
                    copy.take_parameters()
                for name, packed in segment.packed().items():
                    packed.write(segment.settable[name])
                for copy in segment.copies:
                    copy.send_parameters()
        finally:
            for segment in segments:
                segment.settable.clear()

    def begin_step(self, micro_batches: int, loss_scale: float = 1.0) -> None:
        """Expect the gradients of this number of micro-batches, multiplied by `loss_scale`.

        Raises MegaliteError if a parameter that was frozen at the start needs a gradient now.
        """
        for slot in (slot for bucket in self.frozen for slot in bucket.slots):
            if slot.parameter.requires_grad:
                raise MegaliteError(
                    f"{slot.parameter.sharding.name} was frozen when the run began, and requires a gradient now: set "
                    "requires_grad before, or begin another run with these weights and load_optim=False"
                )
        for copy in self._host_copies:
            copy.drop_gradients()
        for bucket in (*self.buckets, *self.frozen):
            bucket.begin_uses()
        for bucket in self.updated:
            bucket.begin_step(micro_batches)
            for accumulator in bucket.accumulators:
                accumulator.reduction.begin_step(self.steps, loss_scale)
        for tally in chain.from_iterable(self._tallies.values()):
            tally.begin_step()
        for layer in self._logits:
            layer.begin_step()

    def reduce(self, chunk: int, micro_batches: int) -> None:
        """Start the reductions that are due after this number of micro-batches of a chunk."""
        for bucket in self.updated:
            bucket.begin_reduction(chunk, micro_batches)
        self._free_frozen()

    def leave_out(self, chunk: int) -> None:
        """Take the gradients of a micro-batch in a chunk as zeros that have arrived, under ZeRO 0 and 1.

        Reductions that were waiting for them start in their `order`.
        """
        accumulators = [each for bucket in self.updated for each in bucket.accumulators if each.chunk == chunk]
        for accumulator in sorted(accumulators, key=lambda each: each.reduction.order):
            accumulator.leave_out()

    def _free_frozen(self) -> None:
        """Free the frozen parameters that a backward, which has ended, has gathered last."""
        for bucket in self.frozen:
            bucket.free_parameters()

    @contextmanager
    def deferring(self, chunk: int) -> Iterator[DeferredGradients]:
        """Keep the gradients of a chunk's parameters within the block, instead of adding them.

        The caller adds them later by the yielded object.
        """
        deferred = DeferredGradients()
        buckets = [bucket for bucket in self.buckets if any(a.chunk == chunk for a in bucket.accumulators)]
        for bucket in buckets:
            bucket.deferred = deferred
        try:
            yield deferred
        finally:
            for bucket in buckets:
                bucket.deferred = None
            self._free_frozen()

    def complete(self, loss_scale: float = 1.0) -> StepResult:
        """Finish the gradient reduction and compute the norms, without an update.

        `loss_scale` is the factor by which the loss was multiplied; the norms are divided by it.
        """
        for part in self._completion():
            part.run()
        for bucket in (*self.buckets, *self.frozen):
            bucket.end_uses()
        return self.measure(loss_scale)

    def measure(self, loss_scale: float = 1.0) -> StepResult:
        """Compute the norms of the complete gradients, which have been multiplied by `loss_scale`."""
        return StepResult({name: norm / loss_scale for name, norm in self._norms().run().items()})

    def update(self, rates: Rates, gradient_norm: float) -> None:
        """Clip the complete gradients by their norm and apply them."""
        self._update(rates, StepResult({"all": gradient_norm}))

    def step(
        self, rates: Rates, loss_scale: float = 1.0, judge: Callable[[StepResult], StepResult] | None = None
    ) -> StepResult:
        """Finish the gradient reduction, clip and update.

        The decision to skip the step and the resulting bits are the same on every rank. `loss_scale` is the factor by
        which the loss was multiplied; the gradients are divided by it. `judge` may refuse the update, on all ranks.
        """
        result = self.agreed(self.complete(loss_scale))
        if judge is not None:
            result = judge(result)
        changed = not result.skipped
        if changed:
            self._update(rates, result, loss_scale)
        if self.exchange is not None:
            changed = self.exchange.advance() or changed
        if changed:
            self.begin_parameter_gather()
            if not self.options.overlaps_forward:
                self.finish_parameter_gather()
        return result

    def agreed(self, result: StepResult) -> StepResult:
        """Return the result, or a skipped one if another replica skips the step."""
        if self.exchange is None or self.exchange.agreed(not result.skipped):
            return result
        return StepResult(dict.fromkeys(result.gradient_norms, math.nan))

    def collectives(self) -> list[tuple[str, tuple[int, ...]]]:
        """Return the names and ranks of the collectives of a `step` that is not skipped, in order.

        All gathers of one kind start before the first of them is waited for. A wait may find that its collective has
        already ended: under ZeRO 2 and 3 most reductions end within the list of actions.
        """
        own: list[StepCollective[object]] = [*self._completion(), self._norms(), *self._gradient_gathers()]
        rules = [part for rule in self.rules for part in rule.collectives()]
        later = [*self._counting(), *self._clipping(), *self._parameter_gathers()]
        every = [*((part.name, part.ranks) for part in own), *rules, *((part.name, part.ranks) for part in later)]
        return [(name, ranks) for name, ranks in every if len(ranks) > 1]

    def _completion(self) -> Iterator[StepCollective[object]]:
        for bucket in self.updated:
            yield from bucket.completion()

    def _norms(self) -> StepCollective[dict[str, float]]:
        owned = [(bucket, bucket.gradient_shard) for bucket in self.updated]
        return StepCollective("norm", self.mesh.world().ranks, partial(statistics.norms, owned, self.mesh))

    def _gradient_gathers(self) -> list[StepCollective[Pending]]:
        return [bucket.gradient_gather() for bucket in self.updated if bucket.zero_stage == 0]

    def _parameter_gathers(self) -> list[StepCollective[None]]:
        return [bucket.parameter_gather() for bucket in reversed(self.updated) if bucket.zero_stage in (1, 2)]

    def _counting(self) -> list[StepCollective[None]]:
        return [StepCollective("counts", ranks, partial(end_step, those)) for ranks, those in self._tallies.items()]

    def _clipping(self) -> list[StepCollective[None]]:
        clipped = [layer for layer in self._logits if layer.clip.threshold < math.inf]
        clip = partial(clip_logits, clipped, self.shards)
        return [StepCollective("largest logits", clipped[0].group.ranks, clip)] if clipped else []

    def _update(self, rates: Rates, result: StepResult, loss_scale: float = 1.0) -> None:
        """Apply the rules to the complete gradients, add up the tallies, clip the logits, and advance the means."""
        for bucket in self.updated:
            bucket.apply()
        for pending in [gather.run() for gather in self._gradient_gathers()]:
            pending.wait()
        if self.before_update is not None:
            self.before_update()
        for rule in self.rules if self._host_copies else ():
            if isinstance(rule, OnHost):
                rule.fetch_gradients()
        self.steps += 1
        self._apply_rules(rates, result, loss_scale)
        for part in (*self._counting(), *self._clipping()):
            part.run()
        for shard in self.shards:
            if shard.ema_decay is not None and shard.bucket in self.updated:
                shard.advance_means(shard.ema_decay)

    def _apply_rules(self, rates: Rates, result: StepResult, loss_scale: float) -> None:
        factor = clipping(self.config, result.gradient_norm) / loss_scale
        for rule in self.rules:
            rule.update(rates, self.steps, factor)

    def begin_parameter_gather(self) -> None:
        """Start to gather the parameters from their updated slices, under ZeRO 1 and 2."""
        for gather in self._parameter_gathers():
            gather.run()

    def parameter_norms(self) -> dict[str, float]:
        """Return the norms of the master weights, by parameter group."""
        return statistics.norms([(shard.bucket, shard.owned_masters) for shard in self.shards], self.mesh)

    def finish_parameter_gather(self) -> None:
        """Wait for the gathers that are still running after the step."""
        for bucket in (*self.buckets, *self.frozen):
            bucket.finish_parameter_gather()

    @contextmanager
    def gathered_parameters(self) -> Iterator[None]:
        """Keep all parameters of this rank's stages gathered within the block, for forward passes that the
        data-parallel ranks do not run in step. All ranks enter it together.
        """
        self.finish_parameter_gather()
        sharded = [bucket for bucket in (*self.buckets, *self.frozen) if bucket.zero_stage == 3]
        for bucket in sharded:
            bucket.begin_parameter_gather()
            bucket.keeps_gathered = True
        self.finish_parameter_gather()
        try:
            yield
        finally:
            for bucket in sharded:
                bucket.keeps_gathered = False
                bucket.free_parameters()


def clipping(config: OptimizerConfig, norm: float) -> float:
    """Return the factor that clips gradients of this norm."""
    return min(1.0, config.clip_grad / (norm + 1e-6)) if config.clip_grad > 0.0 else 1.0


_BY_SHARDS: Mapping[str, Callable[[Sequence[Shard], ParallelMesh, OptimizerConfig], UpdateRule]] = {
    "muon": Muon,
    "lars": Lars,
    "lamb": Lamb,
    "adafactor": Adafactor,
}


def make_rules(shards: Sequence[Shard], mesh: ParallelMesh, config: OptimizerConfig) -> list[UpdateRule]:
    """Return the update rules that together update each element of the shards once.

    A rule of whole tensors waits for the gradients of all its segments on the host. Rules of single elements update
    one while the next is on its way.
    """
    segments = [segment for shard in shards for segment in shard.segments]
    rules: list[UpdateRule] = []
    if config.optimizer in _BY_SHARDS:
        rule = _BY_SHARDS[config.optimizer](shards, mesh, config)
        its = [segment for segment in segments if segment.group.matrices or config.optimizer != "muon"]
        copies = [copy for segment in its for copy in segment.copies]
        rules.append(OnHost(rule, copies) if copies else rule)
        segments = [segment for segment in segments if config.optimizer == "muon" and not segment.group.matrices]
    if segments or not rules:
        of_elements = Lion if config.optimizer == "lion" else elementwise_rule
        rules.append(of_elements([segment for segment in segments if not segment.copies], config))
        copied = [part for segment in segments for part in segment.copied()]
        rules += (OnHost(of_elements([part], config), part.copies) for part in copied)
    return rules


def make_optimizer(
    networks: Sequence[nn.Module],
    mesh: ParallelMesh,
    config: OptimizerConfig,
    options: DataParallel,
    *,
    blocks: Sequence[Sequence[nn.Module]] = (),
    set_values: Callable[[Parameter], None] | None = None,
    synchronization: Synchronization | None = None,
    host: HostState | None = None,
    make: Callable[..., Optimizer] = Optimizer,
) -> Optimizer:
    """Move the parameters of `networks` into flat buckets and return this rank's part of the optimizer.

    Args:
        networks: one per chunk of this rank.
        mesh: the mesh of ranks.
        config: the hyperparameters.
        options: the options of data parallelism.
        blocks: the blocks of each network, in order of execution. ZeRO 3 needs them.
        set_values: sets the initial values of a parameter. None: the parameters already have them.
        synchronization: that of the ranks; None: plain data parallelism.
        host: the share of the state that is on the host; None: none of it.
        make: makes the optimizer of the buckets.
    """
    buckets = make_buckets(networks, mesh, options, blocks=blocks, set_values=set_values)
    frozen = make_frozen_buckets(networks, mesh, options, blocks=blocks, set_values=set_values)
    for chunk, network in enumerate(networks):
        gather_around_forward(network, blocks[chunk] if blocks else (), [*buckets, *frozen])
    several = mesh.size("dp", "cp") > options.instances or options.slices_on_host is not None
    each = options.zero_stage >= 2 and several
    return make(
        buckets,
        mesh,
        config,
        options,
        frozen=frozen,
        reduces_each_micro_batch=each or any(bucket.zero_stage >= 2 for bucket in (*buckets, *frozen)),
        module_states=list(states_of(nn.ModuleList(networks))),
        tallies=tallies_of(nn.ModuleList(networks)),
        logits=largest_logits_of(networks),
        synchronization=synchronization,
        host=host,
    )
