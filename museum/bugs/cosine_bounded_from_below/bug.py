from __future__ import annotations

import math

from museum.plain.settings import Settings

SETTINGS = {"dp": 2, "steps": 2, "record": (1, 2), "decay_steps": 8}


def bounded(settings: Settings, step: int) -> float:
    passed = min((step - 1) / settings.decay_steps, 1.0)
    return max(settings.rate * 0.5 * (1.0 + math.cos(math.pi * passed)), settings.least_rate)


PATCHES = {"warm_up": bounded}
