"""Blending datasets by weight: Megatron-LM's greedy rule, to the sample.

Sample i comes from the dataset that is furthest behind its share: argmax over d of `weight_d * max(i, 1) - count_d`,
the first one among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megalite.errors import DataError


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, sample: int) -> np.ndarray:
        """The tokens of a sample, int64 [sequence_length + 1]."""


def normalize(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1, rounded as Megatron-LM rounds them."""
    array = np.array(weights, dtype=np.float64)
    normalized: list[float] = (array / np.sum(array)).tolist()
    return normalized


def parse_blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of a `--data-path`: weight and prefix in turn, or prefixes alone (weights None).

    Raises:
        DataError: weights and prefixes are mixed, or a weight is not positive.
    """
    parts = [part.strip() for part in data_path]
    weights = [_number(part) for part in parts[::2]]
    if len(parts) % 2 or all(weight is None for weight in weights):
        return parts, None
    numbers = [weight for weight in weights if weight is not None]
    if len(numbers) != len(weights) or not all(0 < weight < math.inf for weight in numbers):
        raise DataError(
            f"--data-path {' '.join(parts)}: give weight and prefix in turn (30 a_text_document 70 b_text_document), "
            "every weight positive, or prefixes alone"
        )
    return parts[1::2], numbers


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def build_blend_index(
    weights: Sequence[float], size: int, limits: Sequence[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Which dataset each sample comes from, int16 [size], and which of that dataset's samples it is, int64 [size].

    A loop in Python, about a microsecond a sample and two datasets.

    Args:
        weights: one a dataset, with sum 1.
        size: samples in the blend.
        limits: samples each dataset has; one that has given all is left out from there on.
    """
    datasets, samples = np.empty(size, np.int16), np.empty(size, np.int64)
    counts = [0] * len(weights)
    remaining = list(range(len(weights)))
    for i in range(size):
        step = max(i, 1)
        behind = [weights[d] * step - counts[d] for d in remaining]
        chosen = remaining[behind.index(max(behind))]
        datasets[i], samples[i] = chosen, counts[chosen]
        counts[chosen] += 1
        if limits is not None and counts[chosen] == limits[chosen]:
            remaining.remove(chosen)
    return datasets, samples


class BlendedDataset:
    """Samples of several datasets by weight.

    Args:
        datasets: what to blend, each with as many samples as its weight takes.
        weights: one a dataset; None for their lengths, each sample then at most once.
        size: samples in the blend.

    Raises:
        DataError: the datasets do not hold as many samples.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] | None, size: int) -> None:
        self.datasets = datasets
        limits = [len(dataset) for dataset in datasets]
        if weights is None and size > sum(limits):
            raise DataError(
                f"the run needs {size} samples, but --data-path without weights takes each of its prefixes' "
                f"{sum(limits)} samples once: give weights (1 prefix_a 1 prefix_b) to repeat data, or train for less"
            )
        shares = normalize(limits if weights is None else weights)
        self.dataset_index, self.dataset_sample_index = build_blend_index(
            shares, size, limits if weights is None else None
        )

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int) -> np.ndarray:
        """The tokens of a sample, int64 [sequence_length + 1]."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]
