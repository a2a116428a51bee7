"""What one rank's flight recorder holds, reduced to what tells where a run hangs; plain values, as JSON has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMPLETED = "completed"


@dataclass(frozen=True)
class Operation:
    """A collective of a group, as one of its ranks has entered it."""

    number: int
    """Its place among the collectives of the group, from 1."""
    name: str
    """all_reduce, all_gather, ..., as the backend calls it."""
    shapes: tuple[tuple[int, ...], ...]
    """Of its inputs on this rank."""
    dtype: str
    """Of the first input; "" where there is none."""
    state: str
    """scheduled, started or completed; on gloo never started."""
    time: float
    """When the rank entered it, in seconds since 1970."""


@dataclass(frozen=True)
class GroupRecord:
    """A process group, as one of its ranks has used it."""

    name: str
    ranks: tuple[int, ...]
    """In the order of the group; empty where they are not known."""
    collectives: int = 0
    """How many this rank has entered."""
    operations: tuple[Operation, ...] = ()
    """The last of them, in order."""
    messages: int = 0
    """How many this rank has begun to send or to receive, where the group is a link from its first rank to its second.
    """
    finished_messages: int = 0
    """How many of them are known to have come to their end; on gloo none."""


@dataclass(frozen=True)
class Snapshot:
    """The groups of a rank, and what the rank does with them now."""

    waiting: bool | None
    """Whether its main thread stands in an operation of a group; None where it cannot be told: an operation of NCCL is
    waited for on the device."""
    groups: tuple[GroupRecord, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Snapshot:
        """Back from `dataclasses.asdict`, and from JSON. Raises ValueError, TypeError or KeyError where it is none."""
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
