"""The samples of a run whose sources are mixed by a schedule: a function of the phases so far and of their sources."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from megalite.data.sampler import Ranges, sample_at
from megalite.errors import DataError
from megalite.extras.mixes.apportionment import NO_LIMIT, Apportionment
from megalite.extras.mixes.course import BlendOrder, Course, Cut, Part
from megalite.extras.mixes.history import History, MixedPhase
from megalite.extras.mixes.token_source import TokenSource
from megalite.process.output import printable

_SHOWN = 5
"""Most sources that a line names one by one."""
NO_BLENDS: Mapping[str, BlendOrder] = MappingProxyType({})


@dataclass(frozen=True)
class Section:
    """Samples of one phase, ready to be looked up.

    Attributes:
        names: sources of the phase; the apportionment has their places here.
        given: tokens that each has given before the phase, int64.
        end: number behind the last sample; None: the phase has no end.
    """

    phase: MixedPhase
    names: Sequence[str]
    apportionment: Apportionment
    given: np.ndarray
    end: int | None

    def tokens_until(self, sample: int) -> np.ndarray:
        """Return the tokens that each source has given before a sample of this phase, int64 [sources]."""
        return self.given + self.apportionment.counts(sample - self.phase.first) * self.phase.length


class Mix:
    """Samples of a run, tokens int64 [sequence_length + 1] by their number.

    Args:
        history: the phases and their sources.
        sources: the token files of each source; those that later phases do not name may be missing.
        blends: what blends have left of sources that were part of one.

    Raises:
        DataError: a source can give no sample, or all sources of a phase have ended before it does.
    """

    def __init__(
        self, history: History, sources: Mapping[str, TokenSource], blends: Mapping[str, BlendOrder] = NO_BLENDS
    ) -> None:
        self._sources = sources
        self.follow(history, blends)

    def follow(self, history: History, blends: Mapping[str, BlendOrder] = NO_BLENDS) -> None:
        """Give the samples of these phases from now on. Raises DataError, as at the beginning."""
        self.history = history
        self._cuts: dict[str, list[Cut]] = {}
        self._given = dict.fromkeys(history.sources, 0)
        self.sections = [self._section(number) for number in range(len(history.phases))]
        self._open = [each for each in self.sections if each.phase.until is None]
        self._firsts = [each.phase.first for each in self._open]
        self.courses = {
            name: Course(history.sources[name].tokens, cuts, blends.get(name)) for name, cuts in self._cuts.items()
        }

    def _section(self, number: int) -> Section:
        """Prepare a phase, and count what its sources have given at its end."""
        phase, end = self.history.phases[number], self.history.end_of(number)
        names = [*phase.weights]
        for name in names:
            cuts = self._cuts.setdefault(name, [])
            if not cuts or cuts[-1].length != phase.length:
                cuts.append(Cut(self._given[name], phase.length))
        limits = [self._limit(phase, name) for name in names]
        apportionment = Apportionment(names, [*phase.weights.values()], limits)
        given = np.array([self._given[name] for name in names])
        if end is not None:
            if apportionment.capacity < end - phase.first:
                raise DataError(_ends(number, phase, apportionment.capacity))
            counts = apportionment.counts(end - phase.first)
            self._given |= zip(names, (given + counts * phase.length).tolist(), strict=True)
        return Section(phase, names, apportionment, given, end)

    def _limit(self, phase: MixedPhase, name: str) -> int:
        """Return how many samples a source may give in a phase."""
        if (epochs := phase.max_epochs.get(name)) is None:
            return NO_LIMIT
        source = self.history.sources[name]
        before = self._given[name] + self.blend_tokens(name)
        limit = min(max(0, int(epochs * source.tokens) - before) // phase.length, NO_LIMIT)
        if limit == 0 and before == 0:
            raise DataError(
                f"--data-mix-schedule: the source {name} has {source.tokens:,} tokens, and max_epochs {epochs:g} of it "
                f"have no sample of {phase.length:,}: raise max_epochs, or leave it out"
            )
        return limit

    def blend_tokens(self, name: str) -> int:
        """Return how many tokens a source has given as a part of a blend."""
        past = self.history.sources[name].blend
        return 0 if past is None else past.consumed * past.length

    # ------------------------------------------------------------------------------------------------ samples

    def __len__(self) -> int:
        """Return a number that no run reaches: `require` and lookups tell where samples end."""
        return NO_LIMIT

    def __getitem__(self, sample: int) -> np.ndarray:
        """Return the tokens of a sample.

        Raises:
            IndexError: it is one of former samples, of another length.
            DataError: all sources have reached their limits before.
        """
        name, parts = self._parts(sample)
        return self._sources[name].read(parts)

    def documents(self, sample: int) -> dict[str, list[int]]:
        """Return the documents of which a sample has tokens, ascending, by the prefix of their file."""
        name, parts = self._parts(sample)
        return self._sources[name].documents(parts)

    def _parts(self, sample: int) -> tuple[str, list[Part]]:
        """Return the source of a sample, and its parts there."""
        section, place = self._find(sample)
        if place >= section.apportionment.capacity:
            self.require(sample)
        number, count = section.apportionment.at(place)
        name = section.names[number]
        return name, self.courses[name].parts(section.given.item(number) + count * section.phase.length)

    def source_of(self, sample: int) -> str:
        """Return the name of the source of a sample."""
        section, place = self._find(sample)
        return section.names[section.apportionment.at(place)[0]]

    def _find(self, sample: int) -> tuple[Section, int]:
        section = self._open[bisect.bisect_right(self._firsts, sample) - 1]
        if sample < section.phase.first:
            raise IndexError(f"sample {sample} is before {section.phase.first}, the first one of this length")
        return section, sample - section.phase.first

    def require(self, sample: int) -> None:
        """Raise DataError if all sources reach their limits before a sample."""
        last = self.sections[-1]
        if sample - last.phase.first >= last.apportionment.capacity:
            raise DataError(_ends(len(self.sections) - 1, last.phase, last.apportionment.capacity))

    # ------------------------------------------------------------------------------------------------ figures

    def tokens_until(self, sample: int) -> dict[str, int]:
        """Return the tokens that each source has given before a sample."""
        section, _ = self._find(sample)
        given = dict.fromkeys(self.history.sources, 0)
        for each in self.sections[: self.sections.index(section)]:
            assert each.end is not None
            given |= zip(each.names, each.tokens_until(each.end).tolist(), strict=True)
        given |= zip(section.names, section.tokens_until(sample).tolist(), strict=True)
        return {name: tokens + self.blend_tokens(name) for name, tokens in given.items()}

    def after(self, consumed_samples: int, left_out: Ranges = ()) -> dict[str, float]:
        """Return the tokens of each source among the first samples, as figures of a record.

        `left_out`: samples that are passed over, and are not consumed. Those before the first sample of a mix, which a
        blend passed over, count as given: their sources are not known here.
        """
        number = sample_at(consumed_samples - 1, left_out) + 1
        given = self.tokens_until(number)
        for first, last in left_out:
            if self._firsts[0] <= first and last < number:
                passed, until = self.tokens_until(first), self.tokens_until(last + 1)
                given = {name: tokens - until[name] + passed[name] for name, tokens in given.items()}
        return {f"consumed_tokens/{printable(name)}": float(tokens) for name, tokens in given.items()}

    def description(self, sample: int) -> str:
        """Return the phase of a sample in words, and when the next one begins."""
        section, _ = self._find(sample)
        number = self.sections.index(section)
        found = f"phase {number + 1} of {len(self.sections)}: {in_words(section.phase)}"
        if section.end is not None:
            found += f"; the next begins at token {section.end * section.phase.length:,}"
        return found

    def reached(self, end: int) -> Iterator[str]:
        """Yield notes on sources that reach their limit before the sample `end`.

        Raises DataError if no source has samples left before.
        """
        self.require(end - 1)
        for number, section in enumerate(self.sections):
            if section.phase.until is not None:
                continue
            until = min(end, section.end or end) - section.phase.first
            ends = [(section.apportionment.end_of(place), name) for place, name in enumerate(section.names)]
            reached = sorted((after, name) for after, name in ends if after is not None and after < until)
            for after, name in reached[:_SHOWN]:
                token = (section.phase.first + after) * section.phase.length
                yield (
                    f"note: --data-mix-schedule: {name} reaches max_epochs {section.phase.max_epochs[name]:g} at token "
                    f"{token:,}, in phase {number + 1}; from there on the other sources have its share"
                )
            if len(reached) > _SHOWN:
                yield f"note: --data-mix-schedule: so do {len(reached) - _SHOWN} more sources of phase {number + 1}"


def in_words(phase: MixedPhase) -> str:
    """Return the shares of the sources of a phase, the largest first."""
    total = sum(phase.weights.values())
    shares = sorted(((weight / total, name) for name, weight in phase.weights.items()), reverse=True)
    shown = ", ".join(f"{name} {100 * share:.4g} %" for share, name in shares[:_SHOWN])
    return f"{shown} and {len(shares) - _SHOWN} more" if len(shares) > _SHOWN else shown


def _ends(number: int, phase: MixedPhase, capacity: int) -> str:
    return (
        f"--data-mix-schedule: in phase {number + 1}, all sources have reached max_epochs at token "
        f"{(phase.first + capacity) * phase.length:,}: raise max_epochs, add a source, or train for less"
    )
