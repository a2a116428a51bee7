"""Choice of a step of which a copy of every rank is in memory, on whichever rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Taken(NamedTuple):
    """Copy of all ranks together. Two with the same step and mark are of the same execution."""

    step: int
    mark: int
    """Random number of the start of the ranks that took it."""
    world_size: int
    """Number of the ranks that took it, which may not be that of today."""
    layout: str
    """Digest of their layout, as text."""


@dataclass(frozen=True)
class Choice:
    """Copy to continue from, and where it is."""

    taken: Taken
    holders: Mapping[int, int]
    """Rank of today that has the copy of each rank that took it: the same one, if it can."""

    def fetched(self, partners: Sequence[int] | None, layout: str) -> dict[int, int] | None:
        """Return by rank that must get its copy from its partner, that partner; None if ranks need those of others.

        `partners`: of each rank of today; None if there are none. `layout`: that of today.
        """
        there = partners or ()
        lacking = {rank: holder for rank, holder in self.holders.items() if holder != rank}
        if self.taken.layout != layout or (lacking and not there):
            return None
        return lacking if all(holder == there[rank] for rank, holder in lacking.items()) else None


def choose(held: Sequence[Sequence[tuple[Taken, int]]]) -> Choice | None:
    """Return the newest copy of which all parts are there; None if there is none.

    `held`: by rank of today, the copies that it has, each with the rank that it is of.
    """
    found: dict[Taken, dict[int, int]] = {}
    for rank, copies in enumerate(held):
        for taken, whose in copies:
            holders = found.setdefault(taken, {})
            if whose == rank or whose not in holders:
                holders[whose] = rank
    whole = [taken for taken, holders in found.items() if len(holders) == taken.world_size]
    return Choice(max(whole), found[max(whole)]) if whole else None
