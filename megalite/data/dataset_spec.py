"""Data of the training, validation and test sets, from the flags: prefixes of token files, weights and shares."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalite.config.data import DataConfig, split_shares
from megalite.data.blend import normalize, parse_blend
from megalite.entry_points import entry_point
from megalite.errors import ConfigurationError, DataError
from megalite.small_files import MIB, parse_json, read_small_file, reason, shown

SPLITS = ("train", "valid", "test")
_LARGEST = 8 * MIB
"""Largest size in bytes of a file with a blend; the paths of ten thousand datasets take about 1 MB."""


@dataclass(frozen=True)
class DatasetSpec:
    """Data of one split: of each prefix, the sequences between the fractions `begin` and `end` of the file."""

    prefixes: list[str]
    weights: list[float] | None
    begin: float = 0.0
    end: float = 1.0

    def sequences(self, count: int) -> range:
        """Return the part of a file of `count` sequences, with Megatron-LM's rounding."""
        return range(round(self.begin * count), round(self.end * count))


def read_dataset_specs(data: DataConfig) -> list[DatasetSpec | None]:
    """Return the data of train, valid and test; None for a split without data.

    Raises:
        ConfigurationError: no data is given, or it is given in more than one way.
        DataError: a blend is not valid, or a file cannot be read.
    """
    data_path: Sequence[str] = data.data_path or data.preference_data
    each: Sequence[Sequence[str]] = (data.train_data_path, data.valid_data_path, data.test_data_path)
    if data.data_mix_schedule is not None and data.divided:
        # In proportion to the sizes of the files, whatever the weights of training are, which may change.
        prefixes = entry_point("mixed_prefixes")(data.data_mix_schedule)
        sizes = [float(os.path.getsize(f"{prefix}.bin")) for prefix in prefixes]
        bounds = parse_split(data.split)[1:]
        return [None, *(DatasetSpec(prefixes, sizes, *share) if share else None for share in bounds)]
    if data.data_mix_schedule is not None:
        return [None, *(_whole(path) if path else None for path in each[1:])]
    if sum(map(bool, (data_path, any(each), data.data_args_path, data.per_split_data_args_path))) != 1:
        raise ConfigurationError(
            "give the data in one way: --data-path or --data-args-path (with --split), --train-data-path with "
            "--valid-data-path and --test-data-path, --per-split-data-args-path, or --mock-data"
        )
    if data.data_args_path:
        data_path = _read("--data-args-path", data.data_args_path).split()
    if data.per_split_data_args_path:
        each = _read_each("--per-split-data-args-path", data.per_split_data_args_path)
    if data_path:
        blend = parse_blend(data_path)
        return [DatasetSpec(*blend, *bounds) if bounds else None for bounds in parse_split(data.split)]
    return [_whole(path) if path else None for path in each]


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """Return the fractions of a file at which train, valid and test begin and end.

    "969, 30, 1" gives (0, 0.969), (0.969, 0.999), (0.999, 1). A share that is missing or 0 gives None.

    Raises:
        ConfigurationError: see `split_shares`.
    """
    bounds: list[float] = [0]
    for share in normalize(split_shares(split)):
        bounds.append(bounds[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(bounds)]


def _whole(path: Sequence[str]) -> DatasetSpec:
    prefixes, weights = parse_blend(path)
    # As in Megatron-LM, the weight of a single prefix is ignored here, but not in --data-path: it changes the number of
    # samples that are drawn, and therefore their order.
    return DatasetSpec(prefixes, None if len(prefixes) == 1 else weights)


def _read(flag: str, path: str) -> str:
    try:
        text = read_small_file(Path(path), largest=_LARGEST).decode("utf-8-sig")  # Windows writes a byte order mark
    except (OSError, ValueError) as error:
        raise DataError(f"{flag} {path} cannot be read: {reason(error)}") from error
    if not text.strip():
        raise DataError(f"{flag} {path} is empty: write prefixes, with weights or without, into it")
    return text


def _read_each(flag: str, path: str) -> tuple[Sequence[str], Sequence[str], Sequence[str]]:
    expected = '{"train": ["0.7", "a_text_document", "0.3", "b_text_document"], "valid": [...], "test": [...]}'
    try:
        blends = parse_json(_read(flag, path))
        unknown = set(blends) - set(SPLITS)
        train, valid, test = ([str(word) for word in _list(blends.get(name))] for name in SPLITS)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{flag} {path} has the wrong form ({error}): expected JSON like {expected}") from error
    if unknown:
        raise DataError(f"{flag} {path} has a key {shown(min(unknown))}: expected JSON like {expected}")
    return train, valid, test


def _list(value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise TypeError(f"{shown(value)} is not a list")
    return value
