"""Interval between copies in memory, from what one of them takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

SHARE = 0.03
"""Largest share of a step's time that copies may take, on average over the steps between two of them."""


@dataclass(frozen=True)
class Price:
    """Seconds that a copy and a step take on a rank."""

    blocking: float
    """Seconds for which a copy keeps training from going on."""
    background: float
    """Seconds of the CPU that a copy takes beside the steps, in its thread."""
    step: float
    """Seconds of a step: of the CPU, or with a device those of the clock."""

    def text(self, interval: int) -> str:
        """Return a text with the figures, for copies every `interval` steps."""
        return (
            f"one stops training for {1000 * self.blocking:,.1f} ms and takes {1000 * self.background:,.1f} ms of a "
            f"core beside it, a step {1000 * self.step:,.1f} ms: "
            f"{100 * (self.blocking + self.background) / (interval * self.step or 1):.1f}%"
        )


def interval_for(price: Price, *, on_device: bool) -> int:
    """Return the number of steps between copies that keeps their price below `SHARE`.

    On a device the background work takes nothing from a step; on the CPU it does.
    """
    seconds = price.blocking + (0.0 if on_device else price.background)
    return max(1, math.ceil(seconds / (SHARE * price.step))) if price.step > 0 else 1
