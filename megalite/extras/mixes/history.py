"""The phases of a run as they were and as they are planned: what a checkpoint keeps, and how a changed file joins it.

A phase counts in samples, of the length that its samples have. If the length changes, the number of the next sample is
that of the tokens so far in samples of the new length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megalite.config.run import fits
from megalite.errors import CheckpointError, DataError
from megalite.extras.mixes.schedule import MOST, Schedule, require_shares
from megalite.extras.mixes.token_source import BlendPast
from megalite.storage import AnyPath

SECTION = "data_mix"
"""Section of a checkpoint's configuration that has the history."""
_VERSION = 1


@dataclass(frozen=True)
class MixedPhase:
    """Samples of which the sources have the same weights.

    Attributes:
        first: number of its first sample.
        until: number behind its last sample, if phases behind it have samples of another length; None: the next begins
            there, or there is none.
        length: tokens of a sample.
        weights: weight of each source.
        max_epochs: most times that sources may have been read at its end, over the whole run.
    """

    first: int
    until: int | None
    length: int
    weights: Mapping[str, float]
    max_epochs: Mapping[str, float]

    @property
    def mix(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Weights and limits, which decide the samples that are given."""
        return self.weights, self.max_epochs


@dataclass(frozen=True)
class SourceRecord:
    """A source as the run has read it.

    Attributes:
        prefixes: paths of its files.
        tokens: tokens of all of them.
        identity: their checksum.
        blend: what it gave to a blend before the first phase; None: nothing.
    """

    prefixes: tuple[str, ...]
    tokens: int
    identity: str
    blend: BlendPast | None = None


@dataclass(frozen=True)
class History:
    """Phases in order, and the sources that they name.

    Attributes:
        seed: seed of the order of each source.
        share: fractions of each file's sequences between which those of training lie.
    """

    phases: tuple[MixedPhase, ...]
    sources: Mapping[str, SourceRecord]
    seed: int
    share: tuple[float, float]

    def saved(self) -> dict[str, Any]:
        """Return the history as JSON."""
        return {"version": _VERSION, **asdict(self)}

    def end_of(self, number: int) -> int | None:
        """Return the number behind the last sample of a phase; None for the last one."""
        phase = self.phases[number]
        return self.phases[number + 1].first if phase.until is None and number + 1 < len(self.phases) else phase.until


def planned(schedule: Schedule, length: int) -> tuple[MixedPhase, ...]:
    """Return the phases of a schedule in samples of a length: one begins with the first sample behind its token."""
    phases = []
    for phase in schedule.phases:
        caps = {name: each for name in phase.weights if (each := schedule.sources[name].max_epochs) is not None}
        phases.append(MixedPhase(-(-phase.first_token // length), None, length, phase.weights, caps))
    last = {phase.first: phase for phase in phases}  # of two within one sample, the later one
    return tuple(last.values())


def joined(past: Sequence[MixedPhase], plan: Sequence[MixedPhase], sample: int) -> tuple[MixedPhase, ...]:
    """Return the past until a sample, and the plan from there on. A phase that stays as it was goes on.

    `sample`: number of the next sample, of the plan's length, as are those of past phases that have not `ended`.
    """
    kept = [each for each in past if each.until is not None or each.first < sample]
    active = [each for each in plan if each.first <= sample][-1]
    later = [each for each in plan if each.first > sample]
    if kept and kept[-1].until is None and kept[-1].mix == active.mix:
        return (*kept, *later)
    return (*kept, replace(active, first=sample), *later)


def ended(past: Sequence[MixedPhase], sample: int) -> tuple[MixedPhase, ...]:
    """Return the phases until a sample of their length: those behind it have samples of another length."""
    begun = [each for each in past if each.until is not None or each.first < sample]
    found = zip(begun, [*(each.first for each in begun[1:]), sample], strict=False)
    return tuple(replace(each, until=end) if each.until is None else each for each, end in found)


def read_history(path: AnyPath, saved: Mapping[str, Any]) -> History | None:
    """Return the history in the configuration of a checkpoint, or None. Raises CheckpointError if it is not valid."""
    found = saved.get(SECTION)
    if found is None:
        return None
    try:
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']!r}")
        phases = tuple(MixedPhase(**each) for each in found["phases"])
        sources = {name: _record(each) for name, each in found["sources"].items()}
        seed, share = found["seed"], tuple(found["share"])
        if not (fits(seed, int) and len(share) == 2 and all(fits(each, float) for each in share)):
            raise ValueError("its seed or its share is not valid")
        if not phases:
            raise ValueError("it has no phase")
        for phase, following in zip(phases, (*phases[1:], None), strict=True):
            _check_phase(phase, following, sources)
    except (KeyError, TypeError, ValueError, AttributeError, DataError) as error:
        raise CheckpointError(
            f"{path}: its {SECTION} cannot be read ({error}): it was damaged, or written by another version; resume "
            "from another checkpoint"
        ) from error
    return History(phases, sources, seed, (share[0], share[1]))


def _record(found: Mapping[str, Any]) -> SourceRecord:
    """Return the record of a source. Raises ValueError if it is not valid."""
    record = SourceRecord(**{**found, "prefixes": tuple(found["prefixes"]), "blend": None})
    past = found["blend"]
    is_known = record.prefixes and fits(record.prefixes, tuple[str, ...]) and fits(record.identity, str)
    if not is_known or not _is_number(record.tokens, 1):
        raise ValueError("a source is not valid")
    if past is None:
        return record
    requested, consumed, length = past
    if not ((requested is None or _is_number(requested, 1)) and _is_number(consumed, 0) and _is_number(length, 1)):
        raise ValueError("what a source gave to a blend is not valid")
    return replace(record, blend=BlendPast(requested, consumed, length))


def _check_phase(phase: MixedPhase, following: MixedPhase | None, sources: Mapping[str, SourceRecord]) -> None:
    """Raise ValueError or DataError if a phase is not one that a schedule gives, or if it ends before it begins."""
    if not (_is_number(phase.first, 0) and _is_number(phase.length, 1)):
        raise ValueError("a phase does not begin at a number of samples")
    if phase.until is not None and not _is_number(phase.until, phase.first):
        raise ValueError("a phase ends before it begins")
    if phase.until is None and following is not None and not _goes_on(phase, following):
        raise ValueError("a phase does not end where the next one begins")
    if not phase.weights or not phase.weights.keys() <= sources.keys():
        raise ValueError("a phase has other sources")
    if not all(fits(each, float) and each > 0 for each in (*phase.weights.values(), *phase.max_epochs.values())):
        raise ValueError("a weight or a limit is not positive")
    require_shares(phase.weights)


def _goes_on(phase: MixedPhase, following: MixedPhase) -> bool:
    return following.until is None and following.length == phase.length and phase.first < following.first


def _is_number(value: object, least: int) -> bool:
    return type(value) is int and least <= value < MOST
