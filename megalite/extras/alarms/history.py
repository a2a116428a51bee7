"""Rule by which a value of a step is large: a pure function of the values of the steps before it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class History:
    """Most recent values of a figure, one for each step that was trained on.

    Attributes:
        window: number of values that are kept; until there are as many, no value is large.
        values: their absolute values, the oldest first.
    """

    window: int
    values: tuple[float, ...] = ()

    @property
    def largest(self) -> float:
        """Return the largest of the values."""
        return max(self.values)

    def is_exceeded(self, value: float, factor: float) -> bool:
        """Tell whether a value is at least `factor` times the largest one before, which is not 0.

        One that is not finite never is.
        """
        full = len(self.values) == self.window
        return full and math.isfinite(value) and self.largest > 0 and abs(value) >= factor * self.largest

    def with_values(self, values: Iterable[float]) -> History:
        """Return the history after these values, without those that are not finite."""
        found = (*self.values, *(abs(value) for value in values if math.isfinite(value)))
        return History(self.window, found[-self.window :])
