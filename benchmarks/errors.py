"""Errors of what was computed here, of one tensor and of several together."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference relative to the norm of what is expected; 0 where nothing differs."""
    distance = (found.double() - expected.double()).norm().item()
    return 0.0 if distance == 0.0 else (distance / expected.double().norm()).item()


def largest(errors: Iterable[float]) -> float:
    """Return the largest error; infinity where one is not finite: max() can leave out a NaN. 0 if there is none."""
    found = list(errors)
    return max(found, default=0.0) if all(map(math.isfinite, found)) else math.inf
