"""Errors of predictions of published runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

from benchmarks.planner.fit import Fit
from benchmarks.planner.programs import PROGRAMS
from benchmarks.planner.published import Run


@dataclass(frozen=True)
class Prediction:
    """Run with the seconds that a fit without its source predicts, and the factor of its program in that fit."""

    run: Run
    seconds: float
    factor: float

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
    found: dict[int, tuple[float, float]] = {}
    for source in dict.fromkeys(run.source for run in fit.runs):
        found |= fit.without(source)
    return [Prediction(by_number[number], *each) for number, each in sorted(found.items())]


def mean_error(found: Iterable[Prediction]) -> float:
    """Return the mean absolute error."""
    return fmean(abs(each.error) for each in found)


def of_lineage(found: Iterable[Prediction]) -> list[Prediction]:
    """Return the predictions of Megatron-LM and of what was made from it."""
    return [each for each in found if PROGRAMS[each.run.program].lineage]


def by_model(found: Iterable[Prediction]) -> list[tuple[str, list[Prediction]]]:
    """Return the predictions of dense networks and of those with experts, each with its name."""
    groups: dict[str, list[Prediction]] = {"dense": [], "experts": []}
    for each in found:
        groups["experts" if each.run.config.model.num_experts else "dense"].append(each)
    return list(groups.items())
