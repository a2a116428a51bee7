"""Faults, and schedules of them: read from a file, or drawn from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from megalite.errors import ConfigurationError
from megalite.small_files import read_json

KINDS = {
    "kill": "SIGKILL of the rank",
    "stop": "SIGSTOP of the rank",
    "exception": "an exception in the rank",
    "gil": "a call that holds the interpreter's lock for an hour",
    "bit-in-memory": "one bit of one element of a random parameter of the rank is flipped",
    "bit-in-file": "one bit of a random file of the newest checkpoint is flipped, and the rank is killed",
    "full-disk": "writes of the rank below the run directory fail with ENOSPC for some seconds",
    "slow-disk": "writes and syncs of the rank below the run directory take 0.2 s more each for some seconds",
    "slow-rank": "the next ten steps of the rank take 0.2 s more each",
    "network": "the loopback network of the command is down for some seconds (as root, in a namespace of its own)",
    "lying-fsync": "power loss: all processes are killed, and what they wrote in the last seconds was never on disk",
}
"""Kinds of faults, with what each does."""
OF_A_PROCESS = ("kill", "stop")
"""Kinds that can come at a random moment, sent by the tool."""
FATAL = ("kill", "stop", "exception", "gil", "bit-in-file", "lying-fsync")
"""Kinds after which another process must take the rank's place."""
SECONDS = {"full-disk": 2.0, "slow-disk": 5.0, "network": 2.0, "lying-fsync": 1.0, "gil": 3600.0}
"""Default duration of the kinds that last."""
_AFTER_SHARE = 0.25
"""Share of drawn faults that hit the recovery from the one before."""


@dataclass(frozen=True)
class Fault:
    """Fault that occurs once in a run, at a named site or at a moment.

    Attributes:
        kind: one of `KINDS`.
        rank: the rank that it hits.
        site: name of the site; None for a moment.
        occurrence: it occurs when the rank reaches the site for the so-manieth time in one process, or later.
        moment: seconds after the first step that follows the fault before it in the schedule (or the start of the run);
            with `after`, seconds after that fault.
        after: index of the fault of the schedule that must have occurred before, for faults during a recovery.
        seconds: duration, of kinds that last.
        seed: decides which bit is flipped.
    """

    kind: str
    rank: int
    site: str | None = None
    occurrence: int = 1
    moment: float | None = None
    after: int | None = None
    seconds: float | None = None
    seed: int = 0

    def __str__(self) -> str:
        where = f"at {self.site}, call {self.occurrence}" if self.site else f"after {self.moment:.2f} s"
        return f"{self.kind} of rank {self.rank} {where}{'' if self.after is None else f', after fault {self.after}'}"

    @property
    def duration(self) -> float:
        """Seconds that the fault lasts; 0 for those that do not last."""
        return SECONDS.get(self.kind, 0.0) if self.seconds is None else self.seconds


@dataclass(frozen=True)
class Observed:
    """Record of an undisturbed run: what can be disturbed.

    Attributes:
        calls: for each rank, how often it reached each site.
        seconds: from the first step to the end.
        steps: number of steps of a rank.
    """

    calls: Mapping[int, Mapping[str, int]]
    seconds: float
    steps: int = 0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return 1 + max(self.calls, default=-1)


def problems(faults: Sequence[Fault], sites: Collection[str], where: str) -> list[str]:
    """Return a line for each fault that cannot be planted."""
    found = []
    for number, fault in enumerate(faults):
        here = f"{where}, fault {number}"
        if fault.kind not in KINDS:
            found.append(f"{here}: there is no kind {fault.kind!r}; the kinds are {', '.join(KINDS)}")
        if fault.site is not None and fault.site not in sites:
            found.append(f"{here}: there is no site {fault.site!r}; the sites are {', '.join(sites)}")
        if (fault.site is None) == (fault.moment is None):
            found.append(f"{here}: give either a site or a moment")
        if fault.moment is not None and (fault.moment < 0 or fault.kind not in (*OF_A_PROCESS, "network")):
            found.append(
                f"{here}: kill, stop and network can come at a moment of 0 s or more; give {fault.kind} a site"
            )
        if fault.rank < 0 or fault.occurrence < 1 or fault.duration < 0:
            found.append(f"{here}: rank and seconds must be at least 0, occurrence at least 1")
        if fault.after is not None and not 0 <= fault.after < number:
            found.append(f"{here}: after {fault.after} must be the index of an earlier fault")
    return found


def require_ranks(faults: Sequence[Fault], observed: Observed) -> None:
    """Raise ConfigurationError if a fault is to hit a rank that the command does not have."""
    for fault in faults:
        if fault.rank >= observed.world_size:
            raise ConfigurationError(
                f"{fault}: the command has {observed.world_size} ranks, 0 to {observed.world_size - 1}"
            )


