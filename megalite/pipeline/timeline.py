"""Time line of a step, simulated or measured, and the figures derived from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
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
    """True: times are in seconds. False: in units of an assumed time."""
    blocks: tuple[int, ...] = ()
    """Number of blocks of each stage: layers, with the embedding in the first stage and the output layer in the last;
    empty: not known."""

    def named(self, name: str) -> TimeLine:
        """Return the time line with a title of this name and of its size."""
        chunks = f" × {self.stages.chunks} chunks" if self.stages.chunks > 1 else ""
        return replace(self, title=f"{name}: {self.stages.ranks} ranks{chunks}, {self.micro_batches} micro-batches")

    @cached_property
    def computation(self) -> list[list[Span]]:
        """Spans without communication."""
        return [[span for span in rank if span.action.kind in COMPUTATIONS] for rank in self.spans]

    @property
    def end(self) -> float:
        return max(span.end for rank in self.spans for span in rank)

    @property
    def micro_batches(self) -> int:
        return 1 + max(span.action.micro_batch for rank in self.computation for span in rank)

    @property
    def bubble(self) -> float:
        """Idle time of the busiest rank; exactly 0 if it is only a rounding error."""
        idle = bubble(self.computation)
        return idle if idle > 1e-9 * self.end else 0.0

    @property
    def ideal(self) -> float:
        """Time of the step without a bubble: the computation time of the busiest rank."""
        return max(sum(span.end - span.start for span in rank) for rank in self.computation)

    @property
    def peaks(self) -> list[int]:
        """Peak number of activations in flight on each rank; a micro-batch in a chunk counts as one."""
        return [peak_in_flight([span.action for span in rank]) for rank in self.computation]

    @property
    def unit(self) -> tuple[float, str]:
        """Factor that converts times for display, and the unit of the result."""
        if not self.in_seconds:
            return 1.0, ""
        if self.end >= 1:
            return 1.0, "s"
        return (1e3, "ms") if self.end >= 1e-3 else (1e6, "µs")

    def show(self, time: float) -> str:
        factor, name = self.unit
        return f"{time * factor:.4g} {name}".rstrip()


def measured_durations(measured: TimeLine, stages: Stages) -> Duration:
    """Return median durations of a measured step, by stage and kind, for the same model cut into `stages`. If these
    differ from the measured stages, a stage gets its share of each measured stage that it covers, as if the time were
    spread evenly inside. B takes as long as I and W together; if only B was measured, I and W each take half of it.

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


def medians_by_kind(spans: Iterable[Span]) -> dict[Kind, float]:
    """Return the median time of each kind of action."""
    times: dict[Kind, list[float]] = {}
    for span in spans:
        times.setdefault(span.action.kind, []).append(span.end - span.start)
    return {kind: median(values) for kind, values in times.items()}


def _medians(measured: TimeLine, stage: int) -> dict[Kind, float]:
    rank, chunk = measured.stages.place(stage)
    medians = medians_by_kind(span for span in measured.computation[rank] if span.action.chunk == chunk)
    if {"F", "B"} <= medians.keys():
        return medians | {"I": medians["B"] / 2, "W": medians["B"] / 2}
    if {"F", "I", "W"} <= medians.keys():
        return medians | {"B": medians["I"] + medians["W"]}
    raise DataError(f"stage {stage} was not measured forward and backward: measure a step of training")
