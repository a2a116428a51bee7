"""The ledger of a run with a mix: what phases took of each source, and the proof that nothing is lost or repeated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.sampler import Ranges, sample_at
from megalite.data.side_file import read_side_file
from megalite.errors import CheckpointError, ConfigurationError, DataError, MegaliteError
from megalite.extras.mixes.course import BlendOrder, Part
from megalite.extras.mixes.history import History, SourceRecord, read_history
from megalite.extras.mixes.mix import Mix, in_words
from megalite.extras.mixes.token_source import TokenSource
from megalite.process.output import table
from megalite.small_files import read_small_file
from megalite.storage import AnyPath, open_directory

if TYPE_CHECKING:
    from megalite.config import DataConfig

MOST_PROVED = 1_000_000
"""Most samples of a phase that are looked up one by one, which takes some ten seconds."""


@dataclass(frozen=True)
class Consumed:
    """Record that a checkpoint has of the samples of its run."""

    path: AnyPath
    history: History
    samples: int
    left_out: Ranges
    data: DataConfig

    @property
    def until(self) -> int:
        """Number behind the last sample that was given."""
        return sample_at(self.samples - 1, self.left_out) + 1


def ledger_lines(run: str) -> Iterator[str]:
    """Yield the ledger of a run as lines, from its newest checkpoint, or of one checkpoint.

    Raises CheckpointError, ConfigurationError or DataError if it has none, or if what it says cannot be true.
    """
    found = _consumed(run)
    sources, missing = _opened(found)
    blends = {}
    for name, source in sources.items():
        if (left := source.follow(found.history.sources[name].blend)) is not None:
            blends[name] = left
    mix = Mix(found.history, sources, blends)
    length = found.history.phases[-1].length
    yield f"{found.path}: {found.samples:,} samples of {length:,} tokens, {found.samples * length:,} tokens"
    yield from (f"left out: samples {first:,} to {last:,}" for first, last in found.left_out)
    yield from _decisions(found.path)
    yield ""
    yield from _phases(mix, found.until)
    yield ""
    yield from _table(mix, found.until)
    yield ""
    yield from (f"files that are not here, or have changed: {each}" for each in missing)
    yield proof(mix, found.until, blends, {*sources})


def _consumed(run: str) -> Consumed:
    """Read the newest checkpoint of a run, or the one that is given."""
    from megalite.checkpoint import saved_section
    from megalite.checkpoint.directory import resolve
    from megalite.checkpoint.manifest import read_manifest
    from megalite.config import DataConfig
    from megalite.training.left_out import left_out_of

    path = resolve(open_directory(run))
    manifest = read_manifest(path)
    history = read_history(path, manifest.config)
    if history is None:
        raise ConfigurationError(
            f"--ledger {run}: {path.name} is of a run without --data-mix-schedule, whose samples are those of its flags"
        )
    data = saved_section(path, manifest.config, DataConfig)
    left_out = left_out_of(path, manifest.config)
    return Consumed(path, history, manifest.training.consumed_samples, left_out, data)


def _opened(found: Consumed) -> tuple[dict[str, TokenSource], list[str]]:
    """Return the sources whose files are here and as they were, and a line for each other one."""
    sources, missing, cache = {}, [], IndexCache(found.data.data_cache_path)
    for name, record in found.history.sources.items():
        try:
            files = [IndexedDataset(prefix, found.data.mmap_bin_files) for prefix in record.prefixes]
            sides = [read_side_file(prefix) for prefix in record.prefixes]
            source = TokenSource(name, files, sides, found.history.share, found.history.seed, cache)
        except MegaliteError as error:
            missing.append(f"{name} ({error})")
            continue
        if source.identity() == record.identity:
            sources[name] = source
        else:
            missing.append(f"{name} (its files have changed)")
    return sources, missing


def _decisions(path: AnyPath) -> Iterator[str]:
    """Yield the lines of the run's ledger that are about its data."""
    if not isinstance(path, Path) or not (file := path.parent / "ledger.jsonl").is_file():
        return
    for line in read_small_file(file).decode().splitlines():
        try:
            decision = json.loads(line)
            yield f"step {decision['step']:,}: {decision['kind']}: {decision['why']}"
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{file} has a line that is no decision: {error}") from error


