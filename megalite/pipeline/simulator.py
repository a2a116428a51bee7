"""Simulation of a schedule: computes its time line from the duration of each action."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.stages import Stages

Duration = Callable[[int, Kind], float]
"""Duration of an action, by stage and kind."""


class ScheduleError(ValueError):
    """Step that would deadlock or compute a wrong result; the message names ranks and actions."""


class Span(NamedTuple):
    """Action with its start and end, in any unit of time."""

    action: Action
    start: float
    end: float


def durations(forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0) -> Duration:
    """Return durations that are the same for all stages; B takes as long as I and W together."""
    table = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward_input + backward_weight}
    return lambda stage, kind: table.get(kind, 0.0)


class Lanes(NamedTuple):
    """Source and target of an action's messages; they are the same for all micro-batches of a chunk.

    A lane carries the messages of one stage to the next stage (activations) or to the previous stage (gradients). Lanes
    are numbered.
    """

    needs: int | None = None
    gives: int | None = None
    taker: int | None = None
    """Rank that receives the message; may be the sender itself."""


def lanes(stages: Stages, rank: int) -> dict[tuple[Kind, int], Lanes]:
    """Return the lanes of a rank's computations, by kind and chunk."""
    found: dict[tuple[Kind, int], Lanes] = {}
    for chunk in range(stages.chunks):
        stage = stages.stage(rank, chunk)
        found["F", chunk] = _lanes(stages, stage - 1, stage, stage + 1)
        found["B", chunk] = found["I", chunk] = _lanes(stages, stage + 1, stage, stage - 1)
        found["W", chunk] = Lanes()
    return found


def _lanes(stages: Stages, source: int, stage: int, target: int) -> Lanes:
    gives = _lane(stages, stage, target)
    return Lanes(_lane(stages, source, stage), gives, None if gives is None else stages.place(target)[0])


def _lane(stages: Stages, source: int, target: int) -> int | None:
    """Return the number of the lane between neighbouring stages; None if nothing is passed."""
    if min(source, target) < 0 or max(source, target) >= stages.count:
        return None
    backward = target < source
    passed = stages.passes_back(source) if backward else stages.passes(source)
    return 2 * source + backward if passed else None


def simulate(
    stages: Stages, orders: Sequence[Sequence[Action]], duration: Duration, transfer: float = 0.0
) -> list[list[Span]]:
    """Return the time line of each rank. Every action starts as soon as its rank is free and its message has arrived. A
    message to another rank takes `transfer`.

    Raises ScheduleError if the orders deadlock.
    """
    spans: list[list[Span]] = [[] for _ in orders]
    arrivals: list[dict[int, float]] = [{} for _ in range(2 * stages.count)]
    ranks = []
    for rank, order in enumerate(orders):
        own = lanes(stages, rank)
        table = {}
        for kind, chunk in {(action.kind, action.chunk) for action in order}:
            needs, gives, taker = own[kind, chunk]
            table[kind, chunk] = _Turn(
                None if needs is None else arrivals[needs],
                None if gives is None else arrivals[gives],
                duration(stages.stage(rank, chunk), kind),
                transfer if taker != rank else 0.0,
            )
        ranks.append(_simulated(order, table, spans[rank]))
    done, before = 0, -1
    while done > before:
        for actions in ranks:
            next(actions, None)
        done, before = sum(map(len, spans)), done
    blocked = [
        f"rank {rank} at {order[len(done)]}"
        for rank, (order, done) in enumerate(zip(orders, spans, strict=True))
        if len(done) < len(order)
    ]
    if blocked:
        raise ScheduleError(f"the schedule never ends: {'; '.join(blocked)}")
    return spans


class _Turn(NamedTuple):
    """Timing of the actions of one kind and chunk. Lanes are dicts of arrival times, by micro-batch."""

    needs: Mapping[int, float] | None
    gives: dict[int, float] | None
    duration: float
    transfer: float


def _simulated(order: Sequence[Action], table: Mapping[tuple[Kind, int], _Turn], spans: list[Span]) -> Iterator[None]:
    """Run the actions of a rank; yields as long as the message for the next action has not been sent."""
    now = 0.0
    for action in order:
        kind, micro_batch, chunk, _ = action
        needs, gives, duration, transfer = table[kind, chunk]
        start = now
        if needs is not None:
            while micro_batch not in needs:
                yield
            start = max(now, needs[micro_batch])
        now = start + duration
        spans.append(Span(action, start, now))
        if gives is not None:
            gives[micro_batch] = now + transfer


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """Return the idle time of the busiest rank, between the first and the last action of the step."""
    begin = min(rank[0].start for rank in spans if rank)
    end = max(rank[-1].end for rank in spans if rank)
    return end - begin - max(sum(span.end - span.start for span in rank) for rank in spans)


def peak_in_flight(
    order: Sequence[Action], sizes: Sequence[int] | None = None, beside: Mapping[int, int] = MappingProxyType({})
) -> int:
    """Return the peak of what the forwards of a rank keep until their B or W.

    Args:
        sizes: size that one forward keeps, by chunk; None: 1, so that forwards are counted.
        beside: sizes of what else is kept during an action, by its index.
    """
    kept = peak = 0
    for index, action in enumerate(order):
        size = 1 if sizes is None else sizes[action.chunk]
        if action.kind == "F":
            kept += size
        peak = max(peak, kept + beside.get(index, 0))
        if action.kind in ("B", "W"):
            kept -= size
    return peak
