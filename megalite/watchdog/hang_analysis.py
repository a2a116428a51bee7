"""Analysis of a hang: comparison of the ranks' flight recorders, to find where the run hangs and which ranks cause it.

A rank waits in a collective that some rank of its group has not entered, or for a message that the other end has not
begun. A collective that all ranks have entered has ended or will end. From each waiting rank, the analysis follows the
waits over all groups to the ranks that wait for no other. These ranks are the cause; the other findings are
consequences. A cycle of waiting ranks without a path to such a rank is a deadlock.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from megalite.process.place import ranks_by_value, ranks_text
from megalite.watchdog.snapshot import COMPLETED, GroupRecord, Operation, Snapshot

_UNEQUAL = ("all_to_all", "gather", "scatter", "coalesced")  # collectives to which ranks may bring different sizes


@dataclass(frozen=True)
class Diagnosis:
    """Fault that a healthy run would not have."""

    text: str
    """Description, a sentence without its full stop."""
    culprits: tuple[int, ...]
    """Ranks that hold others up; none if it is a consequence, or no particular rank's fault."""
    cause: bool
    """True if it explains the hang, rather than follows from another finding."""


def missing(snapshots: Mapping[int, Snapshot], silent: Collection[int] = ()) -> list[Diagnosis]:
    """Return what the groups wait for, causes first; nothing if no rank waits for another.

    `snapshots`: by rank, taken after all progress had stopped. `silent`: ranks without a snapshot; they are reported
    even if they are in no group of the others.
    """
    groups = list(_groups(snapshots))
    silent = set(silent).union(*(group.silent for group in groups))
    mismatches = [wait for group in groups for wait in group.mismatches()]
    pending = [wait for group in groups for wait in (*group.pending_collectives(), *group.lacking_messages())]
    unfinished = [wait for wait in pending if not wait.absent]
    lacking = sorted((wait for wait in pending if wait.absent), key=lambda wait: len(wait.absent))
    waits = [*mismatches, *lacking]
    odd = {rank for wait in mismatches for rank in wait.absent}
    waiting = {rank for wait in waits for rank in wait.waiting} - odd
    stuck = {rank for wait in unfinished for rank in wait.waiting} - waiting - odd
    causes = {rank for wait in waits for rank in wait.absent} - waiting - stuck
    circles = list(_circles(waits, causes | stuck))
    known = {rank for wait in waits if not wait.guess for rank in wait.waiting}
    findings = [
        *(Diagnosis(wait.text, tuple(sorted(wait.absent)), True) for wait in mismatches),
        *_silence(silent, causes),
        *(_lack(wait, causes) for wait in lacking if not (wait.guess and wait.waiting <= known)),
        *(_deadlock(circle, waits, snapshots) for circle in circles),
        *(Diagnosis(wait.text, (), True) for wait in unfinished if stuck & wait.waiting),
    ]
    return sorted(findings, key=lambda finding: not finding.cause)


# ------------------------------------------------------------------------------------------------------- one group


@dataclass(frozen=True)
class _Wait:
    """Operation that some ranks wait in and others have not reached."""

    what: str
    text: str
    waiting: set[int]
    absent: set[int]
    guess: bool = False
    """True if the ranks may not be waiting at all: on gloo a message that has arrived looks like one that has not."""


