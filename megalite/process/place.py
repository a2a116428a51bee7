"""Who this process is, by the launcher's environment; torch is not needed to ask."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Place:
    """This process among those that torchrun (or a scheduler with the same variables) started."""

    rank: int
    local_rank: int
    world_size: int


def place_from_environment() -> Place:
    """The process's place; a process that no launcher started is alone."""
    environment = os.environ
    return Place(
        rank=int(environment.get("RANK", "0")),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        world_size=int(environment.get("WORLD_SIZE", "1")),
    )


def ranks_text(ranks: Iterable[int], most: int = 16) -> str:
    """`rank 3`, `ranks 0, 2-5`; where it takes more than `most` pieces, the first ones and the count."""
    return numbered("rank", ranks, most)


def numbered(what: str, numbers: Iterable[int], most: int = 16) -> str:
    """`step 3`, `steps 0, 2-5`, as `ranks_text`."""
    ordered = sorted(set(numbers))
    runs = [[number for _, number in run] for _, run in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])]
    pieces = [piece for run in runs for piece in ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run))]
    if len(pieces) > most:
        pieces = [*pieces[:most], f"... ({len(ordered)} of them)"]
    return f"{what}{'s' if len(ordered) > 1 else ''} {', '.join(pieces)}"
