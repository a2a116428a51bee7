"""The mix of a run, from its flags and from the checkpoint that it continues."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from os.path import abspath
from os.path import realpath as _real
from typing import Any

from megalite.config import DataConfig
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mixed import Resumed
from megalite.data.sampler import Ranges, sample_at
from megalite.data.side_file import check_tokenizer, read_side_file
from megalite.data.tokenizers import Tokenizer
from megalite.data.verification import Verification
from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.mixes.blend_past import former_length, read_by_blend, require_share, training_share
from megalite.extras.mixes.history import (
    SECTION,
    History,
    MixedPhase,
    SourceRecord,
    ended,
    joined,
    planned,
    read_history,
)
from megalite.extras.mixes.mix import Mix, in_words
from megalite.extras.mixes.schedule import MARK, read_schedule
from megalite.extras.mixes.token_source import TokenSource
from megalite.process.host import raise_open_file_limit
from megalite.process.output import printable
from megalite.small_files import shown
from megalite.storage import AnyPath


class ScheduledMix(Mix):
    """The samples of a run with `--data-mix-schedule`, by their number: tokens int64 [sequence_length + 1].

    Args:
        data: the options of the data.
        seed: seed of the order of each source.
        tokenizer: the tokenizer; it must be the one that is recorded with the data, if one is recorded.
        verification: check to add the files to; the caller begins it. None: indexes are checked when they are opened.

    Raises:
        DataError: the schedule or a file has a mistake.
    """

    def __init__(
        self, data: DataConfig, seed: int, tokenizer: Tokenizer, verification: Verification | None = None
    ) -> None:
        self._data, self._seed, self._tokenizer = data, seed, tokenizer
        assert data.data_mix_schedule is not None
        raise_open_file_limit()
        self.schedule = read_schedule(data.data_mix_schedule)
        self._cache, self._share = IndexCache(data.data_cache_path), training_share(data)
        used = dict.fromkeys(name for phase in self.schedule.phases for name in phase.weights)
        sources = {name: self._opened(name, self.schedule.sources[name].prefixes, verification) for name in used}
        self._plan = planned(self.schedule, data.seq_length)
        self._records = {name: _record(source) for name, source in sources.items()}
        self._names = [printable(name) for name in sources]  # records go to other programs
        self._numbers = {name: number for number, name in enumerate(sources)}
        super().__init__(History(self._plan, self._records, seed, self._share), sources)

    def _opened(self, name: str, prefixes: Sequence[str], verification: Verification | None) -> TokenSource:
        records = [read_side_file(prefix) for prefix in prefixes]
        files = []
        for prefix, record in zip(prefixes, records, strict=True):
            check_tokenizer(prefix, record, self._tokenizer.identity())
            files.append(IndexedDataset(prefix, self._data.mmap_bin_files, check=verification is None))
            if verification is not None:
                verification.add(files[-1], record)
        return TokenSource(name, files, records, self._share, self._seed, self._cache)

    @property
    def names(self) -> Sequence[str]:
        """Names of the sources of the schedule."""
        return self._names

    def of(self, sample: int) -> int:
        """Return the number of the source of a sample, its place among the names."""
        return self._numbers[self.source_of(sample)]

    def require_phases(self, iterations: str, batch_size: int) -> None:
        """Raise ConfigurationError unless phases begin after these steps of so many samples, separated by commas."""
        flag, tokens = f"--phase-transition-iterations {iterations}", batch_size * self._data.seq_length
        try:
            said = [int(each) * tokens for each in iterations.split(",")]
        except ValueError:
            raise ConfigurationError(f"{flag}: give steps separated by commas, as in 1000,2000") from None
        phases = [phase.first_token for phase in self.schedule.phases[1:]]
        if said != phases:
            raise ConfigurationError(
                f"{flag}: its phases begin at the tokens {shown(said)} with steps of {tokens:,}, and those of "
                f"{self.schedule.path} at {shown(phases)}: make them the same, or leave the flag out"
            )

    def notes(self, end: int) -> tuple[str, ...]:
        """Return notes on what the data until the sample `end` will lack. Raises DataError if they end before."""
        return (*self._cache.notes, *self.reached(end))

    # ------------------------------------------------------------------------------------------------ checkpoints

    def fingerprint(self) -> str:
        """Return a checksum of what decides the samples, wherever their files are."""
        history = self.history
        files = {name: (known.identity, known.tokens, known.blend) for name, known in history.sources.items()}
        phases = [asdict(phase) for phase in history.phases]
        decides = json.dumps([phases, files, history.seed, history.share], sort_keys=True)
        return hashlib.sha256(decides.encode()).hexdigest()

    def saved(self) -> dict[str, Any]:
        """Return the section of a checkpoint's configuration that has the history."""
        return {SECTION: self.history.saved()}

    def resume(self, path: AnyPath, saved: Mapping[str, Any], consumed_samples: int, left_out: Ranges) -> Resumed:
        """Continue from a checkpoint of a mix, of a blend, or of other data; see `MixedSamples.resume`."""
        length, former = self._data.seq_length, former_length(path, saved, self._data.seq_length)
        number, notes = sample_at(consumed_samples - 1, left_out) + 1, []
        following = number if former == length else -(-number * former // length)
        if former != length:
            if left_out:
                raise ConfigurationError(
                    f"--seq-length {length}: the run of {path} has left out samples of {former} tokens "
                    "(--spiky-loss-policy rewind), by numbers which other samples do not have: keep --seq-length "
                    f"{former}"
                )
            notes.append(
                f"samples have {length:,} tokens from here on, and had {former:,}: the next one is number "
                f"{following:,} now, and was {number:,}"
            )
        past = read_history(path, saved)
        if past is None:
            so_far: tuple[MixedPhase, ...] = ()
            begins, records = self._after_blend(path, saved, number)
        else:
            begins, records, so_far = self._after_mix(path, past)
            _require_open(path, so_far, former, number)
        phases = joined(so_far if former == length else ended(so_far, number), self._plan, following)
        left = {name: source.follow(records[name].blend) for name, source in self._sources.items()}
        blends = {name: each for name, each in left.items() if each is not None}
        self.follow(History(phases, records, self._seed, self._share), blends)
        new = [each for each in phases if each.until is None and each not in so_far]
        why = f"{begins}sample {new[0].first:,} is the first of a phase: {in_words(new[0])}" if new else begins or None
        notes += [] if why is None else [why]
        consumed = consumed_samples if former == length else following
        return Resumed(consumed, former, tuple(f"note: data mix: {note}" for note in notes), why)

    def _after_mix(self, path: AnyPath, past: History) -> tuple[str, dict[str, SourceRecord], tuple[MixedPhase, ...]]:
        """Return what is new in words, the sources, and the phases so far, behind samples of a mix."""
        if past.seed != self._seed:
            raise ConfigurationError(
                f"--seed {self._seed}: the sources of {path} were shuffled with {past.seed}, and another seed would "
                "repeat samples and lose others: give the same one"
            )
        require_share(path, past.share, self._share)
        changed = self._changed(past.sources)
        names = {former: _mark(former, past.sources) for former in changed.values()}
        records = {names.get(name, name): record for name, record in past.sources.items()}
        for name, record in self._records.items():
            # A source that only a blend has read so far is named by its path.
            known = records.pop(_real(record.prefixes[0]), None) or records.get(name)
            records[name] = record if known is None else replace(record, blend=known.blend)
        begins = f"changed files of {', '.join(changed)} are read from their beginning; " if changed else ""
        return begins, records, tuple(_renamed(phase, names) for phase in past.phases)

    def _changed(self, sources: Mapping[str, SourceRecord]) -> dict[str, str]:
        """Return the sources whose files have changed, with the names that they had.

        Raises DataError if that is not allowed, or if the files of a source were those of another one.
        """
        changed = {}
        present = [(name, known) for name, known in sources.items() if MARK not in name]
        former = {_real(prefix): name for name, known in present for prefix in known.prefixes}
        same = {(known.identity, known.tokens): name for name, known in present}
        for name, record in self._records.items():
            paths = [_real(prefix) for prefix in record.prefixes]
            other = next((former[path] for path in paths if path in former), name)
            if name not in sources and other == name:
                other = same.get((record.identity, record.tokens), name)
            if other not in (name, paths[0]):
                raise DataError(
                    f"--data-mix-schedule {self.schedule.path}: files of {name} were the source {other} before: keep "
                    "its name and its files, or samples would be repeated"
                )
            known = sources.get(other)
            if known is None or (known.identity, known.tokens) == (record.identity, record.tokens):
                continue
            if not self._data.allow_changed_sources:
                raise DataError(
                    f"the files of the source {name} have changed: {known.tokens:,} tokens with the checksum "
                    f"{known.identity[:8]} before, now {record.tokens:,} with {record.identity[:8]}. Samples would be "
                    "repeated or lost: bring the files back, give the new ones a source of their own, or give "
                    "--allow-changed-sources, with which they are read from their beginning"
                )
            changed[name] = other
        return changed

    def _after_blend(self, path: AnyPath, saved: Mapping[str, Any], number: int) -> tuple[str, dict[str, SourceRecord]]:
        """Return how the mix begins, in words, and the sources, behind samples of a blend or of other data."""
        records, taken = dict(self._records), []
        read = read_by_blend(path, saved, number, self._tokenizer, self._share, self._seed)
        for prefix, (past, file) in read.items():
            name = next((name for name, each in records.items() if prefix in map(_real, each.prefixes)), None)
            if name is None:
                source = TokenSource(prefix, [file], [read_side_file(prefix)], self._share, self._seed, self._cache)
                records[prefix] = replace(_record(source), blend=past)
                continue
            if len(records[name].prefixes) > 1:
                raise DataError(
                    f"--data-mix-schedule {self.schedule.path}: the blend of {path} has read {prefix}, one of the "
                    f"{len(records[name].prefixes)} files of {name}: make it a source of its own, so that none of its "
                    "samples is repeated"
                )
            records[name] = replace(records[name], blend=past)
            taken.append(f"{name} behind its sample {past.consumed:,}")
        begins = f"takes over from a blend ({', '.join(taken)})" if taken else "its sources have not been read before"
        return f"{begins}; ", records


def _require_open(path: AnyPath, phases: Sequence[MixedPhase], length: int, number: int) -> None:
    """Raise CheckpointError unless phases that have not ended have samples of a length, and the sample `number`."""
    going_on = [each for each in phases if each.until is None]
    if not going_on or going_on[0].first > number or any(each.length != length for each in going_on):
        raise CheckpointError(f"{path}: its {SECTION} does not go with its samples: resume from another checkpoint")


def _mark(name: str, sources: Mapping[str, SourceRecord]) -> str:
    """Return a name of its own for a source whose files have changed."""
    marked = f"{name}{MARK}{sources[name].identity[:8]}"
    numbered = (f"{marked}.{number}" for number in itertools.count(2))
    return marked if marked not in sources else next(each for each in numbered if each not in sources)


def _record(source: TokenSource) -> SourceRecord:
    return SourceRecord(tuple(map(abspath, source.prefixes)), source.tokens, source.identity())


def _renamed(phase: MixedPhase, names: Mapping[str, str]) -> MixedPhase:
    """Return a phase whose sources have other names."""
    weights, caps = ({names.get(name, name): each for name, each in found.items()} for found in phase.mix)
    return replace(phase, weights=weights, max_epochs=caps)
