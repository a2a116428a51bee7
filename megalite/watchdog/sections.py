"""What a rank is doing: named sections of a run, one inside another, and how long each takes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

MEETING = "meeting"
START = "start"
STEP = "step"
DATA = "data"
FORWARD_BACKWARD = "forward and backward"
OPTIMIZER = "optimizer"
SECOND_RUN = "second run of a step"
AGREEMENT = "agreement"
EVALUATION = "evaluation"
SAVE = "save"
PROFILE = "profile"

WAITING = "waiting for others"
"""No section: what of steps was spent waiting for other ranks."""

OF_A_STEP = (DATA, FORWARD_BACKWARD, OPTIMIZER, WAITING)


class OpenSection(NamedTuple):
    """A section that a rank is in."""

    name: str
    seconds: float
    """Since it began."""


class Sections:
    """The sections of one rank, which its main thread enters and its watchdog's thread looks at.

    `step`: the step that the rank is in, or was in last. `waited` gives the seconds that the main thread has so far
    waited for other ranks; `naming` gives what names a section to others, as in a profile, while it is open.
    """

    def __init__(
        self,
        waited: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        naming: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.step = 0
        self.longest: dict[str, float] = {}
        """Of each section that has come to its end, the longest time that it took."""
        self.failed = ""
        """The innermost section of the last error that has come out of one."""
        self._failure: BaseException | None = None
        self._waited, self._clock, self._naming = waited, clock, naming
        self._stopped = 0.0
        self._open: list[tuple[str, float]] = []
        self._own: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Within it this rank is in the section."""
        began, waited = self._now(), self._waited()
        self._open.append((name, began))
        try:
            with self._naming(name):
                yield
            seconds, waited = self._now() - began, self._waited() - waited
            self.longest[name] = max(seconds, self.longest.get(name, 0.0))
            self._own[name] += max(seconds - waited, 0.0)  # what is waited counts the time of a stopped process, too
            if name == STEP:
                self._own[WAITING] += waited
        except BaseException as error:
            if error is not self._failure:  # else it comes from a section inside
                self.failed = name
            self._failure = error if len(self._open) > 1 else None
            raise
        finally:
            self._open.pop()

    def open(self) -> list[OpenSection]:
        """What the rank is in now, the outermost first."""
        now = self._now()
        return [OpenSection(name, now - began) for name, began in tuple(self._open)]

    def was_stopped(self, seconds: float) -> None:
        """Leave a time in which the whole process stood still, as under Ctrl-Z, out of that of the open sections."""
        self._stopped += seconds

    def take(self) -> dict[str, float]:
        """The seconds in each section since this was last asked, without what was waited for other ranks, and that."""
        own, self._own = self._own, defaultdict(float)
        return dict(own)

    def _now(self) -> float:
        return self._clock() - self._stopped
