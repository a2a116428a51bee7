"""The walk through a step: forward and backward in the order of execution, each recorded tensor beside the truth."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.checkpoint.tensors import Source
from megalite.extras.verify.batches import StepBatches
from megalite.extras.verify.command import OF_ROUTERS
from megalite.extras.verify.correspondence import Correspondence, Counterpart, WeightCounterpart
from megalite.extras.verify.cuts import NoCounterpart
from megalite.extras.verify.judgement import Judgement, compare
from megalite.extras.verify.partial_sums import complete_entries
from megalite.extras.verify.points import Point
from megalite.extras.verify.replay import Gradients, Replay, Seen
from megalite.extras.verify.trace import LAST, OF_MODULES, Entry, Role, Trace
from megalite.parallel.sharding import Box

OF_WEIGHTS: tuple[Role, ...] = ("gradient", "main_gradient")


@dataclass(frozen=True)
class Convention:
    """Scale of the loss of a micro-batch before backward, and of gradients within it.

    Attributes:
        name: for messages.
        factors: factor of each micro-batch's sum of token losses in the loss of the step.
        of_modules: factor of gradients within backward, relative to those of the step.
        of_routers: factor of the terms of routers in the loss.
    """

    name: str
    factors: tuple[float, ...]
    of_modules: float = 1.0
    of_routers: float = 1.0


@dataclass
class Walk:
    """Comparison of a trace with a replay of the same micro-batches.

    Attributes:
        batches: the micro-batches of the replay, and which rank has which.
        conventions: ways to scale that the program may have; the one nearest to the first recorded gradient is taken.
        judgements: what has been compared so far, in order.
        skipped: why entries were not compared, with their number.
    """

    trace: Trace
    correspondence: Correspondence
    replay: Replay
    batches: StepBatches
    conventions: Sequence[Convention]
    judgements: list[Judgement] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    multipliers: list[dict[str, float]] = field(default_factory=list)
    """Factor of each term of the loss, for each micro-batch; empty if there was no backward pass."""
    scale: float = 1.0
    """Factor of gradients within backward, after the walk."""
    gradient_squares: list[float] = field(default_factory=list)
    """Squares of the norm of all gradients, for each of the numerics, after the walk."""
    loss_sums: list[float] = field(default_factory=list)
    """The loss of the step by each of the numerics, if the replay has all of it."""
    token_means: list[float] = field(default_factory=list)
    """The mean loss of all tokens that count, which Megatron-LM logs whatever it differentiates."""

    def run(self) -> None:
        """Compare everything that has a counterpart."""
        self._parameters()
        modules, weights = self._index()
        losses = [[0.0] * len(self.replay.batches) for _ in self.replay.numerics]
        for seen in self.replay.forward():
            self._look(seen, modules, 1.0)
            for at, terms in enumerate(seen.terms):
                losses[at][seen.micro_batch] += terms.get("lm_loss", 0.0)
        if not any(point.role.endswith("gradient") for _, point in modules) and not (weights and self.batches.whole):
            self._count_rest(modules, weights)
            return
        convention = self.conventions[0]
        self.loss_sums = [sum(a * b for a, b in zip(convention.factors, each, strict=True)) for each in losses]
        count = sum(float(each["loss_mask"].sum()) for each in self.replay.batches)
        self.token_means = [sum(each) / max(count, 1.0) for each in losses]
        self.multipliers = self._multipliers(convention)
        self.gradient_squares = [0.0 for _ in self.replay.numerics]
        scale: float | None = None
        self.scale = convention.of_modules
        for found in self.replay.backward(self.multipliers):
            if isinstance(found, Gradients):
                if self.batches.whole:
                    self._weights(found, weights)
                continue
            if scale is None:
                scale = self._scale(found, modules)
                self.scale = self.scale if scale is None else scale
            self._look(found, modules, self.scale, gradients=True)
        self._count_rest(modules, weights)

    def number_of(self, entry: Entry) -> int | None:
        """Return the number in the replay of an entry's micro-batch; None if it is not replayed."""
        replica = self.trace.coordinates.get(entry.rank, {}).get("dp", (self.batches.replica_of.get(entry.rank, 0), 0))
        return self.batches.numbers.get((replica[0], entry.micro_batch))

    # -------------------------------------------------------------------------------------------- parts

    def _index(
        self,
    ) -> tuple[
        dict[tuple[int, Point], list[tuple[Entry, Counterpart]]], dict[str, list[tuple[Entry, WeightCounterpart]]]
    ]:
        """Find the counterparts of all entries, and count those that have none."""
        modules: dict[tuple[int, Point], list[tuple[Entry, Counterpart]]] = defaultdict(list)
        weights: dict[str, list[tuple[Entry, WeightCounterpart]]] = defaultdict(list)
        self.correspondence.separate_norms([entry.name for entry in self.trace.entries if entry.role in OF_MODULES])
        batch, sequence = self.replay.batches[0]["tokens"].shape
        for entry in complete_entries(self.trace, self._skip):
            coordinates = self.trace.coordinates.get(entry.rank, {})
            try:
                if entry.role in OF_MODULES:
                    number = self.number_of(entry)
                    if number is None:
                        raise NoCounterpart(
                            f"micro-batch {_shown(entry.micro_batch)} of rank {entry.rank} is not replayed"
                        )
                    found = self.correspondence.of_module(entry, coordinates, batch, sequence)
                    modules[number, found.point].append((entry, found))
                elif entry.role in OF_WEIGHTS:
                    weight = self.correspondence.of_weight(entry, coordinates)
                    weights[weight.logical[0]].append((entry, weight))
            except NoCounterpart as reason:
                self._skip(reason)
        return modules, weights

    def _skip(self, reason: object) -> None:
        """Count an entry that is not compared; the same reason in other layers, ranks and micro-batches is one."""
        self.skipped[re.sub(r"(?<=[.\[ ])\d+(?=[.# ])", "N", str(reason))] += 1

    def _look(
        self,
        seen: Seen,
        modules: dict[tuple[int, Point], list[tuple[Entry, Counterpart]]],
        scale: float,
        *,
        gradients: bool = False,
    ) -> None:
        """Judge the entries that show points of a stage, and take them off the list."""
        for point in list(seen.values[0]):
            if point.role.endswith("gradient") != gradients:
                continue
            for entry, counterpart in modules.pop((seen.micro_batch, point), ()):
                expected = [counterpart.cut(values[point]) * scale for values in seen.values]
                self._judge(entry, point, expected, layer_of(point.module))

    def _judge(self, entry: Entry, point: Point | None, expected: Sequence[Tensor], layer: int | None) -> Judgement:
        stores = 2 * self.batches.per_rank if entry.role in OF_WEIGHTS else 0  # each micro-batch: its term, and the sum
        others = None
        if len(expected) == len(self.replay.numerics) and self.replay.numerics[-1].other_choices:
            *expected, others = expected
        distance, rounding, spread, norm = compare(entry.read(), expected, stores, others)
        found = Judgement(entry, point, layer, len(self.judgements), distance, rounding, spread, norm)
        self.judgements.append(found)
        return found

    def _scale(
        self, seen: Seen, modules: Mapping[tuple[int, Point], Sequence[tuple[Entry, Counterpart]]]
    ) -> float | None:
        """Return the factor of gradients within backward by which the first recorded one is nearest."""
        for point, truth in seen.values[0].items():
            for entry, counterpart in modules.get((seen.micro_batch, point), ()):
                if point.role.endswith("gradient"):
                    evidence, part = entry.read(), counterpart.cut(truth).double()
                    return min(
                        (convention.of_modules for convention in self.conventions),
                        key=lambda factor: evidence.distance(part * factor),
                    )
        return None

    def _weights(self, found: Gradients, weights: dict[str, list[tuple[Entry, WeightCounterpart]]]) -> None:
        """Judge the gradients of a stage's weights."""
        for name in list(found.values[0]):
            for at, values in enumerate(found.values):
                self.gradient_squares[at] += float(values[name].double().square().sum())
            for entry, counterpart in weights.pop(name, ()):
                if any(each not in found.values[0] for each in counterpart.logical):
                    self._skip(f"{entry.name} has parts without a gradient")
                    continue
                expected = [counterpart.cut(counterpart.whole(values)) for values in found.values]
                self._judge(entry, None, expected, layer_of(name))

    def _parameters(self) -> None:
        """Compare recorded parameters with the checkpoint, whose values they must have but for rounding."""
        for entry in self.trace.entries:
            if entry.role != "parameter":
                continue
            try:
                counterpart = self.correspondence.of_weight(entry, self.trace.coordinates.get(entry.rank, {}))
            except NoCounterpart as reason:
                self._skip(reason)
                continue
            values = {name: read_whole(self.replay.source, name) for name in counterpart.logical}
            expected = counterpart.cut(counterpart.whole(values))
            evidence = entry.read()
            self._judge(entry, None, (expected, expected.to(evidence.dtype)), layer_of(counterpart.logical[0]))

    def _multipliers(self, convention: Convention) -> list[dict[str, float]]:
        """Return the factor of each term of the loss for each micro-batch."""
        terms = self.replay.terms
        batches = [self.replay.micro_batch(number) for number in range(len(self.replay.batches))]
        counts = {term.name: sum(float(term.count(each)) for each in batches) for term in terms}
        others = {term.name: term.weight / counts[term.name] if counts[term.name] else 0.0 for term in terms}
        others |= {name: others[name] * convention.of_routers for name in OF_ROUTERS & others.keys()}
        return [others | {"lm_loss": factor} for factor in convention.factors]

    def _count_rest(
        self,
        modules: Mapping[tuple[int, Point], Sequence[tuple[Entry, Counterpart]]],
        weights: Mapping[str, Sequence[tuple[Entry, WeightCounterpart]]],
    ) -> None:
        """Count the entries whose points the replay did not show."""
        for (_, point), entries in modules.items():
            for _ in entries:
                self._skip(f"{point.role} of {point.module} is not computed in the replay")
        rest = sum(map(len, weights.values()))
        if rest:
            self.skipped["gradients of weights, which need all micro-batches of the step"] += rest