def read_schedules(path: Path, sites: Collection[str]) -> list[list[Fault]]:
    """Read a JSON list of trials, each a list of faults as objects with the attributes of `Fault`.

    Raises ConfigurationError.
    """
    try:
        trials = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--schedule {path}: {error}") from error
    kinds = {field.name: field for field in fields(Fault)}
    try:
        found = [[_fault(fault, kinds) for fault in trial] for trial in trials]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--schedule {path}: must be a list of lists of objects with some of {', '.join(kinds)}: {error}"
        ) from error
    wrong = [
        line
        for number, trial in enumerate(found)
        for line in problems(trial, sites, f"--schedule {path}, trial {number}")
    ]
    if wrong or not found:
        raise ConfigurationError("\n".join(wrong) or f"--schedule {path} has no trials")
    return found


def _fault(values: Any, known: Collection[str]) -> Fault:
    """Return the fault of a JSON object. Raises TypeError or ValueError."""
    if not isinstance(values, dict) or values.keys() - known:
        raise ValueError(f"{values!r:.80}")
    numbers: Mapping[str, tuple[type, ...]] = {
        "kind": (str,), "site": (str, type(None)), "moment": (int, float, type(None)), "after": (int, type(None)),
        "seconds": (int, float, type(None)),
    }  # fmt: skip
    for name, value in values.items():
        if not isinstance(value, numbers.get(name, (int,))) or isinstance(value, bool):
            raise ValueError(f"{name} is {value!r:.40}")
    return Fault(**values)


def written(trials: Sequence[Sequence[Fault]]) -> str:
    """Return schedules as the text of a file that `read_schedules` reads."""
    return json.dumps([[asdict(fault) for fault in trial] for trial in trials], indent=1) + "\n"


def draw(
    seed: int, trials: int, faults: int, kinds: Sequence[str], sites: Collection[str], recovery: Collection[str],
    observed: Observed,
) -> list[list[Fault]]:  # fmt: skip
    """Draw schedules; the same arguments give the same ones.

    Half of the kills and stops come at a random moment, the others at a site that the undisturbed run has reached. A
    quarter of the faults hits the recovery from the one before, at a site of `recovery` or within seconds of it.

    Args:
        sites: sites that may be drawn.
        recovery: sites that a starting process passes.
    """
    generator = random.Random(seed)
    return [_draw_trial(generator, faults, kinds, sites, recovery, observed) for _ in range(trials)]


def _draw_trial(
    generator: random.Random, count: int, kinds: Sequence[str], sites: Collection[str], recovery: Collection[str],
    observed: Observed,
) -> list[Fault]:  # fmt: skip
    """Draw the faults of a trial, one after the other."""
    trial: list[Fault] = []
    for number in range(count):
        kind, rank = generator.choice(list(kinds)), generator.randrange(observed.world_size)
        doubled = bool(number and trial[-1].kind in FATAL and generator.random() < _AFTER_SHARE)
        after, seed = (number - 1 if doubled else None), generator.getrandbits(32)
        calls = observed.calls.get(rank, {})
        reached = [site for site in sites if calls.get(site)] if not doubled else [s for s in recovery if s in sites]
        if kind in OF_A_PROCESS and (not reached or generator.random() < 0.5):
            longest = 5.0 if doubled else observed.seconds / max(count, 1)
            trial.append(Fault(kind, rank, moment=round(generator.uniform(0.0, longest), 3), after=after, seed=seed))
            continue
        if not reached:
            raise ConfigurationError(
                f"rank {rank} reached none of the sites {', '.join(sites)}: {kind} cannot be drawn"
            )
        site = generator.choice(reached)
        occurrence = 1 if doubled else generator.randint(1, calls[site])
        trial.append(Fault(kind, rank, site, occurrence, after=after, seed=seed))
    return trial


def every_site(
    kinds: Sequence[str], sites: Collection[str], recovery: Collection[str], observed: Observed, seed: int,
    faults: int = 1,
) -> list[list[Fault]]:  # fmt: skip
    """Return trials in which each of the kinds occurs once at each site that a rank has reached, for each rank.

    One fault of a trial comes at a drawn call of its site. Several come one after the other, in the order of `sites`:
    two steps after the restart, or at the first call where not every step has one. Few of those, and of the sites of a
    starting process, share a trial, so that the run gets on.

    Args:
        recovery: sites that a starting process passes.
        faults: most faults of a trial.
    """
    generator = random.Random(seed)
    found = [
        Fault(kind, rank, site, _call(calls[site], observed.steps, faults, generator), seed=generator.getrandbits(32))
        for kind in kinds
        for rank, calls in sorted(observed.calls.items())
        for site in sites
        if calls.get(site)
    ]
    rare = {site for calls in observed.calls.values() for site, number in calls.items() if number < observed.steps}
    found.sort(key=lambda fault: (fault.site not in recovery, fault.site not in rare))  # each kind is dealt equally
    count = -(-len(found) // faults)
    order = list(sites)
    trials = [sorted(found[first::count], key=lambda fault: order.index(fault.site or "")) for first in range(count)]
    return [[replace(f, after=place - 1 if place else None) for place, f in enumerate(trial)] for trial in trials]


def _call(calls: int, steps: int, faults: int, generator: random.Random) -> int:
    """Draw the call of a site at which a fault occurs. `calls`: those of `steps` steps."""
    if faults == 1:
        return generator.randint(1, calls)
    a_step = calls // max(steps, 1)
    return 2 * a_step + generator.randint(1, max(a_step, 1))
