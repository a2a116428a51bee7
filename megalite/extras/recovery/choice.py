"""Choice of a copy that every rank has in memory: its own, or one that its partner keeps for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Taken(NamedTuple):
    """Copy of all ranks together. Two with the same step and mark are of the same execution."""

    step: int
    mark: int
    """Random number of the start of the ranks that took it."""


@dataclass(frozen=True)
class Choice:
    """Copy to continue from, and which ranks must get theirs first."""

    taken: Taken
    fetched: Mapping[int, int]
    """Partner that sends a rank its copy, by that rank."""


def choose(
    own: Sequence[Sequence[Taken]], kept: Sequence[Sequence[Taken]], partners: Sequence[int] | None
) -> Choice | None:
    """Return the newest copy that every rank has; None if there is none.

    Args:
        own: by rank, its own copies.
        kept: by rank, the copies that it keeps for the rank whose partner it is.
        partners: by rank, its partner; None if ranks have none.
    """
    common: set[Taken] | None = None
    for rank, copies in enumerate(own):
        there = {*copies, *(kept[partners[rank]] if partners is not None else ())}
        common = there if common is None else common & there
    if not common:
        return None
    newest = max(common)
    lacking = [rank for rank, copies in enumerate(own) if newest not in copies]
    return Choice(newest, {} if partners is None else {rank: partners[rank] for rank in lacking})
