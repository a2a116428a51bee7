"""Whether programs that communicate come to their end."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from megalite.pipeline.simulator import ScheduleError


class Communicator(NamedTuple):
    """Ranks with one common order of operations: a group, or an edge from its first rank to its second."""

    ranks: tuple[int, ...]
    edge: bool = False


class Begin(NamedTuple):
    """A rank begins the next operation of a communicator, which must be the same on all of its ranks."""

    communicator: Communicator
    operation: Hashable
    at: object
    """What the rank is doing, for errors."""


class Wait(NamedTuple):
    """A rank waits until the first `number` operations of a communicator have begun on all its ranks, and so end."""

    communicator: Communicator
    number: int
    at: object
    rendezvous: bool = False
    """Only where whoever begins blocks until all have begun, and not where the backend takes the operation over."""


@dataclass(frozen=True)
class Program:
    """What a rank does, in order."""

    name: str
    events: Sequence[Begin | Wait]


Begun = dict[Communicator, dict[int, int]]
"""How many operations of a communicator each of its ranks has begun."""


def run(programs: Sequence[Program], *, rendezvous: bool) -> None:
    """Run the programs, one a rank, to their ends.

    Whether a rank can go on depends on how far the others have come, and what lets it go on is never taken back. So
    the order in which ranks take turns does not matter: if they end here they always do.

    Raises ScheduleError where the ranks of a communicator do not begin the same operations in the same order, or where
    ranks wait for each other for ever.
    """
    begun = _matched(programs)
    positions = [0] * len(programs)
    moving = True
    while moving:
        moving = False
        for rank, program in enumerate(programs):
            position = _advance(program, rank, positions[rank], begun, rendezvous)
            moving = moving or position > positions[rank]
            positions[rank] = position
    blocked = [
        _why(programs, program.events[position], program.name, begun)
        for program, position in zip(programs, positions, strict=True)
        if position < len(program.events)
    ]
    if blocked:
        how = "where a send waits for its receive" if rendezvous else "even where sends do not wait"
        raise ScheduleError(f"the step never ends, {how}: {'; '.join(blocked)}")


def _advance(program: Program, rank: int, position: int, begun: Begun, rendezvous: bool) -> int:
    """The event at which the rank must wait, having run those before it."""
    events = program.events
    while position < len(events):
        event = events[position]
        if isinstance(event, Begin):
            begun[event.communicator][rank] += 1
        elif (rendezvous or not event.rendezvous) and min(begun[event.communicator].values()) < event.number:
            break
        position += 1
    return position


def _why(programs: Sequence[Program], event: Begin | Wait, name: str, begun: Begun) -> str:
    assert isinstance(event, Wait)
    missing = [programs[rank].name for rank, count in begun[event.communicator].items() if count < event.number]
    return f"{name} at {event.at} waits for {' and '.join(missing)}"


def _matched(programs: Sequence[Program]) -> Begun:
    """No operation begun on any communicator, once all its ranks are known to begin the same ones."""
    operations: dict[Communicator, dict[int, list[Begin]]] = {}
    for rank, program in enumerate(programs):
        for event in program.events:
            if isinstance(event, Begin):
                members = operations.get(event.communicator)
                if members is None:
                    members = operations[event.communicator] = {member: [] for member in event.communicator.ranks}
                if rank not in members:
                    raise ScheduleError(f"{program.name} at {event.at} is no member of {event.communicator.ranks}")
                members[rank].append(event)
    for communicator, members in operations.items():
        first, *others = communicator.ranks
        for other in others:
            for mine, theirs in zip_longest(members[first], members[other]):
                if mine is None or theirs is None or mine.operation != theirs.operation:
                    raise ScheduleError(
                        f"{programs[first].name} at {mine.at if mine else 'its end'} meets "
                        f"{programs[other].name} at {theirs.at if theirs else 'its end'}"
                    )
    return {communicator: dict.fromkeys(communicator.ranks, 0) for communicator in operations}
