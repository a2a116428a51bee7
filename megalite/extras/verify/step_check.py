"""Check that one optimizer step leads from a checkpoint to the next, and what else the optimizer may have done."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from megalite.data.loader import MicroBatchArrays
from megalite.extras.verify.command import Command
from megalite.extras.verify.saved import Saved
from megalite.extras.verify.step_hypotheses import Hypothesis, hypotheses, rule_of
from megalite.extras.verify.step_quantities import MODULE_STATE, NOT_UPDATED, Difference, StepGradients, StepTensors
from megalite.extras.verify.truth import OneProcess, emulated, open_data_of
from megalite.extras.verify.update_rules import Rule
from megalite.parallel.sharding import LogicalTensor

_MOST_ACCUSED, _MOST_OTHERS = 24, 12
"""Numbers of tensors that hypotheses are tried on."""
_ALIKE = 1e-3
"""Relative distance of factors that are taken as one."""


@dataclass(frozen=True)
class StepExplanation:
    """A hypothesis, and what it leaves.

    Attributes:
        ratio: times that the first accused quantity is farther from it than rounding explains.
        accused: the mean of that over all quantities of accused tensors, each at most 100.
        others: the mean over tensors that are not accused.
    """

    name: str
    ratio: float
    accused: float
    others: float

    @property
    def explains(self) -> bool:
        return self.ratio <= 1.0

    @property
    def order(self) -> tuple[bool, float, float]:
        """Sort key: the best one first."""
        return not self.explains, self.accused, self.others


@dataclass(frozen=True)
class StepCheck:
    """Result of the check.

    Attributes:
        differences: the quantities in the order of a step.
        explanations: the best one first.
        left: quantities that differ by more than rounding under the best explanation, too.
    """

    differences: tuple[Difference, ...]
    explanations: tuple[StepExplanation, ...] = ()
    left: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Difference | None:
        """The first quantity that is farther off than rounding explains."""
        return next((each for each in self.differences if each.is_accused), None)


def gradients_of(command: Command, start: Saved, batches: Sequence[MicroBatchArrays] | None = None) -> StepGradients:
    """Compute the gradients of the step after a checkpoint, over micro-batches, or the samples of the data flags.

    Raises DataError if the data are not here, and CheckpointError if the checkpoint is of another network.
    """
    data = open_data_of(command)

    def compute(run: OneProcess) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        run.step(run.micro_batches() if batches is None else run.made(batches))
        return run.gradients, run.states()

    exact, states = compute(OneProcess(command, data, start))
    rounded = [compute(OneProcess(command, data, start, each)) for each in emulated(command)]
    return StepGradients(
        exact, [each for each, _ in rounded], states=states, rounded_states=[each for _, each in rounded]
    )


def check_step(command: Command, before: Saved, after: Saved, gradients: StepGradients | None = None) -> StepCheck:
    """Check that one step leads from a checkpoint to another one.

    Args:
        gradients: those of the step; None: only what follows from the averages is checked.

    Raises:
        CheckpointError: the checkpoints are of different networks, or not one step apart.
    """
    step = StepTensors.of(command, before, after, gradients)
    base = Hypothesis("", partial(rule_of, step.facts))
    differences = step.in_order(each for tensor in step.tensors for each in step.load(tensor).compared(base))
    differences += step.states()
    check = StepCheck(tuple(differences), notes=(*before.notes, *after.notes, *step.notes))
    if check.first is None or check.first.kind == MODULE_STATE:
        return check
    if check.first.kind == NOT_UPDATED:
        return replace(check, explanations=(StepExplanation("the state was not updated", 0.0, 0.0, 0.0),))
    tried = _tried(step, list(hypotheses(step.facts)), differences)
    best, _ = tried[0]
    if not (best.explains and best.accused <= 1.0) and (fitted := _fitted(step, differences)) is not None:
        tried = sorted([*tried, *_tried(step, [fitted], differences)], key=lambda pair: pair[0].order)
    best, hypothesis = tried[0]
    under = (each for tensor in step.tensors for each in step.load(tensor).compared(hypothesis))
    left = step.in_order(each for each in under if each.is_accused) if best.explains else []
    return replace(check, explanations=tuple(each for each, _ in tried), left=tuple(left))


def _tried(
    step: StepTensors, candidates: Sequence[Hypothesis], differences: Sequence[Difference]
) -> list[tuple[StepExplanation, Hypothesis]]:
    """Try hypotheses on the first accused tensors and on some of the others. Returns them with the best one first."""
    first = next(each for each in differences if each.is_accused)
    accused = list(dict.fromkeys(each.tensor for each in differences if each.is_accused))[:_MOST_ACCUSED]
    rest = [name for name in dict.fromkeys(each.tensor for each in differences) if name not in accused]
    names = {*accused, *rest[:_MOST_OTHERS]}
    tolerances = {(each.tensor, each.kind): each.tolerance for each in differences}
    of_first = [math.inf] * len(candidates)
    means: list[dict[bool, list[float]]] = [{True: [0.0], False: [0.0]} for _ in candidates]
    for tensor in (each for each in step.tensors if each.name in names):
        loaded = step.load(tensor)
        for at, candidate in enumerate(candidates):
            for each in loaded.compared(candidate):
                tolerance = tolerances.get((each.tensor, each.kind), each.tolerance)
                means[at][tensor.name in accused].append(min(replace(each, tolerance=tolerance).ratio, 100.0))
                if (each.tensor, each.kind) == (first.tensor, first.kind):
                    of_first[at] = each.ratio
    found = [
        (StepExplanation(each.name, ratio, _mean(own[True]), _mean(own[False])), each)
        for each, ratio, own in zip(candidates, of_first, means, strict=True)
    ]
    return sorted(found, key=lambda pair: pair[0].order)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _fitted(step: StepTensors, differences: Sequence[Difference]) -> Hypothesis | None:
    """Return the hypothesis that all gradients have one more factor: that of most averages; None if these differ."""
    factors = [each.factor for each in differences if each.factor and each.aside <= each.tolerance]
    if not factors:
        return None
    common = statistics.median(factors)
    alike = sum(abs(factor / common - 1) < _ALIKE for factor in factors)
    if common <= 0 or 2 * alike <= len(factors) or abs(common - 1) < _ALIKE:
        return None
    facts, said = step.facts, f"gradients are multiplied by {common:.6g}"
    limit = facts.command.config.optimizer.clip_grad
    if limit and facts.clip * common < 1:
        said += f": they are clipped by a norm of {limit / (facts.clip * common):.6g}, not {facts.norm:.6g}"

    def rule(tensor: LogicalTensor) -> Rule:
        own = rule_of(facts, tensor)
        return replace(own, factor=own.factor * common)

    return Hypothesis(said, rule)