def _phases(mix: Mix, until: int) -> Iterator[str]:
    rows = []
    for number, section in enumerate(mix.sections, 1):
        phase, end = section.phase, section.end
        is_past = phase.until is not None
        stop = end if end is not None and (is_past or end <= until) else until
        given = max(0, stop - phase.first)
        state = f"{given:,}" if is_past or phase.first < until else "to come"
        rows.append([str(number), f"{phase.first * phase.length:,}", f"{phase.length:,}", state, in_words(phase)])
    yield from table(("phase", "from token", "length", "samples", "mix"), rows)


def _table(mix: Mix, until: int) -> Iterator[str]:
    rows, given = [], mix.tokens_until(until)
    for name, record in mix.history.sources.items():
        caps = {phase.max_epochs[name] for phase in mix.history.phases if name in phase.max_epochs}
        cap = f"{max(caps):g}" if caps else ""
        of_blend = f"{mix.blend_tokens(name):,}" if record.blend is not None else ""
        rows.append(
            [name, f"{given[name]:,}", of_blend, f"{record.tokens:,}", f"{given[name] / record.tokens:.4f}", cap]
        )
    yield from table(("source", "tokens given", "to a blend", "tokens of it", "epochs", "at most"), rows)


def proof(mix: Mix, until: int, blends: dict[str, BlendOrder], here: set[str]) -> str:
    """Look every sample up, and check that the parts of each source follow one another without a gap or an overlap.

    Raises DataError if they do not.
    """
    parts: dict[str, list[Part]] = {}
    passed_over: set[str] = set()
    total = 0
    for section in mix.sections:
        phase = section.phase
        stop = min(until, section.end or until) if phase.until is None else phase.until
        if stop - phase.first > MOST_PROVED:
            return f"counted, not looked up one by one: a phase has more than {MOST_PROVED:,} samples"
        numbers = [0] * len(section.names)
        for place in range(max(0, stop - phase.first)):
            source, number = section.apportionment.at(place)
            if number != numbers[source]:
                raise DataError(
                    f"sample {phase.first + place} is number {number} of its source, after {numbers[source]}"
                )
            numbers[source] += 1
            name = section.names[source]
            if name not in here and mix.history.sources[name].blend is not None:
                passed_over.add(name)  # the files are needed for the order that the blend has left
                continue
            given, total = int(section.given[source]) + number * phase.length, total + 1
            parts.setdefault(name, []).extend(mix.courses[name].parts(given))
    for name, each in parts.items():
        _require_each_once(name, each, mix.history.sources[name], blends.get(name))
    others = f", but for those of {', '.join(sorted(passed_over))}" if passed_over else ""
    return (
        f"each of {total:,} samples was looked up{others}: no token of a pass is missing before the next one, or comes "
        "twice"
    )


def _require_each_once(name: str, parts: Sequence[Part], record: SourceRecord, blend: BlendOrder | None) -> None:
    """Raise DataError unless the parts have every token of each pass but the last one once, and of that none twice."""
    bounds = np.array(sorted(parts), np.int64)
    last = int(bounds[-1, 0])
    for number in range(last + 1):
        begins, ends = bounds[bounds[:, 0] == number, 1], bounds[bounds[:, 0] == number, 2]
        wanted = blend.left if blend is not None and number == 0 else record.tokens
        overlaps = bool((begins[1:] < ends[:-1]).any())
        if overlaps or (number < last and int((ends - begins).sum()) != wanted):
            raise DataError(f"pass {number} of {name} {'has tokens twice' if overlaps else 'is not complete'}")
