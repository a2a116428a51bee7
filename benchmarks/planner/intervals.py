"""Intervals of the classes of runs, as `megalite-plan` uses them: megalite/extras/planner/intervals.toml.

The width of a class is a quantile of the errors of its runs, as logarithms, times a margin: the smallest with which the
widths that other sources give hold as many runs of all sources as they should. The width of a program of which no run
is measured also has the spread of the other programs' factors.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from benchmarks.planner.errors import Prediction
from benchmarks.planner.programs import PROGRAMS
from megalite.extras.planner.cluster import find_stack
from megalite.extras.planner.intervals import Class

FEW = 20
"""Runs of a class below which nothing is known of it."""
_COVERED = 0.9
_DEVIATIONS = 1.645
"""Standard deviations that nine of ten numbers are within."""
_MARGINS = [1 + step / 20 for step in range(61)]


@dataclass(frozen=True)
class Width:
    """Factor that nine of ten runs of a class are within.

    Attributes:
        margin: what the quantile of the errors' logarithms is multiplied by.
        covered: share of the runs within what the runs of other sources give.
    """

    factor: float
    margin: float
    covered: float


@dataclass(frozen=True)
class ClassErrors:
    """Runs of a class and the widths of their intervals, for programs with measured runs and for others."""

    runs: int
    sources: int
    generations: tuple[str, ...]
    measured: Width | None
    unmeasured: Width | None


def centre(but: str = "") -> float:
    """Return the logarithm of the middle of the programs' factors, without that of a program."""
    return fmean(_logs(but))


def classes(found: Iterable[Prediction]) -> dict[Class, ClassErrors]:
    """Return the errors of each class of runs; widths only of those with enough runs, of several sources."""
    groups: dict[Class, list[Prediction]] = defaultdict(list)
    for each in found:
        groups[Class.of(each.run.config, each.run.stack)].append(each)
    return {name: _errors(own) for name, own in sorted(groups.items(), key=lambda group: str(group[0]))}


def _errors(own: Sequence[Prediction]) -> ClassErrors:
    measured = unmeasured = None
    if len(own) >= FEW:
        measured = _width(own, lambda each: abs(each.log), _of_other_source)
    if measured is not None:
        unmeasured = _width(own, _unmeasured_log, _of_other_program, _spread(), measured.margin)
    generations = {each.run.cluster.gpu.generation or "" for each in own}
    return ClassErrors(
        len(own),
        len({each.run.source for each in own}),
        tuple(sorted(generations)),
        measured,
        unmeasured,
    )


def _width(
    own: Sequence[Prediction],
    size: Callable[[Prediction], float],
    apart: Callable[[Prediction, Prediction], bool],
    spread: float = 0.0,
    least: float = 1.0,
) -> Width | None:
    """Return the width of a class by the smallest margin that is enough, with a `spread` beside; None if none is.

    Args:
        size: what the width shall bound.
        apart: whether the error of the second run may bound the first.
        least: margin to begin with.
    """
    limits = []
    for each in own:
        others = [abs(other.log) for other in own if apart(each, other)]
        if not others:
            return None
        limits.append(_quantile(others))
    for margin in (each for each in _MARGINS if each >= least):
        covered = fmean(
            size(each) <= math.hypot(spread, margin * limit) for each, limit in zip(own, limits, strict=True)
        )
        if covered >= _COVERED:
            half = math.hypot(spread, margin * _quantile(abs(each.log) for each in own))
            return Width(math.exp(half), margin, covered)
    return None


def _unmeasured_log(prediction: Prediction) -> float:
    """Return how far the measured seconds are from the prediction by the middle of the other programs' factors."""
    return abs(math.log(prediction.factor) - prediction.log - centre(prediction.run.program))


def _of_other_source(one: Prediction, other: Prediction) -> bool:
    return one.run.source != other.run.source


def _of_other_program(one: Prediction, other: Prediction) -> bool:
    return _of_other_source(one, other) and one.run.program != other.run.program


def _quantile(values: Iterable[float]) -> float:
    """Return the value that this share of as many others will not exceed (split conformal prediction)."""
    ordered = sorted(values)
    return ordered[min(math.ceil((len(ordered) + 1) * _COVERED), len(ordered)) - 1]


def _logs(but: str = "") -> list[float]:
    return [math.log(find_stack(name).factor) for name in PROGRAMS if name != but]


def _spread() -> float:
    return _DEVIATIONS * stdev(_logs())


def unknown_covered(found: dict[Class, ClassErrors], own: Class, runs: Iterable[Prediction]) -> float:
    """Return the share of the runs of a class within the widest interval of the other classes."""
    widest = max(each.measured.factor for name, each in found.items() if name != own and each.measured)
    return fmean(abs(each.log) <= math.log(widest) for each in runs if Class.of(each.run.config, each.run.stack) == own)


def as_toml(found: dict[Class, ClassErrors]) -> Iterator[str]:
    """Yield the lines of the table that the planner reads."""
    yield "# Written by python -m benchmarks.planner.validate: what published runs tell about the errors of"
    yield "# predictions. benchmarks/planner/planner_validation.md has the shares of the runs that an interval holds."
    yield "#   generations  GPU generations of which the class has runs"
    yield "#   within       nine times of ten, measured seconds are between the prediction / this and x this"
    yield "#   unmeasured   the same around the prediction times `centre`, for a program of which no run is measured"
    yield f"centre = {math.exp(centre()):.2f}"
    for name, each in found.items():
        if each.measured and each.unmeasured:
            yield ""
            yield "[[class]]"
            yield f'model = "{name.model}"'
            yield f'precision = "{name.precision}"'
            yield f"generations = {json.dumps(each.generations)}"
            yield f"within = {each.measured.factor:.2f}"
            yield f"unmeasured = {each.unmeasured.factor:.2f}"
