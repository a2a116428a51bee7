"""Errors and intervals of predictions of published runs."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.planner.fit import Fit
from benchmarks.planner.programs import PROGRAMS
from benchmarks.planner.published import Run

_COVERED = 0.9
_FEW = 20
"""Runs of a program below which its interval is that of all programs."""


@dataclass(frozen=True)
class Prediction:
    """Run with the seconds that a fit without its source predicts."""

    run: Run
    seconds: float

    @property
    def log(self) -> float:
        """Logarithm of predicted to measured seconds."""
        return math.log(self.seconds / (self.run.seconds or math.nan))

    @property
    def error(self) -> float:
        """Error as a share of the measured seconds, with its sign."""
        return math.exp(self.log) - 1


def predictions(fit: Fit) -> list[Prediction]:
    """Return the predictions of all runs but those that are kept for the number of a program."""
    by_number = {run.number: run for run in fit.runs}
    found: dict[int, float] = {}
    for source in dict.fromkeys(run.source for run in fit.runs):
        found |= fit.without(source)
    return [Prediction(by_number[number], seconds) for number, seconds in sorted(found.items())]


def mean_error(found: Iterable[Prediction]) -> float:
    """Return the mean absolute error."""
    return fmean(abs(each.error) for each in found)


def of_lineage(found: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions of Megatron-LM and of what was made from it."""
    return [each for each in found if PROGRAMS[each.run.program].lineage]


def classes(found: Iterable[Prediction]) -> list[tuple[str, list[Prediction]]]:
    """Return the predictions of dense networks and of those with experts, each with its name."""
    groups: dict[str, list[Prediction]] = {"dense": [], "experts": []}
    for each in found:
        groups["experts" if each.run.config.model.num_experts else "dense"].append(each)
    return list(groups.items())


def widths(found: Sequence[Prediction]) -> dict[str, float]:
    """Return the factor of each program that the measured seconds are within nine times of ten; "" for all."""
    by_program = defaultdict(list)
    for each in found:
        by_program[each.run.program].append(abs(each.log))
        by_program[""].append(abs(each.log))
    return {
        program: math.exp(_quantile(logs, _COVERED))
        for program, logs in by_program.items()
        if len(logs) >= _FEW or not program
    }


def _quantile(values: Iterable[float], share: float) -> float:
    """Return the value that this share of as many others will not exceed (split conformal prediction)."""
    ordered = sorted(values)
    return ordered[min(math.ceil((len(ordered) + 1) * share), len(ordered)) - 1]


def covered(found: Sequence[Prediction]) -> float:
    """Return the share of runs within the interval that the runs of other sources give.

    Without runs of other sources, none is.
    """
    inside = []
    for source in {each.run.source for each in found}:
        others = [each for each in found if each.run.source != source]
        width = math.log(widths(others)[""]) if others else 0.0
        inside += [abs(each.log) <= width for each in found if each.run.source == source]
    return fmean(inside)


@dataclass(frozen=True)
class Interval:
    """Interval of the runs of a class.

    Attributes:
        runs, sources: how many there are.
        factor: what nine of ten runs are within.
        covered: share of the runs within the factor of the class's other sources; None if they are too few.
    """

    runs: int
    sources: int
    factor: float
    covered: float | None


def intervals(found: Iterable[Prediction]) -> dict[str, Interval]:
    """Return the interval of each class of runs: dense or with experts, by the dtype of the layers' products."""
    by_class: dict[str, list[Prediction]] = defaultdict(list)
    for name, own in classes(found):
        for each in own:
            by_class[f"{name}, {each.run.stack.low_precision or '16 or more bits'}"].append(each)
    return {
        name: Interval(
            len(own),
            len({each.run.source for each in own}),
            widths(own)[""],
            covered(own) if len(own) >= _FEW else None,
        )
        for name, own in sorted(by_class.items())
    }
