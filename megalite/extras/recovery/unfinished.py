"""Gradients of a step that a failure has interrupted, as the ranks that have not failed have kept them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalite.data.sampler import Deal


@dataclass(frozen=True)
class Kept:
    """Description of the gradients that a rank has kept: the sums over some micro-batches of a step."""

    mark: int
    """Random number of the start of the ranks in which they were kept."""
    base: tuple[int, int]
    """State from which they were computed: its step, and the random number of the start in which it arose."""
    replica: int
    """Data-parallel index of the rank."""
    place: tuple[int, ...]
    """Its position along the other axes."""
    done: tuple[int, ...]
    """Numbers of the micro-batches in the step, ascending."""
    sums: Mapping[str, float | list[float]]
    """Sums of the terms of the loss over them, on this rank."""
    counts: Mapping[str, float]
    """Counts of the terms over the whole global batch."""

    @staticmethod
    def of(values: Mapping[str, Any]) -> Kept:
        """Return the description from its fields, which have been JSON."""
        lists = {name: tuple(values[name]) for name in ("base", "place", "done")}
        return Kept(**{**values, **lists})


def usable(told: Sequence[Kept | None], places: Sequence[tuple[int, ...]]) -> dict[int, Kept]:
    """Return what is used of the gradients that ranks have kept, by rank.

    Those of a replica are used if each place of it is held by a rank that has the same place now. No micro-batch is
    used twice. All ranks get the same from the same arguments.

    Args:
        told: what each rank has kept of the state that it continues from, if anything.
        places: the position of each rank along the axes of a replica.
    """
    groups: dict[tuple[int, int, tuple[int, ...]], dict[tuple[int, ...], int]] = {}
    for rank, kept in enumerate(told):
        if kept is not None and kept.place == places[rank]:
            groups.setdefault((kept.mark, kept.replica, kept.done), {}).setdefault(kept.place, rank)
    found, used = dict[int, Kept](), set[int]()
    for (_, _, done), ranks in sorted(groups.items(), key=lambda group: (-len(group[0][2]), group[0])):
        if ranks.keys() == set(places) and used.isdisjoint(done):
            used.update(done)
            found.update({rank: kept for rank in ranks.values() if (kept := told[rank]) is not None})
    return found


def deal_of_rest(done: Sequence[int], micro_batches: int, replica: int, replicas: int) -> Deal:
    """Return a data-parallel rank's part of the micro-batches of a step that are still to be computed.

    They are taken in turns. A rank that gets none has an empty slot.
    """
    rest = sorted(set(range(micro_batches)) - set(done))
    numbers = rest[replica::replicas]
    turns = [*rest[::replicas][: len(numbers)], micro_batches]
    return Deal(numbers, turns, micro_batches, 0 if numbers else 1)
