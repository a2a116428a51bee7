"""Named, nested sections of a run: what a rank is doing, for how long, and the time limit."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
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
"""Name for the part of steps that was spent waiting for other ranks; it is not a section."""

OF_A_STEP = (DATA, FORWARD_BACKWARD, OPTIMIZER, WAITING)

_SHORT = (STEP, DATA, FORWARD_BACKWARD, OPTIMIZER, SECOND_RUN, AGREEMENT)

ANSWER_SECONDS = 5.0
"""Seconds for a rank to send its dump, and to write it to a shared file system."""
WARNING_SECONDS = 20.0
"""Seconds without a sign of life after which a warning names a rank."""
LEAST_SILENCE = 10.0
"""Least seconds of silence that mean something: signs of life come once per second, and a machine may be busy."""
FACTOR = 5.0
START_SECONDS = 3600.0


def waiting_on(axis: str) -> str:
    """Return the name for the part of `WAITING` that was spent on one axis of the mesh."""
    return f"{WAITING}, {axis}"


class OpenSection(NamedTuple):
    """Section that a rank is in."""

    name: str
    seconds: float
    """Seconds since it began."""


class Sections:
    """Sections of one rank, which its main thread enters and its watchdog's thread reads.

    `step`: the step that the rank is in, or was in last. `waits` are the seconds, which grow, that the main thread has
    waited for other ranks, by axis; `profile_range` returns a context that names an open section in a profile.
    """

    def __init__(
        self,
        waits: Mapping[str, float] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
        profile_range: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.step = 0
        self.longest: dict[str, float] = {}
        """Longest time that each kind of finished section has taken."""
        self.spent: dict[tuple[str, str], float] = defaultdict(float)
        """Seconds in all sections of a kind, with their waits, by the name of the outermost section and the own."""
        self.failed = ""
        """Innermost section of the last error that has left a section."""
        self.is_finishing: Callable[[], bool] = lambda: False
        """Tells whether the main thread computes what is of use though another rank has ended."""
        self._failure: BaseException | None = None
        self._waits, self._clock, self._profile_range = waits, clock, profile_range
        self._stopped = 0.0
        self._open: list[tuple[str, float]] = []
        self._own: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Mark this rank as being in the section during the block."""
        began, before = self._now(), dict(self._waits)
        self._open.append((name, began))
        try:
            with self._profile_range(name):
                yield
            seconds, waited = self._now() - began, sum(self._waits.values()) - sum(before.values())
            self.longest[name] = max(seconds, self.longest.get(name, 0.0))
            self._own[name] += max(seconds - waited, 0.0)  # waiting includes the time in which the process was stopped
            self.spent[self._open[0][0], name] += seconds
            if name == STEP:
                self._own[WAITING] += waited
                for axis, total in self._waits.items():
                    self._own[waiting_on(axis)] += total - before.get(axis, 0.0)
        except BaseException as error:
            if error is not self._failure:  # otherwise the error comes from an inner section
                self.failed = name
            self._failure = error if len(self._open) > 1 else None
            raise
        finally:
            self._open.pop()

    def open(self) -> list[OpenSection]:
        """Return the sections that the rank is in now, the outermost first."""
        now = self._now()
        return [OpenSection(name, now - began) for name, began in tuple(self._open)]

    def was_stopped(self, seconds: float) -> None:
        """Subtract from the open sections a time in which the whole process was suspended, for example by Ctrl-Z."""
        self._stopped += seconds

    def take(self) -> dict[str, float]:
        """Return the seconds in each section since the last call; waiting for other ranks is counted apart."""
        own, self._own = self._own, defaultdict(float)
        return dict(own)

    def _now(self) -> float:
        return self._clock() - self._stopped


@dataclass(frozen=True)
class Limits:
    """Limit of a section as a multiple of the longest time that it has taken, but never less than `least`.

    `unlearnt`, in seconds, is the limit for the first section of each kind, which may compile kernels or connect ranks.
    It is also the least limit for a save or a profile: a shared file system may become much slower than before.
    Sections of a run's start occur only once and may be long (for example building an index). The time for ranks to
    connect is limited by the rendezvous itself.

    `starts_again`: these ranks replace others, so what a start may build is there.
    """

    least: float = 120.0
    unlearnt: float = 600.0
    starts_again: bool = False

    def of(self, name: str, longest: Mapping[str, float]) -> float:
        """Return the seconds that a section may take; `longest` has the longest times of earlier sections."""
        if name == MEETING:
            return math.inf
        if name == START:
            return max(START_SECONDS, self.unlearnt)
        learnt = max(self.least, FACTOR * longest.get(name, 0.0))
        return max(learnt, self.unlearnt) if name in (SAVE, PROFILE) or name not in longest else learnt

    def silence(self, name: str) -> float:
        """Return the seconds without a sign of life, in this section, after which a process counts as suspended.

        Its watchdog sends one each second, unless the main thread is in a call that lets no other thread run. Such a
        call may be long outside of steps: building an index, or reading from a file system that hangs. Between
        sections, where the name is empty, nothing takes long.
        """
        short = not name or name in _SHORT or (self.starts_again and name in (MEETING, START))
        return max(self.least, LEAST_SILENCE, 0.0 if short else self.unlearnt)

    def overdue(self, sections: list[OpenSection], longest: Mapping[str, float]) -> OpenSection | None:
        """Return the innermost of the open sections that is over its limit."""
        late = [section for section in sections if section.seconds > self.of(section.name, longest)]
        return late[-1] if late else None
