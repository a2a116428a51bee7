"""Origin of a sample: the file that it was read from, and its documents there."""

from __future__ import annotations

from typing import Any

import numpy as np

from megalite.data.blend import BlendedDataset
from megalite.data.fields import FieldsDataset
from megalite.data.fill_in_the_middle import FillInTheMiddleDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.loss_weights import WeightedDataset
from megalite.data.sample_source import SampleSource
from megalite.data.sft_dataset import SFTDataset
from megalite.tasks.dataset_task import DatasetTask
from megalite.tasks.gpt_task import GPTTask
from megalite.training.ledger import ranges
from megalite.training.task import Task


def origin(task: Task, sample: int) -> str:
    """Return where a sample of the training data is from, as text; empty where samples have no names."""
    if isinstance(task, GPTTask) and (mix := task.data.mix) is not None:
        return "; ".join(_named("document", numbers, prefix) for prefix, numbers in mix.documents(sample).items())
    if isinstance(task, GPTTask):
        return _of_dataset(task.data.train, sample)
    if isinstance(task, DatasetTask) and isinstance(task.train, SampleSource) and not task.train.is_stream:
        return f"item {task.train.index(sample)} of the dataset"
    return ""


def _of_dataset(dataset: Any, sample: int) -> str:
    """Return the origin of a sample of a dataset, or of those that it is made of."""
    if isinstance(dataset, FieldsDataset | FillInTheMiddleDataset):
        return _of_dataset(dataset.tokens, sample)
    if isinstance(dataset, WeightedDataset):
        return _of_dataset(dataset.samples, sample)
    if isinstance(dataset, BlendedDataset):
        return _of_dataset(
            dataset.datasets[int(dataset.dataset_index[sample])], int(dataset.dataset_sample_index[sample])
        )
    if isinstance(dataset, GPTDataset):
        return _named("document", documents(dataset, sample), dataset.indexed.prefix)
    if isinstance(dataset, SFTDataset):
        conversations = dataset.order[dataset.starts[sample] : dataset.starts[sample + 1]]
        lines = dict.fromkeys((conversations // dataset.file.of_line).tolist())
        return _named("conversation", list(lines), dataset.file.path)
    return ""


def documents(dataset: GPTDataset, sample: int) -> list[int]:
    """Return the documents of the token file that a sample has tokens of, ascending."""
    place = dataset.shuffle_index.item(sample)
    first, last = dataset.sample_index[place : place + 2, 0].tolist()
    sequences = dataset.document_index[first : last + 1]
    found = np.searchsorted(dataset.indexed.document_indices, sequences, side="right") - 1
    return sorted(set(found.tolist()))


def _named(word: str, numbers: list[int], file: str) -> str:
    shown = [str(low) if low == high else f"{low} to {high}" for low, high in ranges(numbers)]
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(shown)} of {file}"
