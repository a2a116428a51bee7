"""Quantities of each tensor after an optimizer step, beside what should have come out of it.

Each is computed from what the step began with and from what was saved of the step itself, so that an error in one does
not hide in the others: averages from the gradient, the average of squares from the gradient that the other average
tells, weights from the averages after the step, copies from the master weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Source
from megalite.conversion.opened import tensors_of_training
from megalite.errors import CheckpointError
from megalite.extras.verify.command import Command
from megalite.extras.verify.saved import MASTER, Saved
from megalite.extras.verify.step_hypotheses import Hypothesis, StepFacts
from megalite.extras.verify.update_rules import AVERAGE, MOMENTUM, SQUARES, STATES, Adam, Rule
from megalite.optim.learning_rate import rate_schedules
from megalite.optim.optimizer import clipping
from megalite.parallel.sharding import LogicalTensor

COPIES, WEIGHTS = "copies", "weights"
MODULE_STATE, NOT_UPDATED = "state", "state, as before the step"
_ALLOWED = 8.0
"""Times that a tensor may be farther from fp64 than emulated runs are, in root mean square."""
_ALLOWED_OF_SUMS = 4.0
"""Times that it may be farther than the same formula in fp32, whose operations other kernels have in another order."""


@dataclass(frozen=True)
class StepGradients:
    """Gradients of a step by logical name, summed over all ranks, before they are clipped.

    Attributes:
        exact: those to compare with.
        rounded: the same from emulated runs, which tell what rounding explains; empty if `exact` are the step's own.
        norm: their norm over the whole network; None: it is that of `exact`.
        states: what modules keep beside weights, after the step, by the names of checkpoints.
        rounded_states: the same in emulated runs.
    """

    exact: Mapping[str, Tensor]
    rounded: Sequence[Mapping[str, Tensor]] = ()
    norm: float | None = None
    states: Mapping[str, Tensor] = field(default_factory=dict)
    rounded_states: Sequence[Mapping[str, Tensor]] = ()

    def norm_of(self, gradients: Mapping[str, Tensor]) -> float:
        if self.norm is not None:
            return self.norm
        return math.hypot(*(float(torch.linalg.vector_norm(each, dtype=torch.float64)) for each in gradients.values()))


@dataclass(frozen=True)
class Difference:
    """Quantity of a tensor after the step, beside what should have come out.

    Attributes:
        tensor: its logical name.
        kind: weights, copies, or the name of an average.
        distance: norm of the difference.
        tolerance: the norm that rounding explains.
        change: norm of the change that the step makes.
        factor: of an average of gradients, the number of times that the gradient is there, by least squares.
        aside: what is left of the distance if it is there so many times.
    """

    tensor: str
    kind: str
    distance: float
    tolerance: float
    change: float = 0.0
    factor: float | None = None
    aside: float = math.inf

    @property
    def ratio(self) -> float:
        """Times that it is farther off than rounding explains."""
        return self.distance / self.tolerance if self.tolerance else math.inf if self.distance else 0.0

    @property
    def is_accused(self) -> bool:
        return not self.ratio <= 1.0


def _unit(dtype: torch.dtype) -> float:
    """Return the largest relative error of rounding to a dtype."""
    return torch.finfo(dtype).eps / 2


def _norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values))


@dataclass(frozen=True)
class StepTensors:
    """The two checkpoints, and what is known of the step between them."""

    facts: StepFacts
    before: Saved
    after: Saved
    gradients: StepGradients | None
    tensors: Sequence[LogicalTensor]
    clips: Sequence[float] = ()
    """Factors that clip the gradients of the emulated runs, over that of the exact ones."""
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(command: Command, before: Saved, after: Saved, gradients: StepGradients | None) -> StepTensors:
        """Put together what is known. Raises CheckpointError."""
        shapes = [{name: kind.shape for name, kind in each.weights.source.tensors.items()} for each in (before, after)]
        if shapes[0] != shapes[1]:
            name = next(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
            raise CheckpointError(f"{before.what} and {after.what} are of different networks: they differ in {name}")
        if None not in (before.iteration, after.iteration) and after.iteration != (before.iteration or 0) + 1:
            raise CheckpointError(
                f"{after.what} is at step {after.iteration}, not at the step after {before.iteration}, where "
                f"{before.what} is: save two steps in a row (--save-interval 1)"
            )
        config, notes = command.config, []
        batch = config.training.global_batch_size or 1
        schedules = rate_schedules(
            config.optimizer, config.training, hidden_size=config.model.hidden_size, global_batch_size=batch
        )
        consumed, updates = before.consumed_samples, before.updates
        if consumed is None:
            consumed = (before.iteration or 0) * batch
            notes.append(f"{before.what} does not say how many samples were consumed: taken as {consumed}")
        if updates is None:
            updates = before.iteration or 0
            notes.append(f"{before.what} does not say how many updates it has had: taken as {updates}")
        clip, clips, norm = 1.0, [], math.nan
        if gradients is not None:
            norm = gradients.norm_of(gradients.exact)
            clip = clipping(config.optimizer, norm)
            clips = [clipping(config.optimizer, gradients.norm_of(each)) / clip for each in gradients.rounded]
        skipped = after.updates is not None and after.updates == before.updates
        if skipped:
            notes.append("the step was skipped: the count of updates is the same in both")
        norms = {} if gradients is None else {name: _norm(each.double()) for name, each in gradients.exact.items()}
        facts = StepFacts(command, before, schedules, consumed, updates + 1, clip, norm, norms, skipped)
        model = before.weights.config
        tensors = [each for name, each in tensors_of_training(model).items() if name in shapes[0] and "/" not in name]
        if not facts.is_known:
            notes.append(f"--optimizer {config.optimizer.optimizer} is not computed here: only copies are compared")
        return StepTensors(facts, before, after, gradients, tensors, clips, tuple(notes))

    def in_order(self, differences: Iterable[Difference]) -> list[Difference]:
        """Return quantities in the order of a step.

        First come averages of gradients, which backward computes from the end of the network to its beginning.
        """
        place = {tensor.name: number for number, tensor in enumerate(self.tensors)}
        stages = {AVERAGE: 0, MOMENTUM: 0, SQUARES: 1, WEIGHTS: 2, COPIES: 3}

        def order(each: Difference) -> tuple[int, int]:
            stage = stages[each.kind]
            return stage, place[each.tensor] if stage else -place[each.tensor]

        return sorted(differences, key=order)

    def states(self) -> Iterator[Difference]:
        """Yield what modules keep beside weights, such as the biases of routers, after the step."""
        known, here = self.gradients, self.after.weights.source
        for name, expected in () if known is None else known.states.items():
            if name not in here.tensors:
                continue
            recorded, before = Recorded.read(here, name), Recorded.read(self.before.weights.source, name)
            apart = [_norm(each[name] - expected) for each in known.rounded_states] if known is not None else []
            spread = math.sqrt(sum(each * each for each in apart) / len(apart)) if apart else 0.0
            tolerance = _ALLOWED * spread + 2 * recorded.unit * (_norm(expected) + _norm(before.values))
            distance, change = _norm(recorded.values - expected), _norm(expected - before.values)
            stays = torch.equal(recorded.values, before.values)
            yield Difference(
                name.partition("/")[2], NOT_UPDATED if stays else MODULE_STATE, distance, tolerance, change
            )

    def load(self, tensor: LogicalTensor) -> StepTensor:
        """Read a tensor from both checkpoints, with its gradients."""
        name, number = tensor.name, self.facts.number
        weights = Recorded.read(self.before.precise.source, name)
        states, after = (_states(each, name) for each in (self.before, self.after))
        is_frozen = bool(self.before.states.keys() - {MASTER}) and not states
        if not states and not is_frozen and number == 1:
            states = {kind: replace(weights, values=torch.zeros_like(weights.values)) for kind in STATES}
        exact = None if self.gradients is None else self.gradients.exact.get(name)
        rounded = self.gradients.rounded if self.gradients is not None and exact is not None else ()
        masters = self.after.states.get(MASTER)
        has_master = masters is not None and name in masters.tensors
        return StepTensor(
            tensor,
            self.facts,
            weights=weights.values,
            states={kind: each.values for kind, each in states.items()},
            after=after,
            weights_after=Recorded.read(self.after.precise.source, name),
            copy=Recorded.read(self.after.weights.source, name) if has_master else None,
            gradient=None if exact is None else exact.double(),
            rounded=[each[name].double() * clip for each, clip in zip(rounded, self.clips, strict=bool(rounded))],
            is_frozen=is_frozen,
        )


def _states(saved: Saved, name: str) -> dict[str, Recorded]:
    """Return the averages of a tensor that a checkpoint has."""
    own = {kind: source for kind, source in saved.states.items() if kind != MASTER and name in source.tensors}
    return {kind: Recorded.read(source, name) for kind, source in own.items()}


@dataclass(frozen=True)
class Recorded:
    """Values in a checkpoint in fp64, and the dtype in which they were saved."""

    values: Tensor
    dtype: torch.dtype

    @staticmethod
    def read(source: Source, name: str) -> Recorded:
        """Read a tensor. Raises CheckpointError."""
        kind = source.tensors[name]
        values = torch.empty(kind.shape, dtype=torch.float64)
        source.fill(name, kind.whole, values)
        return Recorded(values, kind.dtype)

    @property
    def unit(self) -> float:
        """Largest relative error of rounding to the dtype."""
        return _unit(self.dtype)


@dataclass(frozen=True)
class StepTensor:
    """A tensor before and after a step.

    Attributes:
        weights: before the step, master weights if there are any.
        states: the averages before it; empty if they are not known.
        copy: the weights after it beside their masters; None if there are no masters.
        gradient: None if it is not known.
        rounded: the gradients of emulated runs, with the difference of their clipping.
        is_frozen: whether the optimizer leaves it as it is.
    """

    tensor: LogicalTensor
    facts: StepFacts
    weights: Tensor
    states: Mapping[str, Tensor]
    after: Mapping[str, Recorded]
    weights_after: Recorded
    copy: Recorded | None
    gradient: Tensor | None
    rounded: Sequence[Tensor]
    is_frozen: bool

    def compared(self, hypothesis: Hypothesis) -> Iterator[Difference]:
        """Yield its quantities after the step, beside what a hypothesis says."""
        name = self.tensor.name
        if self.is_frozen:
            after, before = self.weights_after.values, self.weights
            yield Difference(name, WEIGHTS, _norm(after - before), self.weights_after.unit * _norm(before))
        elif self.facts.is_known:
            yield from _UnderRule(self, hypothesis.rule(self.tensor)).quantities()
        if self.copy is not None:
            master, dtype = self.weights_after.values, self.copy.dtype
            if hypothesis.copies == "of the masters before":
                master = self.weights
            expected = _truncated(master, dtype) if hypothesis.copies == "truncated" else master.to(dtype).double()
            distance = _norm(self.copy.values - expected)
            yield Difference(name, COPIES, distance, self.copy.unit * 2.0**-10 * _norm(expected))


def _truncated(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded toward zero to a dtype."""
    nearest = values.to(dtype)
    toward = torch.nextafter(nearest, torch.zeros_like(nearest))
    return torch.where(nearest.double().abs() > values.abs(), toward, nearest).double()


