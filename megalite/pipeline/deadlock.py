"""Proof that programs which communicate do not deadlock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from megalite.pipeline.simulator import ScheduleError


class Communicator(NamedTuple):
    """Ranks with a common order of operations: a process group, or an edge from its first rank to its second."""

    ranks: tuple[int, ...]
    edge: bool = False


Event = tuple[Communicator, int, object]
"""Communicator; number of its operations that all its ranks must have started before this rank continues (0: start
the next one); and the rank's position, for error messages."""


class Program:
    """Communication of a rank, in order."""

    def __init__(self, name: str, say: Callable[[object], str] = str) -> None:
        """`say`: returns a position of the rank as text."""
        self.name, self.say = name, say
        self.events: list[Event] = []
        self.begun: dict[Communicator, list[Hashable]] = defaultdict(list)
        """Started operations of each communicator."""

    def begin(self, communicator: Communicator, operation: Hashable, at: object) -> int:
        """Start the next operation of a communicator; returns its number. It must be the same on all ranks."""
        begun = self.begun[communicator]
        begun.append(operation)
        self.events.append((communicator, 0, at))
        return len(begun)

    def wait(self, communicator: Communicator, number: int, at: object) -> None:
        """Wait until all ranks of a communicator have started this many operations, so that these end."""
        self.events.append((communicator, number, at))

    def at(self, communicator: Communicator, number: int) -> str:
        """Return the rank's position, as text, when it starts this operation (counted from 0)."""
        begins = [at for other, awaited, at in self.events if other == communicator and awaited == 0]
        return self.say(begins[number]) if number < len(begins) else "its end"


Begun = dict[Communicator, dict[int, int]]
"""Number of operations that each rank of a communicator has started."""


def run(programs: Sequence[Program]) -> None:
    """Run the programs, one per rank, to their ends.

    A rank waits only for progress of other ranks, and progress is never undone. So the order in which ranks are run
    here does not matter: if all programs end here, they always end, also if some of the operations do not wait.

    Raises ScheduleError if the ranks of a communicator do not start the same operations in the same order, or if there
    is a deadlock.
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
    """Run the program of a rank; yields the event at which it waits, as long as it has to wait."""
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
    """Check that the ranks of each communicator start the same operations; returns counts of 0 for all of them."""
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
