"""The time line of a step, as simulated or as measured, and what is read off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from megalite.errors import DataError
from megalite.pipeline.schedules import Kind
from megalite.pipeline.simulator import Duration, Span, bubble, peak_in_flight
from megalite.pipeline.stages import Stages

COMPUTATIONS: tuple[Kind, ...] = ("F", "B", "I", "W")


@dataclass(frozen=True)
class TimeLine:
    """Times of all actions of all ranks in a step that has at least one computation."""

    title: str
    stages: Stages
    spans: Sequence[Sequence[Span]]
    """Spans of each rank, from the step's start."""
    in_seconds: bool = False
    """Or in units of an assumed time."""

    @cached_property
    def computation(self) -> list[list[Span]]:
        """The spans without communication."""
        return [[span for span in rank if span.action.kind in COMPUTATIONS] for rank in self.spans]

    @property
    def end(self) -> float:
        return max(span.end for rank in self.spans for span in rank)

    @property
    def micro_batches(self) -> int:
        return 1 + max(span.action.micro_batch for rank in self.computation for span in rank)

    @property
    def bubble(self) -> float:
        """The time that the busiest rank is idle; 0 where it is only the rounding of a sum."""
        idle = bubble(self.computation)
        return idle if idle > 1e-9 * self.end else 0.0

    @property
    def ideal(self) -> float:
        """The time of the step without a bubble: the busiest rank's computation."""
        return max(sum(span.end - span.start for span in rank) for rank in self.computation)

    @property
    def peaks(self) -> list[int]:
        """The most activations of each rank in flight: a micro-batch in a chunk counts as one."""
        return [peak_in_flight([span.action for span in rank]) for rank in self.computation]

    @property
    def unit(self) -> tuple[float, str]:
        """Factor by which to multiply a time to show it, and the unit of the product."""
        if not self.in_seconds:
            return 1.0, ""
        if self.end >= 1:
            return 1.0, "s"
        return (1e3, "ms") if self.end >= 1e-3 else (1e6, "µs")

    def show(self, time: float) -> str:
        """A time in words."""
        factor, name = self.unit
        return f"{time * factor:.4g} {name}".rstrip()


def measured_durations(measured: TimeLine, stages: Stages) -> Duration:
    """Medians of a measured step by stage and kind, for the same model cut into `stages`, which may be others: a stage
    takes its share of the measured ones that it covers, as if each of these were even. A backward takes as long as its
    parts; where only the whole was measured, each takes half of it.

    Raises DataError if a stage was not measured forward and backward.
    """
    count = measured.stages.count
    table = [_medians(measured, stage) for stage in range(count)]

    def duration(stage: int, kind: Kind) -> float:
        begin, end = stage * count / stages.count, (stage + 1) * count / stages.count
        return sum(
            max(0.0, min(end, index + 1) - max(begin, index)) * medians[kind] for index, medians in enumerate(table)
        )

    return duration


def _medians(measured: TimeLine, stage: int) -> dict[Kind, float]:
    rank, chunk = measured.stages.place(stage)
    times: dict[Kind, list[float]] = {}
    for span in measured.computation[rank]:
        if span.action.chunk == chunk:
            times.setdefault(span.action.kind, []).append(span.end - span.start)
    medians = {kind: median(values) for kind, values in times.items()}
    if {"F", "B"} <= medians.keys():
        return medians | {"I": medians["B"] / 2, "W": medians["B"] / 2}
    if {"F", "I", "W"} <= medians.keys():
        return medians | {"B": medians["I"] + medians["W"]}
    raise DataError(f"stage {stage} was not measured forward and backward: measure a step of training")
