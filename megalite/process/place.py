"""Who this process is, by the launcher's environment; torch is not needed to ask."""

from __future__ import annotations

import os
from dataclasses import dataclass


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
