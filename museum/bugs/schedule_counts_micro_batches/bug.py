from __future__ import annotations

from museum.plain.optimizer import warm_up
from museum.plain.settings import Settings

SETTINGS = {"steps": 2, "record": (1, 2), "decay_steps": 20}


def of_micro_batches(settings: Settings, step: int) -> float:
    return warm_up(settings, (step - 1) * settings.micro_batches + 1)


PATCHES = {"warm_up": of_micro_batches}
