"""The training, validation and test sets of a run, from its flags."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.data.blend import BlendedDataset, Dataset, normalize, parse_blend
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mock_dataset import MockDataset
from megalite.data.side_file import check_tokenizer
from megalite.data.tokenizers import Tokenizer
from megalite.errors import ConfigurationError, DataError

SPLITS = ("train", "valid", "test")
# What Megatron-LM draws from each dataset of a blend beyond its share (--mid-level-dataset-surplus).
SURPLUS = 0.005


@dataclass(frozen=True)
class Samples:
    """How many samples each split needs; 0 leaves it out."""

    train: int
    valid: int
    test: int


def target_samples(
    *,
    train_samples: int | None,
    train_iters: int,
    global_batch_size: int,
    eval_interval: int | None,
    eval_iters: int,
) -> Samples:
    """Megatron-LM's counts: one validation every `eval_interval` steps and one at the end, one test.

    Args:
        train_samples: samples to train on where the run is given by samples; else None.
        train_iters: steps of the run, also where it is given by samples.
        global_batch_size: samples a step, also of an evaluation step.
        eval_interval: steps between validations; None for none.
        eval_iters: steps of a validation.
    """
    validations = 0 if eval_interval is None else train_iters // eval_interval + 1
    return Samples(
        train=train_iters * global_batch_size if train_samples is None else train_samples,
        valid=validations * eval_iters * global_batch_size,
        test=eval_iters * global_batch_size,
    )


def parse_split(split: str) -> list[tuple[float, float] | None]:
    """The shares of the file that train, valid and test are, as fractions where each begins and ends.

    "969, 30, 1" gives (0, 0.969), (0.969, 0.999), (0.999, 1); what is left out or 0 gives None.

    Raises:
        ConfigurationError: there are no, too many, or only zero shares.
    """
    shares = [float(share) for share in re.findall(r"\d+\.?\d*|\.\d+", split)]
    if not 1 <= len(shares) <= len(SPLITS) or sum(shares) == 0 or re.search(r"[^\d.,\s]", split):
        raise ConfigurationError(f"--split {split!r}: give one to three shares for train, valid, test, as in 969,30,1")
    bounds: list[float] = [0]
    for share in normalize(shares + [0.0] * (len(SPLITS) - len(shares))):
        bounds.append(bounds[-1] + share)
    return [(begin, end) if end > begin else None for begin, end in itertools.pairwise(bounds)]


def build_datasets(
    *,
    samples: Samples,
    sequence_length: int,
    seed: int,
    tokenizer: Tokenizer,
    data_path: Sequence[str] | None = None,
    split: str = "969, 30, 1",
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    mock_data: bool = False,
    mmap_bin_files: bool = True,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The datasets for train, valid and test; None where no samples are needed or no data is given.

    Args:
        samples: how many samples each needs.
        sequence_length: tokens the model sees in a sample.
        seed: seed of the samples' order.
        tokenizer: must be the one the data was made with, where that is recorded.
        data_path: one prefix, weights and prefixes in turn, or prefixes; divided by `split`.
        split: shares of train, valid and test.
        train_data_path, valid_data_path, test_data_path: instead of `data_path`, each a split of its own.
        mock_data: no files, `MockDataset`.
        mmap_bin_files: see `IndexedDataset`.

    Raises:
        ConfigurationError: no data is given, or in two ways.
        DataError: files are missing, damaged, too small, or of another tokenizer.
    """
    if sum([bool(data_path), any((train_data_path, valid_data_path, test_data_path)), mock_data]) != 1:
        raise ConfigurationError(
            "give the data in one way: --data-path (with --split), --train-data-path with --valid-data-path and "
            "--test-data-path, or --mock-data"
        )
    needs = (samples.train, samples.valid, samples.test)
    if mock_data:
        mock = [
            MockDataset(tokenizer.vocab_size, sequence_length, seed, need, tokenizer.eod, stream) if need else None
            for stream, need in enumerate(needs)
        ]
        return mock[0], mock[1], mock[2]
    parts: list[Part | None]
    if data_path:
        blend = parse_blend(data_path)
        parts = [Part(*blend, *bounds) if bounds else None for bounds in parse_split(split)]
    else:
        parts = [_whole(path) if path else None for path in (train_data_path, valid_data_path, test_data_path)]
    prefixes = {prefix for part in parts if part for prefix in part.prefixes}
    indexed = {prefix: _open(prefix, tokenizer, mmap_bin_files) for prefix in sorted(prefixes)}
    train, valid, test = (
        _build_split(name, part, need, indexed, sequence_length, seed) if part and need else None
        for name, part, need in zip(SPLITS, parts, needs, strict=True)
    )
    if train is None and samples.train:
        raise ConfigurationError("there is no training data: give --train-data-path, or a first share in --split")
    return train, valid, test


@dataclass(frozen=True)
class Part:
    """What one split is made of: the sequences from `begin` to `end`, as fractions, of each prefix."""

    prefixes: list[str]
    weights: list[float] | None
    begin: float
    end: float

    def sequences(self, count: int) -> range:
        """The part of a file of `count` sequences, rounded as Megatron-LM rounds it."""
        return range(round(self.begin * count), round(self.end * count))


def _whole(path: Sequence[str]) -> Part:
    prefixes, weights = parse_blend(path)
    # As in Megatron-LM, where the weight of a lone prefix counts in --data-path and not here: it changes how many
    # samples are drawn, and with that the order.
    return Part(prefixes, None if len(prefixes) == 1 else weights, 0.0, 1.0)


def _open(prefix: str, tokenizer: Tokenizer, mmap: bool) -> IndexedDataset:
    check_tokenizer(prefix, tokenizer.identity())
    return IndexedDataset(prefix, mmap)


def _build_split(
    name: str, part: Part, samples: int, indexed: dict[str, IndexedDataset], sequence_length: int, seed: int
) -> Dataset:
    def build(prefix: str, samples: int | None) -> GPTDataset:
        sequences = part.sequences(len(indexed[prefix]))
        if not sequences:
            raise DataError(
                f"the {name} data would be none of the {len(indexed[prefix])} sequences of {prefix}: give {name} a "
                "larger share in --split, or none, or add documents"
            )
        return GPTDataset(indexed[prefix], sequences, samples, sequence_length, seed)

    if part.weights is None:
        if len(part.prefixes) == 1:
            return build(part.prefixes[0], samples)
        return BlendedDataset([build(prefix, None) for prefix in part.prefixes], None, samples)
    weights = normalize(part.weights)
    needs = [math.ceil(math.ceil(samples * weight) * (1 + SURPLUS)) for weight in weights]
    datasets = [build(prefix, need) for prefix, need in zip(part.prefixes, needs, strict=True)]
    return BlendedDataset(datasets, weights, samples)
