"""Days of a training, and what failures take of them: the best interval between checkpoints and the expected goodput.

Failures come at random, at a constant rate of 1/M for the whole run. A run works for `interval` seconds, saves in
`save` seconds, and so on; after a failure, also one in a save or a restart, it restarts in `restart` seconds from the
last checkpoint. Then the expected time of an interval with its save is exactly

    T = M exp(restart / M) (exp((interval + save) / M) - 1)

(J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22, 2006). Goodput is interval / T. It is largest at

    interval = M (1 + W(-exp(-save / M - 1)))

with Lambert's function W. For save << M this is Young's sqrt(2 save M) (Communications of the ACM 17, 1974) and, more
closely, Daly's sqrt(2 save M) - save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DAY = 86400.0
NO_PROGRESS = 0.0005
"""Goodput that counts as none."""
_STEPS = 60
_SHORT = 1e-10
"""Share of the time between failures below which a save is so short that Young's interval has five right digits."""


@dataclass(frozen=True)
class Failures:
    """Failures of a run, and what saves and restarts take.

    Attributes:
        rate: failures per second of the whole run.
        save: seconds in which a save stops the training.
        restart: seconds from a failure until the run trains again.
    """

    rate: float
    save: float
    restart: float

    def goodput(self, interval: float) -> float:
        """Return the share of time in which the run makes progress that lasts. `interval`: seconds between saves."""
        if self.rate == 0:
            return interval / (interval + self.save)
        grown = math.exp(min(self.restart * self.rate, 700.0)) * math.expm1(
            min((interval + self.save) * self.rate, 700.0)
        )
        return interval * self.rate / grown

    @property
    def interval(self) -> float:
        """Seconds between saves with which goodput is largest; infinite without failures."""
        if self.rate == 0:
            return math.inf
        mean = 1 / self.rate
        if self.save < _SHORT * mean:
            return math.sqrt(2 * self.save * mean)
        return mean * (1 + _lambert(-math.exp(-self.save / mean - 1)))

    @property
    def best(self) -> float:
        """The largest goodput."""
        return (
            1.0
            if self.rate == 0
            else self.goodput(self.interval)
            if self.save > 0
            else math.exp(-self.restart * self.rate)
        )


@dataclass(frozen=True)
class Length:
    """Length of a training.

    Attributes:
        tokens: tokens of the training; None: not given.
        speed: tokens per second of the whole run.
        failures: None: not given.
    """

    tokens: float | None
    speed: float
    failures: Failures | None

    @property
    def figures(self) -> dict[str, float]:
        """Numbers that are known: `days`, `goodput` unless it is next to none, and the `days_with_failures`."""
        found, failures = {}, self.failures
        if self.tokens is not None:
            found["days"] = days(self.tokens, self.speed)
        if failures is not None and failures.best >= NO_PROGRESS:
            found["goodput"] = failures.best
            if self.tokens is not None and failures.rate > 0 and failures.save > 0:
                found["days_with_failures"] = days(self.tokens, self.speed * failures.best)
        return found


def days(tokens: float, tokens_per_second: float) -> float:
    """Return the days of a training without failures."""
    return tokens / tokens_per_second / DAY


def _lambert(value: float) -> float:
    """Return the principal branch of Lambert's function, w exp(w) = value, for values from -1/e to 0."""
    low, high = -1.0, 0.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if middle * math.exp(middle) < value else (low, middle)
    return (low + high) / 2
