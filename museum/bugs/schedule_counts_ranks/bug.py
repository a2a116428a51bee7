from __future__ import annotations

from museum.plain.optimizer import warm_up
from museum.plain.settings import Settings

SETTINGS = {"dp": 4, "steps": 2, "record": (1, 2), "decay_steps": 20}


def of_each_rank(settings: Settings, step: int) -> float:
    return warm_up(settings, (step - 1) * settings.dp + 1)


PATCHES = {"warm_up": of_each_rank}