@dataclass(frozen=True)
class _UnderRule:
    """Averages and weights of a tensor after a step by a rule."""

    step: StepTensor
    rule: Rule

    @property
    def narrow(self) -> torch.dtype:
        """Dtype in which the optimizer computes."""
        return torch.promote_types(torch.float32, self.step.weights_after.dtype)

    def quantities(self) -> Iterator[Difference]:
        """Yield the averages and the weights."""
        step, rule = self.step, self.rule
        names, computed, variants = {*rule.names}, dict[str, Tensor](), list[dict[str, Tensor]]()
        if step.states.keys() >= names and step.gradient is not None:
            computed = rule.states(step.gradient, step.states, step.weights)
            variants = [rule.states(each, step.states, step.weights) for each in step.rounded]
            yield from self._averages(computed, variants)
        if isinstance(rule, Adam) and step.after.keys() >= {AVERAGE, SQUARES} and step.states:
            yield self._squares(rule)
        after = {name: each.values for name, each in step.after.items()}
        whole = after if names and after.keys() >= names else computed
        if whole.keys() >= names and not (rule.needs_gradient and step.gradient is None):
            expected = rule.weights(step.weights, whole, step.gradient)
            apart: list[float] = []
            if whole is computed or rule.needs_gradient:
                states = variants if whole is computed else [after] * len(step.rounded)
                pairs = zip(step.rounded, states, strict=True)
                apart = [_norm(rule.weights(step.weights, own, each) - expected) for each, own in pairs]
            yield self._weights(whole, expected, apart, narrowed=whole is after)
        elif isinstance(rule, Adam):
            yield self._bound(rule)

    def _averages(
        self, computed: Mapping[str, Tensor], variants: Sequence[Mapping[str, Tensor]]
    ) -> Iterator[Difference]:
        """Yield the averages of gradients, beside those of the gradients that are given."""
        step, rule, gradient = self.step, self.rule, self.step.gradient
        assert gradient is not None  # otherwise nothing is computed
        in_narrow = rule.states(gradient.to(self.narrow), _to(step.states, self.narrow), step.weights.to(self.narrow))
        nothing = rule.states(torch.zeros_like(gradient), step.states, step.weights)
        for name in rule.names:
            if name in step.after and not (name == SQUARES and AVERAGE in step.after):
                apart = [_norm(each[name] - computed[name]) for each in variants]
                found = self._difference(name, step.after[name], computed[name], apart, in_narrow[name])
                yield _with_factor(found, step.after[name].values - nothing[name], computed[name] - nothing[name])

    def _squares(self, rule: Adam) -> Difference:
        """Compare the average of squares with what the other average says of the gradient."""
        before, after = self.step.states[AVERAGE], self.step.after[AVERAGE]
        gradient, squares = rule.gradient_from(before, after.values), self.step.states[SQUARES]
        expected = rule.squares_from(squares, gradient)
        unsure = 2 * after.unit * (after.values.abs() + rule.beta1 * before.abs()) / (1 - rule.beta1)
        apart = (1 - rule.beta2) * _norm(2 * gradient.abs() * unsure + unsure.square())
        in_narrow = rule.squares_from(squares.to(self.narrow), gradient.to(self.narrow))
        found = self._difference(SQUARES, self.step.after[SQUARES], expected, (), in_narrow)
        return replace(found, tolerance=found.tolerance + apart)

    def _weights(
        self, states: Mapping[str, Tensor], expected: Tensor, apart: Sequence[float], *, narrowed: bool
    ) -> Difference:
        """Compare the weights. `narrowed`: the averages are those that were saved, perhaps in a narrower dtype."""
        step, dtype = self.step, self.narrow
        gradient = None if step.gradient is None else step.gradient.to(dtype)
        other = step.facts.emulated(self.rule).weights(step.weights.to(dtype), _to(states, dtype), gradient)
        found = self._difference(WEIGHTS, step.weights_after, expected, apart, other)
        unit = max((each.unit for each in step.after.values()), default=0.0) if narrowed else 0.0
        return replace(found, tolerance=found.tolerance + 2 * unit * found.change)

    def _bound(self, rule: Adam) -> Difference:
        """Compare weights with the largest change that any gradients could have made."""
        after = self.step.weights_after
        change = after.values - self.step.weights * (1 - rule.rate * rule.decay)
        allowed = rule.rate * rule.largest_update + 2 * after.unit * after.values.abs()
        beyond = _norm((change.abs() - allowed).clamp(min=0))
        return Difference(self.step.tensor.name, WEIGHTS, beyond, after.unit * _norm(after.values), _norm(change))

    def _difference(
        self, kind: str, recorded: Recorded, expected: Tensor, apart: Sequence[float], other: Tensor
    ) -> Difference:
        """Compare a quantity.

        Args:
            apart: distances of emulated runs.
            other: the expected one, computed in the precision of the optimizer.
        """
        spread = math.sqrt(sum(each * each for each in apart) / len(apart)) if apart else 0.0
        rounds = self.rule.rounds_weights if kind == WEIGHTS else self.rule.rounds_states
        unit = recorded.unit if rounds is None else 2 * _unit(rounds)  # a program may round between operations, too
        of_sums, of_storage = _norm(other.double() - expected), unit * _norm(expected)
        tolerance = _ALLOWED * spread + _ALLOWED_OF_SUMS * of_sums + of_storage
        before = self.step.weights if kind == WEIGHTS else self.step.states.get(kind, torch.zeros_like(expected))
        distance = _norm(recorded.values - expected)
        return Difference(self.step.tensor.name, kind, distance, tolerance, _norm(expected - before))


def _with_factor(found: Difference, recorded: Tensor, expected: Tensor) -> Difference:
    """Add how many times the gradient is in an average, from what the gradients have added to it."""
    square = float(expected.square().sum())
    if not square or found.kind == SQUARES:
        return found
    factor = float((recorded * expected).sum()) / square
    return replace(found, factor=factor, aside=_norm(recorded - factor * expected))


def _to(states: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: values.to(dtype) for name, values in states.items()}
