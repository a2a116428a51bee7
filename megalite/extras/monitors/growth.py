"""Growth of a rank's memory with each step: how much, and since when."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

LOOK_INTERVAL = 5
"""Steps between two looks at the memory in use."""
_PARTS, _LENGTH = 4, 2
_LOOKS = _PARTS * _LENGTH
"""Number of looks that show a growth."""
LEAST = 2.0**18
"""Bytes a step that are a growth."""
_OFTEN = 5
"""Number of these looks that must find more than the one before."""
_UNEVEN = 2.0
"""Ratio of what parts grow by, from which on it is no growth with each step."""

Used = tuple[int, int]
"""Look: the number of a step, and the bytes in use after it."""


@dataclass(frozen=True)
class Growth:
    per_step: float
    """Bytes."""
    since: int
    """The first step that has grown."""
    total: float
    """Bytes since then."""


def remember(used: deque[Used], look: Used) -> None:
    """Add a look to those before. Steps that the run has taken back, and runs again, are forgotten."""
    while used and used[-1][0] >= look[0]:
        used.pop()
    used.append(look)


def growth(used: Sequence[Used]) -> Growth | None:
    """Return by how much memory grows with each step; None: it does not.

    `used`: looks every `LOOK_INTERVAL` steps. The last ones are divided into parts. The least memory in a part is what
    it keeps, whatever comes and goes in one of its steps. Memory grows if it is more from part to part, and by about as
    much each time: caches that fill and pieces of the allocator grow once, less and less, or between a few looks.
    """
    if len(used) < _LOOKS:
        return None
    window = [size for _, size in used[-_LOOKS:]]
    kept = [min(window[start : start + _LENGTH]) for start in range(0, _LOOKS, _LENGTH)]
    rises = [later - earlier for earlier, later in itertools.pairwise(kept)]
    often = sum(later - earlier >= LEAST for earlier, later in itertools.pairwise(window)) >= _OFTEN
    steps = _LENGTH * LOOK_INTERVAL
    if not often or min(rises) < LEAST * steps or max(rises) > _UNEVEN * min(rises):
        return None
    per_step = statistics.median(rises) / steps
    since = _since(used, per_step)
    return Growth(per_step, since, per_step * (used[-1][0] - since + 1))


def _since(used: Sequence[Used], per_step: float) -> int:
    """Return the first step of a growth: where the line through the last steps meets what was kept before."""
    last, size = used[-1]
    for step, before in reversed(used):
        on_line = size - per_step * (last - step)
        if abs(before - on_line) > 2 * per_step:
            found = step + 1 + max(0, round((before - on_line) / per_step))
            return min(found, used[-_LOOKS][0] + _LENGTH * LOOK_INTERVAL)
    return used[0][0]
