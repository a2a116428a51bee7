"""Hypotheses on an optimizer's step: one rule for each other thing that it may have done."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from megalite.extras.verify.command import Command, named_factors
from megalite.extras.verify.saved import Saved
from megalite.extras.verify.truth import copies_of_tensors, with_vocabulary
from megalite.extras.verify.update_rules import SGD, Adam, Muon, Rule
from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates, RateSchedules
from megalite.optim.muon import PRODUCTS
from megalite.optim.optimizer import clipping
from megalite.parallel.sharding import LogicalTensor

_DECAYS = (0.001, 0.01, 0.033, 0.05, 0.1, 0.2)
_EPSILONS = (0.0, 1e-16, 1e-15, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.95, 0.95), (0.9, 0.99))


@dataclass(frozen=True)
class StepFacts:
    """Facts about a step.

    Attributes:
        consumed: samples that its schedules have counted before it.
        number: number of its update, from 1.
        clip: factor that clips its gradients.
        norm: norm of its gradients; NaN if they are not known.
        norms: norms of the gradients of the logical tensors; empty if they are not known.
        skipped: whether it has updated nothing.
    """

    command: Command
    before: Saved
    schedules: RateSchedules
    consumed: int
    number: int
    clip: float
    norm: float
    norms: Mapping[str, float]
    skipped: bool

    @property
    def is_known(self) -> bool:
        """True if the update rule is one of those here."""
        optimizer = self.command.config.optimizer
        return optimizer.optimizer in ("adam", "sgd") or (optimizer.optimizer == "muon" and optimizer.muon_split_qkv)

    @cached_property
    def rates(self) -> Rates:
        return self.schedules.at(self.consumed)

    def emulated(self, rule: Rule) -> Rule:
        """Return a rule as the run computes it, where its flags ask for less precise products."""
        if not isinstance(rule, Muon) or self.command.precision == "fp64":
            return rule
        return replace(rule, products=PRODUCTS[self.command.config.optimizer.muon_fp32_matmul_prec])


@dataclass(frozen=True)
class Hypothesis:
    """Other thing that may have happened.

    Attributes:
        rule: the rule of each tensor.
        copies: what the copies of master weights are instead of these, rounded to nearest.
    """

    name: str
    rule: Callable[[LogicalTensor], Rule]
    copies: str = ""


def _group(tensor: LogicalTensor) -> ParameterGroup:
    return ParameterGroup(tensor.weight_decay, tensor.is_embedding_or_output, tensor.matrices is not None)


def rule_of(facts: StepFacts, tensor: LogicalTensor) -> Rule:
    """Return the rule by which the flags say that a tensor is updated."""
    config, group = facts.command.config.optimizer, _group(tensor)
    rate, decay = facts.rates.of(group)
    common: dict[str, Any] = {"rate": rate, "decay": decay, "factor": facts.clip}
    common |= {"leaves_weights": facts.skipped, "leaves_states": facts.skipped}
    if config.optimizer == "sgd":
        return SGD(momentum=config.sgd_momentum, **common)
    if config.optimizer == "muon" and group.matrices:
        return Muon(
            tensor=tensor.by_head() if config.muon_split_qkv_per_head else tensor,
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            coefficients=config.muon_coefficient_type,
            steps=config.muon_num_ns_steps,
            scale=config.muon_scale_mode,
            extra_scale=config.muon_extra_scale_factor,
            **common,
        )
    common |= {"beta1": config.adam_beta1, "beta2": config.adam_beta2}
    return Adam(epsilon=config.adam_eps, step=facts.number, **common)


def hypotheses(facts: StepFacts) -> Iterator[Hypothesis]:
    """Yield what may have happened in a step."""

    def every(name: str, kind: type[Rule] = Rule, **changes: Any) -> Hypothesis:
        """Return the hypothesis that rules of a kind have other fields."""

        def rule(tensor: LogicalTensor) -> Rule:
            own = rule_of(facts, tensor)
            return replace(own, **changes) if isinstance(own, kind) else own

        return Hypothesis(name, rule)

    def by_tensor(name: str, change: Callable[[LogicalTensor, Rule], Rule]) -> Hypothesis:
        return Hypothesis(name, lambda tensor: change(tensor, rule_of(facts, tensor)))

    optimizer = facts.command.config.optimizer
    yield every("weights were not updated", leaves_weights=True)
    yield every("averages were not updated", leaves_states=True)
    yield every("neither weights nor averages were updated", leaves_weights=True, leaves_states=True)
    yield every("averages began at zero", anew=True)
    yield by_tensor(
        "averages began at zero, and their step at 1",
        lambda tensor, rule: replace(rule, anew=True, step=1) if isinstance(rule, Adam) else replace(rule, anew=True),
    )
    yield every("averages are kept in bf16", rounds_states=torch.bfloat16)
    yield every("weights are updated in bf16, without master weights", rounds_weights=torch.bfloat16)
    yield every(
        "weights and averages are in bf16, without master weights",
        rounds_weights=torch.bfloat16,
        rounds_states=torch.bfloat16,
    )
    yield from _of_gradients(facts, by_tensor)
    yield from _of_rates(facts, by_tensor)
    yield from _of_decay(facts, by_tensor, every)
    if optimizer.optimizer in ("adam", "muon"):
        yield from _of_adam(facts, every)
    if optimizer.optimizer == "sgd":
        yield every("the gradient is damped by the momentum", SGD, dampening=optimizer.sgd_momentum)
        yield every("Nesterov's momentum", SGD, nesterov=True)
        yield every("weight decay apart from the gradient", SGD, decoupled=True)
        for momentum in (0.0, 0.9, 0.95, 0.99):
            yield every(f"momentum {momentum:g}", SGD, momentum=momentum)
    if optimizer.optimizer == "muon":
        yield from _of_muon(facts, every)
    same = lambda tensor: rule_of(facts, tensor)  # noqa: E731  # copies alone differ
    yield Hypothesis("copies are those of the master weights before the step", same, "of the masters before")
    yield Hypothesis("copies are truncated, and not rounded", same, "truncated")


_ByTensor = Callable[[str, Callable[[LogicalTensor, Rule], Rule]], Hypothesis]
_Every = Callable[..., Hypothesis]


def _of_gradients(facts: StepFacts, by_tensor: _ByTensor) -> Iterator[Hypothesis]:
    """Yield other factors of gradients."""

    def times(name: str, factor: Callable[[LogicalTensor], float]) -> Hypothesis:
        return by_tensor(name, lambda tensor, rule: replace(rule, factor=rule.factor * factor(tensor)))

    for factor, said in named_factors(facts.command.counts).items():
        yield times(f"gradients are {said}", lambda tensor, factor=factor: factor)  # type: ignore[misc]
    yield times("gradients have the other sign", lambda tensor: -1.0)
    config, clip = facts.command.config.optimizer, facts.clip
    if not math.isfinite(facts.norm) or not config.clip_grad:
        return
    yield times("gradients are not clipped", lambda tensor: 1 / clip)
    yield times("gradients are clipped twice", lambda tensor: clip)
    yield times(
        "each tensor is clipped by its own norm", lambda tensor: clipping(config, facts.norms[tensor.name]) / clip
    )
    copies = copies_of_tensors(with_vocabulary(facts.command, facts.before), facts.command.world_size)
    norms = {
        "a norm that counts replicas on each tensor-parallel rank": _total(
            facts, {name: each.tensor_parallel for name, each in copies.items()}
        ),
        "a norm that counts tied weights on each of their stages": _total(
            facts, {name: each.stages for name, each in copies.items()}
        ),
    }
    for said, count in facts.command.counts.items():
        norms[f"a norm divided by the root of {count}, {said}"] = facts.norm / math.sqrt(count)
        norms[f"a norm times the root of {count}, {said}"] = facts.norm * math.sqrt(count)
    for said, norm in norms.items():
        yield times(f"gradients are clipped by {said}", lambda tensor, norm=norm: clipping(config, norm) / clip)  # type: ignore[misc]


def _total(facts: StepFacts, weights: Mapping[str, float]) -> float:
    return math.sqrt(sum(weights.get(name, 1) * norm * norm for name, norm in facts.norms.items()))


def _of_rates(facts: StepFacts, by_tensor: _ByTensor) -> Iterator[Hypothesis]:
    """Yield other learning rates."""
    batch = facts.command.config.training.global_batch_size or 1
    schedules = facts.schedules

    def with_rates(name: str, rates: Rates) -> Hypothesis:
        return by_tensor(name, lambda tensor, rule: replace(rule, rate=rates.of(_group(tensor))[0]))

    yield with_rates("the learning rate is that of the step before", schedules.at(max(facts.consumed - batch, 0)))
    yield with_rates("the learning rate is that of the step after", schedules.at(facts.consumed + batch))
    yield with_rates("the learning rate is that of the first step", schedules.at(0))
    highest, ours = schedules.learning_rate.maximum, facts.rates
    yield with_rates(
        "the learning rate is the highest one", replace(ours, learning_rate=highest, token_table_learning_rate=highest)
    )
    one, other = ours.learning_rate, ours.token_table_learning_rate
    if one != other:
        yield with_rates(
            "the embedding and the output layer have the others' learning rate",
            replace(ours, token_table_learning_rate=one),
        )
        yield with_rates("all weights have the learning rate of the embedding", replace(ours, learning_rate=other))


def _of_decay(facts: StepFacts, by_tensor: _ByTensor, every: _Every) -> Iterator[Hypothesis]:
    """Yield other weight decays."""
    decay = facts.rates.weight_decay
    for other in _DECAYS:
        if other != decay:
            yield every(f"weight decay is {other:g}, not {decay:g}", decay=other)
    if not decay:
        return
    yield every("no weights decay", decay=0.0)
    yield every("norms and biases decay, too", decay=decay)
    yield by_tensor(
        "the embedding and the output layer do not decay",
        lambda tensor, rule: replace(rule, decay=0.0) if tensor.is_embedding_or_output else rule,
    )
    yield every("weight decay is a term of the gradient (L2)", Adam, decays="L2")
    yield every("weight decay is not multiplied by the learning rate", Adam, decays="by decay alone")
    yield every("weight decay is multiplied by the learning rate twice", Adam, decays="by the rate twice")
    highest = facts.schedules.learning_rate.maximum

    def by_highest(tensor: LogicalTensor, rule: Rule) -> Rule:
        return replace(rule, decay=rule.decay * highest / rule.rate) if rule.rate else rule

    yield by_tensor("weight decay is multiplied by the highest learning rate", by_highest)


def _of_adam(facts: StepFacts, every: _Every) -> Iterator[Hypothesis]:
    """Yield other constants and forms of Adam."""
    config, number = facts.command.config.optimizer, facts.number
    for epsilon in _EPSILONS:
        if epsilon != config.adam_eps:
            yield every(f"epsilon is {epsilon:g}, not {config.adam_eps:g}", Adam, epsilon=epsilon)
    yield every("epsilon is within the root", Adam, epsilon_in="root")
    yield every("epsilon is added before the bias correction", Adam, epsilon_in="uncorrected")
    for step, said in ((number + 1, "one too high"), (number - 1, "one too low"), (1, "1, as in a new run")):
        if step > 0 and step != number:
            yield every(f"the step of the bias correction is {said}", Adam, step=step)
    yield every("there is no bias correction", Adam, corrects=False)
    betas = config.adam_beta1, config.adam_beta2
    for beta1, beta2 in dict.fromkeys((betas[::-1], *_BETAS)):
        if (beta1, beta2) != betas:
            yield every(f"the betas are {beta1:g} and {beta2:g}", Adam, beta1=beta1, beta2=beta2)


def _of_muon(facts: StepFacts, every: _Every) -> Iterator[Hypothesis]:
    """Yield other constants and forms of Muon."""
    config = facts.command.config.optimizer
    nesterov = config.muon_nesterov
    yield every(f"Nesterov's momentum {'is missing' if nesterov else 'is used'}", Muon, nesterov=not nesterov)
    for kind, steps in (("simple", 5), ("quintic", 5), ("polar_express", 8)):
        yield every(f"{steps} steps with the coefficients {kind}", Muon, coefficients=kind, steps=steps)
    for mode in ("spectral", "unit_rms_norm", "shape_scaling"):
        if mode != config.muon_scale_mode:
            yield every(f"updates are scaled as by {mode}", Muon, scale=mode)
    for scale in (1.0, 0.2):
        if scale != config.muon_extra_scale_factor:
            yield every(f"the extra scale factor is {scale:g}", Muon, extra_scale=scale)
    for momentum in (0.9, 0.95):
        yield every(f"the momentum is {momentum:g}", Muon, momentum=momentum)
