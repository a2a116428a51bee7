"""How long a section may take: learnt from the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megalite.watchdog.sections import MEETING, PROFILE, SAVE, START, OpenSection

FACTOR = 5.0
START_SECONDS = 3600.0


@dataclass(frozen=True)
class Limits:
    """Of a section that has been seen, so many times the longest that it took; but never less than `least`.

    `unlearnt`, seconds, holds for the first of each kind, which may compile kernels or connect ranks, and is the least
    for a save or a profile: a file system that others use, too, may be far slower than it was. What a run does to start
    is seen only once and may be long, like the building of an index. How long ranks wait to meet is for them to say.
    """

    least: float = 120.0
    unlearnt: float = 600.0

    def of(self, name: str, longest: Mapping[str, float]) -> float:
        """Seconds that a section may take, where those before it took `longest`."""
        if name == MEETING:
            return math.inf
        if name == START:
            return max(START_SECONDS, self.unlearnt)
        if name not in longest:
            return max(self.least, self.unlearnt)
        learnt = max(self.least, FACTOR * longest[name])
        return max(learnt, self.unlearnt) if name in (SAVE, PROFILE) else learnt

    def overdue(self, sections: list[OpenSection], longest: Mapping[str, float]) -> OpenSection | None:
        """The innermost of the open sections that takes longer than it may."""
        late = [section for section in sections if section.seconds > self.of(section.name, longest)]
        return late[-1] if late else None
