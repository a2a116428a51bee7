"""Samples that a run with `--data-path` has read of each of its files, from its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from os.path import realpath
from typing import Any

from megalite.config import DataConfig, TrainingConfig
from megalite.data.blend import BlendedDataset
from megalite.data.dataset_spec import parse_split
from megalite.data.datasets import Samples, build_token_datasets
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.indexed_dataset import IndexedDataset
from megalite.data.tokenizers import Tokenizer
from megalite.errors import CheckpointError, ConfigurationError, DataError
from megalite.extras.mixes.schedule import MOST
from megalite.extras.mixes.token_source import BlendPast
from megalite.storage import AnyPath
from megalite.training.data import training_samples

Share = tuple[float, float]
"""Fractions of a file's sequences between which those of training lie."""


def training_share(data: DataConfig) -> Share:
    """Return the share of each file that is trained on."""
    found = parse_split(data.split)[0] if data.divided else None
    return (0.0, 1.0) if found is None else found


def former_length(path: AnyPath, saved: Mapping[str, Any], length: int) -> int:
    """Return the tokens that a sample had in the run of a checkpoint; `length` if its data were no tokens.

    Raises CheckpointError if its configuration is damaged.
    """
    from megalite.checkpoint import saved_section  # imports torch, and data are opened before

    found = saved_section(path, saved, DataConfig).seq_length if "data" in saved else length
    if not 0 < found < MOST:
        raise CheckpointError(f"{path} has samples of {found} tokens: it is damaged; resume from another checkpoint")
    return found


def require_share(path: AnyPath, former: Share, share: Share) -> None:
    """Raise ConfigurationError if a checkpoint was trained on another share of each file."""
    if former != share:
        raise ConfigurationError(
            f"{path} was trained on the part from {former[0]:g} to {former[1]:g} of each file, and this run would be "
            f"on that from {share[0]:g} to {share[1]:g}: give --split as before, or leave --valid-data-path out"
        )


def read_by_blend(
    path: AnyPath, saved: Mapping[str, Any], samples: int, tokenizer: Tokenizer, share: Share, seed: int
) -> dict[str, tuple[BlendPast, IndexedDataset]]:
    """Return what the first samples of a blend were, by the path of each file; nothing if the run had no blend.

    Args:
        path: the checkpoint, for messages.
        saved: its configuration.
        samples: samples that were given until then.
        tokenizer: the tokenizer of the data.
        share: share of each file that is trained on now, which must be the same.
        seed: the seed now, which must be the same.

    Raises:
        ConfigurationError, DataError: the blend cannot be continued, or its files cannot be read.
    """
    from megalite.checkpoint import saved_section  # imports torch, and data are opened before

    if "data" not in saved or "training" not in saved:
        return {}
    data, training = saved_section(path, saved, DataConfig), saved_section(path, saved, TrainingConfig)
    if data.mock_data or data.sft:
        return {}
    require_share(path, training_share(data), share)
    if training.seed != seed:
        raise ConfigurationError(f"--seed {seed}: the blend of {path} was shuffled with {training.seed}: give the same")
    if not (asked_for := training_samples(training)):
        raise CheckpointError(f"{path} does not say how many samples its blend has: resume from another checkpoint")
    blend = build_token_datasets(data, Samples(asked_for, 0, 0), seed, tokenizer).train
    datasets, read = [blend], [samples]
    if isinstance(blend, BlendedDataset):
        datasets = [*blend.datasets]
        read = blend.counts(samples)
    found: dict[str, tuple[BlendPast, IndexedDataset]] = {}
    for dataset, count in zip(datasets, read, strict=True):
        assert isinstance(dataset, GPTDataset)
        prefix = realpath(dataset.indexed.prefix)
        if prefix in found:
            raise DataError(f"the blend of {path} has {prefix} twice, and cannot be continued: begin with --finetune")
        found[prefix] = BlendPast(dataset.num_samples, count, data.seq_length), dataset.indexed
    return found
