"""Blending datasets by weight: Megatron-LM's greedy rule, to the sample.

Sample i comes from the dataset that is furthest behind its share: argmax over d of `weight_d * max(i, 1) - count_d`,
the first one among equals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from megalite.data.index_cache import IndexCache
from megalite.errors import DataError

Sample = TypeVar("Sample", covariant=True)

# Samples times datasets from which compiling the loop, a second, is worth it.
COMPILE_FROM = 1_000_000


class Dataset(Protocol[Sample]):
    """Samples by number: their tokens, int64 [sequence_length + 1], or their `SampleFields`."""

    def __len__(self) -> int:
        """The number of samples."""

    def __getitem__(self, sample: int) -> Sample:
        """A sample. Raises IndexError where there is no such sample."""


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


class BlendIndex(NamedTuple):
    """Where each sample of a blend comes from.

    Attributes:
        datasets: the dataset of each sample, int16 [size].
        samples: which of that dataset's samples it is, int64 [size].
        counts: samples taken of each dataset, int64 [datasets].
    """

    datasets: np.ndarray
    samples: np.ndarray
    counts: np.ndarray


def build_blend_index(weights: Sequence[float], size: int, limits: Sequence[int] | None = None) -> BlendIndex:
    """The index of a blend of `size` samples.

    Args:
        weights: one a dataset, with sum 1.
        size: samples in the blend.
        limits: samples each dataset has; one that has given all is left out from there on.
    """
    index = BlendIndex(np.empty(size, np.int16), np.empty(size, np.int64), np.zeros(len(weights), np.int64))
    no_limits = np.full(len(weights), np.iinfo(np.int64).max)
    arguments = (np.array(weights), no_limits if limits is None else np.array(limits, np.int64), *index)
    if size * len(weights) < COMPILE_FROM:
        _take_the_furthest_behind(*arguments)
    else:
        import numba  # here: importing it and compiling take a second

        numba.njit(_take_the_furthest_behind)(*arguments)
    return index


def _take_the_furthest_behind(
    weights: np.ndarray, limits: np.ndarray, datasets: np.ndarray, samples: np.ndarray, counts: np.ndarray
) -> None:
    """Fills a `BlendIndex`. Each choice depends on all before it, which leaves a loop, in words that Python and numba
    both know; it is Megatron-LM's arithmetic, operation by operation."""
    for i in range(len(datasets)):
        step = float(max(i, 1))
        chosen, furthest = 0, -np.inf
        for d in range(len(weights)):
            behind = weights[d] * step - counts[d]
            if behind > furthest and counts[d] < limits[d]:
                chosen, furthest = d, behind
        datasets[i], samples[i] = chosen, counts[chosen]
        counts[chosen] += 1


class BlendedDataset(Generic[Sample]):
    """Samples of several datasets by weight.

    Args:
        datasets: what to blend, each with as many samples as its weight takes.
        weights: one a dataset; None for their lengths, each sample then at most once.
        size: samples in the blend.
        cache: keeps the index.
        data_path: data that the index is kept with.

    Raises:
        DataError: the datasets do not hold as many samples.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Sample]],
        weights: Sequence[float] | None,
        size: int,
        cache: IndexCache,
        data_path: str,
    ) -> None:
        if len(datasets) > np.iinfo(np.int16).max:
            raise DataError(f"a blend of {len(datasets)} prefixes: at most 32767, merge some (tools/merge_datasets.py)")
        self.datasets = datasets
        lengths = [len(dataset) for dataset in datasets]
        if weights is None and size > sum(lengths):
            raise DataError(
                f"the run needs {size} samples, but --data-path without weights takes each of its prefixes' "
                f"{sum(lengths)} samples once: give weights (1 prefix_a 1 prefix_b) to repeat data, or train for less"
            )
        shares = normalize(lengths if weights is None else weights)
        limits = lengths if weights is None else None
        index = cache.get(
            data_path,
            {"kind": "blend", "version": 1, "weights": shares, "size": size, "limits": limits},
            lambda: build_blend_index(shares, size, limits)._asdict(),
        )
        self.dataset_index, self.dataset_sample_index = index["datasets"], index["samples"]
        for number, (count, length) in enumerate(zip(index["counts"], lengths, strict=True)):
            if count > length:
                raise DataError(
                    f"the blend takes {count} samples of its dataset {number + 1}, which has {length}: give a larger "
                    "--mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.dataset_index)

    def __getitem__(self, sample: int) -> Sample:
        """A sample of the dataset it comes from."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]