def read_whole(source: Source, name: str) -> Tensor:
    """Return a logical tensor in fp64."""
    kind = source.tensors[name]
    values = torch.empty(kind.shape, dtype=torch.float64)
    source.fill(name, Box.whole(kind.shape), values)
    return values


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a module or a logical tensor is in; None if it is in none."""
    found = re.match(r"layers\.(\d+)", name)
    return int(found[1]) if found is not None else None


def _shown(micro_batch: int) -> str:
    return "the last one" if micro_batch == LAST else str(micro_batch)


def first_difference(judgements: Sequence[Judgement]) -> Judgement | None:
    """Return the first tensor that differs by more than rounding explains; of one point, the worst rank's."""
    first = next((each for each in judgements if each.differs), None)
    if first is None:
        return None
    same = (each for each in judgements if each.point == first.point and each.entry.name == first.entry.name)
    alike = [each for each in same if each.entry.role == first.entry.role and each.differs]
    return max(alike, key=lambda each: each.ratio if math.isfinite(each.ratio) else math.inf)


def ranks_of(judgements: Sequence[Judgement], first: Judgement) -> Iterator[int]:
    """Yield the ranks on which the same tensor differs."""
    for each in judgements:
        if (each.entry.name, each.entry.role, each.differs) == (first.entry.name, first.entry.role, True):
            yield each.entry.rank