@dataclass(frozen=True)
class _Group:
    """Group, as its ranks have used it."""

    ranks: tuple[int, ...]
    records: Mapping[int, GroupRecord]
    """Records of the ranks with a snapshot."""
    operations: Mapping[int, Mapping[int, Operation]]
    """Collectives of these ranks, by number."""
    waiting: set[int]
    """Ranks that are in some communication, or may be."""
    silent: set[int]

    def mismatches(self) -> Iterator[_Wait]:
        """Yield the first collective that differs between ranks; the absent ranks are the minority, else all."""
        number, kinds = self._first_mismatch
        if len(kinds) < 2:
            return
        (usual, most), *others = sorted(kinds.items(), key=lambda item: -len(item[1]))
        even = len(others[0][1]) == len(most)
        odd = {rank for _, ranks in others for rank in ranks} | (set(most) if even else set())
        what = f"collective #{number} of {ranks_text(self.ranks)}"
        parts = [f"{ranks_text(ranks)} {_are(ranks)} in {kind}" for kind, ranks in [(usual, most), *others]]
        pending = {rank for rank in most if self.operations[rank][number].state != COMPLETED}
        yield _Wait(what, f"{what} is not the same on all ranks: {', '.join(parts)}", pending & self.waiting - odd, odd)

    def pending_collectives(self) -> Iterator[_Wait]:
        """Yield the first collective that some ranks wait in, for each set of ranks that have not entered it.

        If no rank is absent, the collective does not end.
        """
        for absent, pending in groupby(self._pending, key=lambda item: self._absent(item[0])):
            (number, first), *later = pending
            what = self._describe_operation(number, first)
            if not absent:
                text = f"{what}: all ranks are in it, but it does not end on {ranks_text(first)}"
                yield _Wait(what, text, set(first), absent)
                continue
            inside = [rank for rank, record in self.records.items() if record.collectives >= number]
            more = f" (and {len(later)} after it)" if later else ""
            text = f"{what}{more}: {ranks_text(inside)} {_are(inside)} in it, {self._why_absent(absent)}"
            yield _Wait(what, text, set(first).union(*(ranks for _, ranks in later)), absent)

    def lacking_messages(self) -> Iterator[_Wait]:
        """Yield the message, on a link, that one end waits for and the other has not reached."""
        if len(self.ranks) != 2 or not any(record.messages for record in self.records.values()):
            return
        source, destination = self.ranks
        for rank, other in ((source, destination), (destination, source)):
            begun = self.records[rank].messages if rank in self.waiting else 0
            over = max(self.records[rank].finished_messages, self._messages(other)) if begun else 0
            if begun <= over:
                continue
            silent = other in self.silent
            what = f"message #{begun if silent else over + 1} from rank {source} to rank {destination}"
            verb = "sends it" if rank == source else "waits for it"
            absent = _last("has not reached it", self._messages(other))
            if silent:
                verb, absent = "has begun it", "left no record"
            yield _Wait(what, f"{what}: rank {rank} {verb}, rank {other} {absent}", {rank}, {other}, guess=silent)

    def _messages(self, rank: int) -> int:
        return self.records[rank].messages if rank in self.records else 0

    @cached_property
    def _first_mismatch(self) -> tuple[int, Mapping[str, list[int]]]:
        for number in sorted({number for operations in self.operations.values() for number in operations}):
            entered = {rank: operations[number] for rank, operations in self.operations.items() if number in operations}
            if len({(one.name, one.dtype, one.shapes) for one in entered.values()}) > 1:
                kinds = ranks_by_value({rank: _kind(operation) for rank, operation in entered.items()})
                if len(kinds) > 1:
                    return number, {_operation_text(entered[ranks[0]]): ranks for ranks in kinds.values()}
        return 0, {}

    @cached_property
    def _pending(self) -> list[tuple[int, list[int]]]:
        """Return the collectives that ranks wait in, with these ranks, except for one that differs between ranks."""
        mismatch, _ = self._first_mismatch
        ranks: dict[int, list[int]] = {}
        for rank in sorted(self.waiting & self.operations.keys()):
            for number, operation in self.operations[rank].items():
                if operation.state != COMPLETED and number != mismatch:
                    ranks.setdefault(number, []).append(rank)
        return sorted(ranks.items())

    def _absent(self, number: int) -> set[int]:
        return self.silent | {rank for rank, record in self.records.items() if record.collectives < number}

    def _describe_operation(self, number: int, ranks: Collection[int]) -> str:
        operation = self.operations[min(ranks)][number]
        name, _, details = _operation_text(operation).partition(" ")
        return f"{name} #{number} of {ranks_text(self.ranks)} {details}".rstrip()

    def _why_absent(self, absent: set[int]) -> str:
        by_last = ranks_by_value({rank: self.records[rank].collectives for rank in sorted(absent - self.silent)})
        parts = [f"{ranks_text(ranks)} {_last(f'{_are(ranks)} not', last)}" for last, ranks in sorted(by_last.items())]
        if self.silent:
            parts.append(f"{ranks_text(self.silent)} left no record")
        return ", ".join(parts)


