"""Notes on a blend that is another one when a run resumes: which samples come again, and which are passed over.

A blend is a function of its flags: behind n samples, each source is where the changed blend would have it, whatever the
checkpoint's blend has taken of it. Both are opened here, from the cached indices if these are kept, and their counts
are compared.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megalite.checkpoint import saved_section
from megalite.config import DataConfig, RunConfig, TrainingConfig
from megalite.data.blend import BlendedDataset
from megalite.data.datasets import Samples
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.sources import short_names
from megalite.data.tokenizers import Tokenizer
from megalite.data.verification import Verification
from megalite.errors import MegaliteError
from megalite.process.output import printable
from megalite.storage import AnyPath
from megalite.training.data import NOT_OF_THE_SAMPLES, RunData, open_datasets, order_notes, training_samples

Seen = Sequence[Sequence[int]]

_SHOWN = 4
"""Sources that have a line."""
_ADVICE = (
    "note: to avoid this, keep the flags of the data, or give --data-mix-schedule FILE, which continues each source "
    "where it is (docs/mixes.md)"
)


@dataclass(frozen=True)
class _Source:
    """A source of a blend: `given` of its samples come before a position of the blend, and `total` in the whole run."""

    dataset: GPTDataset
    given: int
    total: int


@dataclass(frozen=True)
class _Change:
    """A line on a source, with the number of tokens that come again or are passed over."""

    tokens: int
    line: str


def blend_change_notes(
    path: AnyPath, saved: Mapping[str, Any], config: RunConfig, data: RunData, position: int, seen: Seen
) -> tuple[str, ...] | None:
    """Return notes on what a changed blend repeats and passes over; none if each source goes on where it is.

    Args:
        path: the checkpoint.
        saved: its configuration.
        config: the configuration of this run.
        data: the data of this run.
        position: number of samples of the order that the checkpoint's run had passed.
        seen: samples of that run; see `seen_samples`.

    Returns:
        None if the flags are the same, or if it cannot be told: the data are no token files, or the former ones are no
        longer as they were.
    """
    with suppress(MegaliteError, ValueError):  # a note never ends a run: that on samples that are others remains
        flags, training = saved_section(path, saved, DataConfig), saved_section(path, saved, TrainingConfig)
        former = replace(config, data=flags, training=training)
        if _decides(former) == _decides(config):
            return None
        before = _sources(former, data.tokenizer, position, seen)
        after = _sources(config, data.tokenizer, position)
        if before is None or after is None:
            return None
        seeds = training.seed, config.training.seed
        if _are_moved(before, after, seeds) and not order_notes(data.train, seen):
            return ()
        return _notes(before, after, seeds)
    return None


def _are_moved(before: Mapping[str, _Source], after: Mapping[str, _Source], seeds: tuple[int, int]) -> bool:
    """Tell whether sources have other paths, and nothing else that is known without reading all of them."""
    pairs = list(zip(before.values(), after.values(), strict=False))
    return len(before) == len(after) and all(
        was.given == here.given and not _other_order(was.dataset, here.dataset, seeds) for was, here in pairs
    )


def _decides(config: RunConfig) -> dict[str, Any]:
    """Return what decides which samples training has, and their order."""
    data = {name: value for name, value in asdict(config.data).items() if name not in NOT_OF_THE_SAMPLES}
    return {**data, "seed": config.training.seed, "samples": training_samples(config.training)}


def _sources(config: RunConfig, tokenizer: Tokenizer, position: int, seen: Seen = ()) -> dict[str, _Source] | None:
    """Return the sources of the training data by path, in the order of the flags.

    None if these are not token files, each of them once, or if their blend has not the samples in `seen`. Raises
    MegaliteError if the data cannot be opened.
    """
    if config.data.mock_data or config.data.sft or config.data.preference_data or config.data.data_mix_schedule:
        return None
    samples = Samples(training_samples(config.training), 0, 0)
    opened, (taken, *_) = open_datasets(config, tokenizer, samples, Verification(reads=False))
    if opened.train is None or order_notes(opened.train, seen):
        return None
    datasets, given, total = [taken], [position], [samples.train]
    if isinstance(taken, BlendedDataset):
        datasets = list(taken.datasets)
        given, total = (taken.counts(end) for end in (position, len(taken)))
    found = {
        os.path.realpath(dataset.indexed.prefix): _Source(dataset, *counts)
        for dataset, *counts in zip(datasets, given, total, strict=True)
        if isinstance(dataset, GPTDataset)
    }
    return found if len(found) == len(datasets) else None


def _notes(before: Mapping[str, _Source], after: Mapping[str, _Source], seeds: tuple[int, int]) -> tuple[str, ...]:
    """Return the notes on all sources, the largest changes first; none if nothing is repeated or passed over."""
    names = map(printable, short_names(list(after)))
    changes = [
        change
        for name, (path, source) in zip(names, after.items(), strict=True)
        if (change := _change(name, before.get(path), source, seeds)) is not None
    ]
    if not changes:
        return ()
    changes.sort(key=lambda change: -change.tokens)
    lines = [f"note:   {change.line}" for change in changes[:_SHOWN]]
    if rest := changes[_SHOWN:]:
        tokens = sum(change.tokens for change in rest)
        lines.append(f"note:   and {len(rest)} more source{'s' if len(rest) > 1 else ''} ({tokens:,} tokens)")
    return (
        "note: the data or their order have changed, and sources do not go on where they are:",
        *lines,
        _ADVICE,
    )


def _change(name: str, before: _Source | None, after: _Source, seeds: tuple[int, int]) -> _Change | None:
    """Return what comes again of a source, or is passed over; None if it goes on where it is."""
    length = after.dataset.sequence_length
    known = 0 if before is None else before.given
    if before is not None and (why := _other_order(before.dataset, after.dataset, seeds)):
        tokens = min(known * before.dataset.sequence_length, (after.total - after.given) * length)
        samples = tokens // length
        line = f"{name}: its order is another one ({why}), so up to {samples:,} of its samples may come again"
        return _Change(tokens, f"{line} ({tokens:,} tokens)") if samples else None
    again, passed = range(after.given, min(known, after.total)), range(known, after.given)
    for moved, one, many in ((again, "comes again", "come again"), (passed, "is passed over", "are passed over")):
        tokens = len(moved) * length
        if len(moved) > 1:
            place = f"samples {moved[0]:,} to {moved[-1]:,} of its order {many}"
            return _Change(tokens, f"{name}: {place} ({len(moved):,} samples, {tokens:,} tokens)")
        if moved:
            return _Change(tokens, f"{name}: sample {moved[0]:,} of its order {one} ({tokens:,} tokens)")
    return None


def _other_order(before: GPTDataset, after: GPTDataset, seeds: tuple[int, int]) -> str:
    """Return why a source has other samples, or another order of them, as text; empty if all are the same."""
    if before.sequence_length != after.sequence_length:
        return f"samples of {after.sequence_length:,} tokens, not {before.sequence_length:,}"
    pairs = (before.document_index, after.document_index), (before.shuffle_index, after.shuffle_index)
    if all(np.array_equal(*pair) for pair in pairs):
        return ""
    if seeds[0] != seeds[1]:
        return f"--seed {seeds[1]}, not {seeds[0]}"
    was, here = ((int(each.document_index.min()), int(each.document_index.max())) for each in (before, after))
    if was != here:
        return "another part of its file"
    if before.epochs.count != after.epochs.count:
        return f"drawn for {after.epochs.count} epochs, not {before.epochs.count}"
    return "its last epoch is mixed otherwise"
