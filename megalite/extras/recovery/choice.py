"""Choice of the step at which every rank has a copy in memory: its own, or one that its partner keeps for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """Step to continue from, and the copies of it that ranks must get first."""

    step: int
    fetched: Mapping[int, int]
    """Partner that sends a rank its copy, by that rank."""


def choose(
    own: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], partners: Sequence[int] | None
) -> Choice | None:
    """Return the newest step of which every rank has a copy; None if there is none.

    Args:
        own: by rank, the steps of its own copies.
        kept: by rank, the steps of the copies that it keeps for the rank whose partner it is.
        partners: by rank, its partner; None if ranks have none.
    """
    common: set[int] | None = None
    for rank, steps in enumerate(own):
        there = {*steps, *(kept[partners[rank]] if partners is not None else ())}
        common = there if common is None else common & there
    if not common:
        return None
    step = max(common)
    lacking = [rank for rank, steps in enumerate(own) if step not in steps]
    return Choice(step, {} if partners is None else {rank: partners[rank] for rank in lacking})
