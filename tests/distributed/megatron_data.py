"""Samples of Megatron-LM's own datasets (the wheel megatron-core 0.16.1), for the same files, computed on a rank.

The wheel is installed without its dependencies (see the Makefile), and imported only here, in `megatron_rates` and in
`megatron_layout`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

Blend = tuple[list[str], list[float] | None]


class Tokenizer:
    """Tokenizer with the attributes that its datasets use."""

    vocab_size, eod, pad = 1000, 999, -1
    unique_identifiers: dict[str, str] = {}  # noqa: RUF012


@dataclass(frozen=True)
class Case:
    """Data of a run; each path as --data-path takes it: `path` with `split`, or one for each of the three."""

    path: list[str]
    split: str
    each: list[list[str]]
    sizes: list[int | None]
    sequence_length: int
    seed: int
    surplus: float


def samples(case: Case) -> list[np.ndarray | None] | str:
    """Return the tokens of all samples of train, valid and test, [samples, sequence_length + 1], or its error
    message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.utils import get_blend_from_list
    data: dict[str, Any] = {"blend": get_blend_from_list(case.path or None), "split": case.split}
    if case.each:
        data = {"blend_per_split": [get_blend_from_list(path or None) for path in case.each]}
    config = GPTDatasetConfig(
        random_seed=case.seed,
        sequence_length=case.sequence_length,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=case.surplus,
        **data,
    )
    try:
        sets = BlendedMegatronDatasetBuilder(GPTDataset, case.sizes, lambda: True, config).build()
    except (AssertionError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
    return [part and _tokens(part, case.sequence_length) for part in sets]


def _tokens(dataset: Any, sequence_length: int) -> np.ndarray:
    rows = [np.append(dataset[i]["tokens"].numpy(), dataset[i]["labels"][-1].item()) for i in range(len(dataset))]
    return np.array(rows, np.int64).reshape(len(rows), sequence_length + 1)


def blend_index(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Call its compiled loop for a blend with weights."""
    from megatron.core.datasets import helpers

    datasets, places = np.zeros(size, np.int16), np.zeros(size, np.int64)
    helpers.build_blending_indices(datasets, places, weights, len(weights), size, False)
    return datasets, places


def exhaustive_blend_index(sizes: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Call its compiled loop for a blend without weights."""
    from megatron.core.datasets import helpers

    datasets, places = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
    helpers.build_exhaustive_blending_indices(datasets, places, sizes, len(sizes))
    return datasets, places


def batch_sizes(ramp: tuple[int, int, int], final: int, train_samples: int) -> list[tuple[int, int]]:
    """Return the consumed samples before each step and the step's size, while its calculator ramps up the batch
    size."""
    from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator

    calculator = RampupBatchsizeNumMicroBatchesCalculator(final, 1, 1, False, 1, *ramp)
    consumed, steps = 0, []
    while consumed < train_samples:
        calculator.update(consumed, True)
        steps.append((consumed, calculator.get_current_global_batch_size()))
        consumed += steps[-1][1]
    return steps
