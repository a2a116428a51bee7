"""The time line of a schedule, from how long each action takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megalite.pipeline.messages import Message, given, needed
from megalite.pipeline.schedules import Action, Kind
from megalite.pipeline.stages import Stages

Duration = Callable[[int, Kind], float]
"""How long an action of a kind takes on a stage."""


class ScheduleError(ValueError):
    """A step that would not end, or not compute what it should; the message names ranks and actions."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it ran, in any unit."""

    action: Action
    start: float
    end: float


def durations(forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0) -> Duration:
    """The same for all stages; a whole backward takes as long as its parts."""
    table = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward_input + backward_weight}
    return lambda stage, kind: table.get(kind, 0.0)


def simulate(
    stages: Stages, orders: Sequence[Sequence[Action]], duration: Duration, transfer: float = 0.0
) -> list[list[Span]]:
    """Each rank's computation, every action as early as its rank and its message allow; a message to another rank
    takes `transfer`.

    Raises ScheduleError where the orders wait for each other for ever.
    """
    spans: list[list[Span]] = [[] for _ in orders]
    arrival: dict[tuple[Message, int], float] = {}
    moving = True
    while moving:
        moving = False
        for rank, order in enumerate(orders):
            while len(spans[rank]) < len(order):
                action = order[len(spans[rank])]
                message = needed(stages, rank, action)
                ready = 0.0 if message is None else arrival.get((message, rank))
                if ready is None:
                    break
                start = max(spans[rank][-1].end if spans[rank] else 0.0, ready)
                end = start + duration(stages.stage(rank, action.chunk), action.kind)
                spans[rank].append(Span(action, start, end))
                if (message := given(stages, rank, action)) is not None:
                    taker = message.route(stages)[1]
                    arrival[message, taker] = end + (transfer if taker != rank else 0.0)
                moving = True
    blocked = [
        f"rank {rank} at {order[len(done)]}"
        for rank, (order, done) in enumerate(zip(orders, spans, strict=True))
        if len(done) < len(order)
    ]
    if blocked:
        raise ScheduleError(f"the schedule never ends: {'; '.join(blocked)}")
    return spans


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The time that the busiest rank of a step is idle, from the step's first action to its last."""
    begin = min(rank[0].start for rank in spans if rank)
    end = max(rank[-1].end for rank in spans if rank)
    return end - begin - max(sum(span.end - span.start for span in rank) for rank in spans)


def peak_in_flight(order: Sequence[Action], sizes: Sequence[int] | None = None) -> int:
    """The most that forwards of a rank keep at one time: until their B, or until W. `sizes`: what one keeps in each
    chunk (None: 1, so that forwards are counted).
    """
    kept = peak = 0
    for action in order:
        size = 1 if sizes is None else sizes[action.chunk]
        kept += {"F": size, "B": -size, "W": -size}.get(action.kind, 0)
        peak = max(peak, kept)
    return peak