def _groups(snapshots: Mapping[int, Snapshot]) -> Iterator[_Group]:
    """Yield the groups by name; a rank whose snapshot lacks a group has entered nothing there."""
    ranks: dict[str, tuple[int, ...]] = {}
    records: dict[str, dict[int, GroupRecord]] = {}
    for rank, snapshot in sorted(snapshots.items()):
        for record in snapshot.groups:
            ranks[record.name] = record.ranks or ranks.get(record.name, ())
            records.setdefault(record.name, {})[rank] = record
    for name, members in ranks.items():
        own = {rank: records[name].get(rank, GroupRecord(name, members)) for rank in members if rank in snapshots}
        operations = {rank: {one.number: one for one in record.operations} for rank, record in own.items()}
        waiting = {rank for rank in own if snapshots[rank].waiting is not False}
        yield _Group(members, own, operations, waiting, set(members) - snapshots.keys())


def _kind(operation: Operation) -> tuple[object, ...]:
    """Return the properties that must be the same on all ranks."""
    if any(name in operation.name for name in _UNEQUAL):
        return (operation.name,)
    return operation.name, operation.dtype, sum(math.prod(shape) for shape in operation.shapes)


def _operation_text(operation: Operation) -> str:
    shapes = ", ".join(str(list(shape)) for shape in operation.shapes)
    return f"{operation.name} ({operation.dtype} {shapes})" if shapes else operation.name


def _are(ranks: Collection[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _last(what: str, number: int) -> str:
    return f"{what}: the last one was #{number}" if number else f"{what}, and has started none so far"


# ----------------------------------------------------------------------------------------------------- all together


def _lack(wait: _Wait, causes: set[int]) -> Diagnosis:
    culprits = tuple(sorted(wait.absent & causes))
    return Diagnosis(wait.text, culprits, bool(culprits))


def _silence(silent: Collection[int], causes: set[int]) -> Iterator[Diagnosis]:
    """Yield findings on silent ranks: those that others wait for are to blame; the rest only if there is no other
    cause."""
    for ranks, cause in ((causes.intersection(silent), True), (set(silent) - causes, not causes)):
        if ranks:
            text = f"{ranks_text(ranks)} left no record: suspended, ended or unreachable"
            yield Diagnosis(text, tuple(sorted(ranks)), cause)


def _circles(waits: Collection[_Wait], free: set[int]) -> Iterator[list[int]]:
    """Yield circles of ranks that each wait for the next, and the last for the first, with no way to a free rank."""
    explained = _with_waiting(waits, free)
    while rest := {rank for wait in waits for rank in wait.waiting} - explained:
        path = [min(rest)]
        while (following := min(_waits_for(path[-1], waits) & rest)) not in path:
            path.append(following)
        circle = path[path.index(following) :]
        yield circle
        explained = _with_waiting(waits, explained.union(circle))


def _with_waiting(waits: Collection[_Wait], ranks: set[int]) -> set[int]:
    """Return `ranks`, the ranks that wait for them, the ranks that wait for those, and so on."""
    found = set(ranks)
    while new := {rank for wait in waits if wait.absent & found for rank in wait.waiting} - found:
        found |= new
    return found


def _waits_for(rank: int, waits: Iterable[_Wait]) -> set[int]:
    return {other for wait in waits if rank in wait.waiting for other in wait.absent}


def _deadlock(circle: list[int], waits: Collection[_Wait], snapshots: Mapping[int, Snapshot]) -> Diagnosis:
    parts = []
    for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
        what = next(wait.what for wait in waits if rank in wait.waiting and other in wait.absent)
        parts.append(f"rank {rank} for rank {other} in {what}")
    unsure = any(snapshots[rank].waiting is None for rank in circle)
    hint = ", unless one of them is busy with something else: see its stacks" if unsure else ""
    return Diagnosis(f"deadlock{hint}: {', '.join(parts)}", tuple(sorted(circle)), True)
