"""Proof that programs which communicate come to their end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megalite.pipeline.simulator import ScheduleError


class Communicator(NamedTuple):
    """Ranks with one common order of operations: a group, or an edge from its first rank to its second."""

    ranks: tuple[int, ...]
    edge: bool = False


Event = tuple[Communicator, int, object]
"""Number of operations of a communicator that all its ranks must have begun before this one goes on, 0 to begin
the next one; and what it is at then, for errors."""


class Program:
    """Actions of a rank, in order."""

    def __init__(self, name: str, say: Callable[[object], str] = str) -> None:
        """`say`: in words what the rank is at."""
        self.name, self.say = name, say
        self.events: list[Event] = []
        self.begun: dict[Communicator, list[Hashable]] = defaultdict(list)
        """The operations of each communicator."""

    def begin(self, communicator: Communicator, operation: Hashable, at: object) -> int:
        """Begin the next operation of a communicator, which must be the same on all its ranks; returns its number."""
        begun = self.begun[communicator]
        begun.append(operation)
        self.events.append((communicator, 0, at))
        return len(begun)

    def wait(self, communicator: Communicator, number: int, at: object) -> None:
        """Wait until so many operations of a communicator have begun on all its ranks, and so end."""
        self.events.append((communicator, number, at))

    def at(self, communicator: Communicator, number: int) -> str:
        """Return what the rank is at when it begins this operation, from 0; or its end."""
        begins = [at for other, awaited, at in self.events if other == communicator and awaited == 0]
        return self.say(begins[number]) if number < len(begins) else "its end"


Begun = dict[Communicator, dict[int, int]]
"""Number of operations of a communicator that each of its ranks has begun."""


def run(programs: Sequence[Program]) -> None:
    """Run the programs, one a rank, to their ends.

    Whether a rank can go on depends on how far the others have come, and what lets it go on is never taken back. So
    the order in which ranks take turns does not matter: if they end here they always do, and also where some do not
    wait.

    Raises ScheduleError if the ranks of a communicator do not begin the same operations in the same order, or if
    ranks wait for each other for ever.
    """
    begun = _matched(programs)
    running = [_waits(program, begun, rank) for rank, program in enumerate(programs)]
    before: list[Event | None] = []
    while (now := [next(waits, None) for waits in running]) != before:
        before = now
    blocked = [_why(programs, program, wait, begun) for program, wait in zip(programs, now, strict=True) if wait]
    if blocked:
        raise ScheduleError(f"the step never ends if a send waits for its receive: {'; '.join(blocked)}")


def _waits(program: Program, begun: Begun, rank: int) -> Iterator[Event]:
    """Run the program of a rank; gives the event at which it waits, for as long as it does."""
    for event in program.events:
        communicator, number, _ = event
        counts = begun[communicator]
        if number == 0:
            counts[rank] += 1
        else:
            while min(counts.values()) < number:
                yield event


def _why(programs: Sequence[Program], program: Program, event: Event, begun: Begun) -> str:
    communicator, number, at = event
    missing = [programs[rank].name for rank, count in begun[communicator].items() if count < number]
    return f"{program.name} at {program.say(at)} waits for {' and '.join(missing)}"


def _matched(programs: Sequence[Program]) -> Begun:
    """No operation begun on any communicator, once all its ranks are known to begin the same ones."""
    communicators: dict[Communicator, None] = {}
    for rank, program in enumerate(programs):
        for communicator in program.begun:
            if rank not in communicator.ranks:
                raise ScheduleError(
                    f"{program.name} at {program.at(communicator, 0)} is not a member of {communicator.ranks}"
                )
            communicators[communicator] = None
    for communicator in communicators:
        first, *others = communicator.ranks
        for other in others:
            _match(communicator, programs[first], programs[other])
    return {communicator: dict.fromkeys(communicator.ranks, 0) for communicator in communicators}


def _match(communicator: Communicator, one: Program, other: Program) -> None:
    for number, (mine, theirs) in enumerate(zip_longest(one.begun[communicator], other.begun[communicator])):
        if mine != theirs:
            raise ScheduleError(
                f"{one.name} at {one.at(communicator, number)} meets {other.name} at {other.at(communicator, number)}"
            )
