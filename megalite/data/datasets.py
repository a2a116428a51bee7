"""Training, validation and test datasets of a run, from its flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from megalite.config.data import DataConfig
from megalite.data.blend import BlendedDataset, Dataset, normalize
from megalite.data.dataset_spec import SPLITS, DatasetSpec, read_dataset_specs
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.mock_dataset import MockDataset
from megalite.data.side_file import check_tokenizer, read_side_file
from megalite.data.sources import short_names
from megalite.data.tokenizers import Tokenizer
from megalite.data.verification import Verification
from megalite.errors import ConfigurationError, DataError
from megalite.process.host import raise_open_file_limit
from megalite.process.output import printable

Sample = TypeVar("Sample", covariant=True)


class Samples(NamedTuple):
    """Number of samples that each split needs; 0: the split is not built.

    Attributes:
        valid: None: all, each once.
        evaluation: samples of a single evaluation; the least that the valid split may have if it cannot be repeated.
        set_names: each prefix of the valid split is a set by itself, of `valid` samples, with one of these names; ():
            names are made from the prefixes. None: they are one set.
    """

    train: int
    valid: int | None
    test: int
    evaluation: int = 0
    set_names: Sequence[str] | None = None


def target_samples(
    *,
    train_samples: int,
    train_iters: int,
    global_batch_size: int,
    eval_interval: int,
    eval_iters: int,
    full_validation: bool = False,
    set_names: Sequence[str] | None = None,
) -> Samples:
    """Return Megatron-LM's counts: one validation every `eval_interval` steps and one at the end, and one test.

    Args:
        train_samples: samples to train on.
        train_iters: steps of the run.
        global_batch_size: samples of an evaluation step.
        eval_interval: steps between validations.
        eval_iters: steps of a validation.
        full_validation: a validation reads all samples instead.
        set_names: see `Samples`.
    """
    evaluation = eval_iters * global_batch_size
    valid = None if full_validation else (train_iters // eval_interval + 1) * evaluation
    return Samples(train_samples, valid, evaluation, evaluation, set_names)


class Datasets(NamedTuple, Generic[Sample]):
    """Datasets of a run; None if no samples are needed or no data is given.

    Attributes:
        notes: messages for the user about the data.
        valid_sets: validation sets by name, in place of `valid`.
    """

    train: Dataset[Sample] | None
    valid: Dataset[Sample] | None
    test: Dataset[Sample] | None
    notes: tuple[str, ...] = ()
    valid_sets: Mapping[str, Dataset[Sample]] = MappingProxyType({})


class Source(NamedTuple, Generic[Sample]):
    """File that samples are made from.

    Attributes:
        sequences: number of sequences in the file; they are divided among the splits.
        dataset: function from a range of sequences and a number of samples to a dataset of at least this number of
            samples; None: the samples of one epoch.
    """

    sequences: int
    dataset: Callable[[range, int | None], Dataset[Sample]]


def build_token_datasets(
    data: DataConfig, samples: Samples, seed: int, tokenizer: Tokenizer, verification: Verification | None = None
) -> Datasets[np.ndarray]:
    """Return the datasets of a run on token files; each sample is int64 [sequence_length + 1].

    Args:
        data: the files and the options of their samples.
        samples: number of samples that each split needs.
        seed: seed of the samples' order.
        tokenizer: the tokenizer; it must be the one that is recorded with the data, if one is recorded.
        verification: check to add the files to; the caller begins it after this function returns. None: only the
            indexes are checked, when they are opened.

    Raises:
        ConfigurationError: there is no training data.
        DataError: files are missing, damaged, too small, or made with another tokenizer.
    """
    cache = IndexCache(data.data_cache_path)

    def open_source(prefix: str) -> Source[np.ndarray]:
        record = read_side_file(prefix)
        check_tokenizer(prefix, record, tokenizer.identity())
        indexed = IndexedDataset(prefix, data.mmap_bin_files, check=verification is None)
        if verification is not None:
            verification.add(indexed, record)
        build = partial(GPTDataset, indexed, sequence_length=data.seq_length, seed=seed, cache=cache)
        return Source(len(indexed), build)

    return build_datasets(data, samples, open_source, cache)


def build_mock_datasets(data: DataConfig, samples: Samples, seed: int, tokenizer: Tokenizer) -> Datasets[np.ndarray]:
    """Return datasets of generated samples, which need no files and have no end."""
    train, valid, test = (
        MockDataset(tokenizer.vocab_size, data.seq_length, seed, need, tokenizer.eod, stream) if need else None
        for stream, need in enumerate(samples[:3])
    )
    return Datasets(train, valid, test)


def build_datasets(
    data: DataConfig, samples: Samples, open_source: Callable[[str], Source[Sample]], cache: IndexCache
) -> Datasets[Sample]:
    """Return the datasets of a run from any kind of source; see `build_token_datasets`."""
    raise_open_file_limit()
    parts = read_dataset_specs(data)
    least = (samples.train, samples.evaluation, samples.evaluation)
    sources = {prefix: open_source(prefix) for prefix in sorted({p for part in parts if part for p in part.prefixes})}
    if parts[0] is None and samples.train:
        raise ConfigurationError("there is no training data: give --train-data-path, or a first share in --split")
    if parts[1] is None and (samples.valid is None or samples.set_names is not None):
        raise ConfigurationError(
            "--full-validation and --multiple-validation-sets need validation data: give --valid-data-path, a second "
            'share in --split, or "valid" in the file of --per-split-data-args-path'
        )
    notes = []
    sets: list[Dataset[Sample] | None] = []
    valid_sets: dict[str, Dataset[Sample]] = {}

    def build(part: DatasetSpec, need: int | None, least: int) -> Dataset[Sample]:
        return _build_split(part, need, least, sources, cache, data.mid_level_dataset_surplus)

    for name, part, need, minimum in zip(SPLITS, parts, samples[:3], least, strict=True):
        missing = _missing_share(name, part, sources) if part and need != 0 else None
        if part is None or need == 0 or missing:
            sets.append(None)
        elif name == "valid" and samples.set_names is not None:
            parts_by_name = _each_by_itself(part, samples.set_names, is_divided=data.divided)
            valid_sets = {each: build(single, need, minimum) for each, single in parts_by_name.items()}
            sets.append(None)
        else:
            sets.append(build(part, need, minimum))
        if missing and name != "test":
            raise DataError(missing)
        if missing:  # a note is enough for the test set: the default --split includes one
            notes.append(f"no test at the end of training: {missing}")
    train, valid, test = sets
    return Datasets(train, valid, test, (*notes, *cache.notes), valid_sets)


def _missing_share(name: str, part: DatasetSpec, sources: Mapping[str, Source[Any]]) -> str | None:
    """Return why a split gets no sequence of one of its sources, or None. An empty source is a DataError."""
    for prefix in part.prefixes:
        sequences = sources[prefix].sequences
        if not sequences:
            raise DataError(
                f"{prefix} has no sequence: leave it out of --{name}-data-path, --data-path or the file that names "
                "it, or add documents"
            )
        if not part.sequences(sequences):
            return (
                f"the {name} data would get none of the {sequences} sequences of {prefix}: give {name} a "
                "larger share in --split, or none, or add documents"
            )
    return None


def _each_by_itself(part: DatasetSpec, names: Sequence[str], *, is_divided: bool) -> dict[str, DatasetSpec]:
    """Return the prefixes of the validation data as sets by name. `is_divided`: weights are those of training.

    Raises ConfigurationError if the weights say nothing, or if there is not one name of its own for each set.
    """
    if part.weights is not None and not is_divided:
        raise ConfigurationError(
            "--multiple-validation-sets evaluates each prefix of the validation data by itself, and reads no weights: "
            "give only prefixes"
        )
    names = [printable(name) for name in names or short_names(part.prefixes)]  # records go to other programs
    if len(names) != len(part.prefixes) or len(set(names)) < len(names):
        raise ConfigurationError(
            f"the validation data have {len(part.prefixes)} prefixes, and the sets of --multiple-validation-sets would "
            f"be called {', '.join(names)[:200]}: give each a name of its own by --validation-set-names"
        )
    singles = (replace(part, prefixes=[prefix], weights=None) for prefix in part.prefixes)
    return dict(zip(names, singles, strict=True))


def _build_split(
    part: DatasetSpec,
    need: int | None,
    least: int,
    sources: Mapping[str, Source[Sample]],
    cache: IndexCache,
    surplus: float,
) -> Dataset[Sample]:
    """Build a dataset of `need` samples; None: all, each once. A blend without weights may have fewer, but not below
    `least`.

    Raises ConfigurationError or DataError if a blend has no end, or if one of its sources has no sample at all.
    """

    def build(prefix: str, num_samples: int | None) -> Dataset[Sample]:
        dataset = sources[prefix].dataset(part.sequences(sources[prefix].sequences), num_samples)
        if need is None and not len(dataset):
            raise DataError(
                f"--full-validation has nothing to read of {prefix}: its validation part has fewer tokens than a "
                "sample of --seq-length: give it more, or leave it out"
            )
        return dataset

    if len(part.prefixes) == 1 and (part.weights is None or need is None):
        return build(part.prefixes[0], need)
    if part.weights is None:
        datasets = [build(prefix, None) for prefix in part.prefixes]
        every = sum(map(len, datasets))
        size = every if need is None else max(least, min(need, every))
        return BlendedDataset(datasets, None, size, cache, part.prefixes)
    if need is None:
        raise ConfigurationError(
            "--full-validation reads each sample once, and weights of the validation data say otherwise: give "
            "--multiple-validation-sets, or only prefixes"
        )
    # The blend normalizes the weights once more, as Megatron-LM's does: their last digit can decide between ties.
    weights = normalize(part.weights)
    needs = [math.ceil(math.ceil(need * weight) * (1 + surplus)) for weight in weights]
    datasets = [build(prefix, count) for prefix, count in zip(part.prefixes, needs, strict=True)]
    return BlendedDataset(datasets, weights, need, cache, part.prefixes)
