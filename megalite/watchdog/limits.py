"""Time limits of sections, learnt from the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.watchdog.sections import MEETING, PROFILE, SAVE, START, OpenSection

FACTOR = 5.0
START_SECONDS = 3600.0


@dataclass(frozen=True)
class Limits:
    """Limit of a section as a multiple of the longest time that it has taken, but never less than `least`.

    `unlearnt`, in seconds, is the limit for the first section of each kind, which may compile kernels or connect ranks.
    It is also the least limit for a save or a profile: a shared file system may become far slower than before. Sections
    of a run's start are seen only once and may be long, like the building of an index. The time that ranks wait to meet
    is limited elsewhere, where they meet.
    """

    least: float = 120.0
    unlearnt: float = 600.0

    def of(self, name: str, longest: Mapping[str, float]) -> float:
        """Return the seconds that a section may take; `longest` has the longest times of earlier sections."""
        if name == MEETING:
            return math.inf
        if name == START:
            return max(START_SECONDS, self.unlearnt)
        if name not in longest:
            return max(self.least, self.unlearnt)
        learnt = max(self.least, FACTOR * longest[name])
        return max(learnt, self.unlearnt) if name in (SAVE, PROFILE) else learnt

    def overdue(self, sections: list[OpenSection], longest: Mapping[str, float]) -> OpenSection | None:
        """Return the innermost of the open sections that is over its limit."""
        late = [section for section in sections if section.seconds > self.of(section.name, longest)]
        return late[-1] if late else None
