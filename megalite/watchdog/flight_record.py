"""Contents of one rank's flight recorder, reduced to what shows where a run hangs, as plain JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPLETED = "completed"


@dataclass(frozen=True)
class Operation:
    """Collective of a group, as one of its ranks has entered it."""

    number: int
    """Place among the collectives of the group, from 1."""
    name: str
    """Name in the backend: all_reduce, all_gather, ..."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the inputs on this rank."""
    dtype: str
    """Dtype of the first input; "" if there is none."""
    state: str
    """State: scheduled, started or completed; on gloo never started."""
    time: float
    """Time when the rank entered it, in seconds since 1970."""


@dataclass(frozen=True)
class GroupRecord:
    """Process group, as one of its ranks has used it."""

    name: str
    ranks: tuple[int, ...]
    """Ranks in the order of the group; empty if they are not known."""
    collectives: int = 0
    """Number of collectives that this rank has entered."""
    operations: tuple[Operation, ...] = ()
    """Last of these collectives, in order."""
    messages: int = 0
    """Number of messages that this rank has begun to send or receive, if the group links its first rank to its
    second."""
    finished_messages: int = 0
    """Number of messages that are known to have ended; on gloo none."""


@dataclass(frozen=True)
class Snapshot:
    """Groups of a rank, and what the rank does with them now."""

    waiting: bool | None
    """True if its main thread is in an operation of a group; None if unknown: NCCL's operations are awaited on the
    device."""
    groups: tuple[GroupRecord, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Snapshot:
        """Restore from `dataclasses.asdict` and JSON. Raises ValueError, TypeError or KeyError if the values do not
        fit."""
        waiting = values["waiting"]
        if waiting not in (True, False, None):
            raise ValueError(f"waiting is {waiting!r}")
        return cls(waiting, tuple(_group_record(group) for group in values["groups"]))


def _group_record(values: Mapping[str, Any]) -> GroupRecord:
    return GroupRecord(
        name=str(values["name"]),
        ranks=tuple(map(int, values["ranks"])),
        collectives=int(values["collectives"]),
        operations=tuple(map(_operation, values["operations"])),
        messages=int(values["messages"]),
        finished_messages=int(values["finished_messages"]),
    )


def _operation(values: Mapping[str, Any]) -> Operation:
    return Operation(
        number=int(values["number"]),
        name=str(values["name"]),
        shapes=tuple(tuple(map(int, shape)) for shape in values["shapes"]),
        dtype=str(values["dtype"]),
        state=str(values["state"]),
        time=float(values["time"]),
    )
