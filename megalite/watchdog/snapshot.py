"""Snapshot of a rank's flight recorder: its process groups, and the last operations of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

Restored = TypeVar("Restored")

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
    ranks, operations = tuple(map(int, values["ranks"])), tuple(map(_operation, values["operations"]))
    return restored(GroupRecord, values, ranks=ranks, operations=operations)


def _operation(values: Mapping[str, Any]) -> Operation:
    return restored(Operation, values, shapes=tuple(tuple(map(int, shape)) for shape in values["shapes"]))


def restored(kind: Callable[..., Restored], values: Mapping[str, Any], **parts: object) -> Restored:
    """Restore a dataclass from `dataclasses.asdict` and JSON; `parts`: the fields that are no plain values.

    Raises ValueError or TypeError if the values do not fit.
    """
    found = kind(**{**values, **parts})
    for one in fields(found):  # type: ignore[arg-type]
        if one.type in ("int", "float", "str") and type(getattr(found, one.name)).__name__ != one.type:
            raise ValueError(f"{one.name} is of another kind than {one.type}")
    return found
