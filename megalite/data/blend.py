"""Blending of datasets by weight with Megatron-LM's greedy rule, which gives exactly the same samples.

Sample i comes from the dataset with the largest deficit: argmax over d of `weight_d * max(i, 1) - count_d`, the first
one among ties.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from megalite.data.index_cache import Arrays, IndexCache
from megalite.errors import DataError

Sample = TypeVar("Sample", covariant=True)

STRETCHES = 4096
"""Largest number of stretches of a blend that are computed together: enough work for each numpy operation."""
STRETCH = 1024
"""Smallest number of samples in a stretch."""
LEAD = 256
"""Samples before a stretch that are computed to refine the guess of its initial counts."""
_PIECE = 1 << 20
"""Samples that are counted at once, to bound the memory."""
DEFICITS = 1 << 19
"""Largest product of datasets and stretches, to bound the memory."""


class Dataset(Protocol[Sample]):
    """Samples by number, either tokens, int64 [sequence_length + 1], or `SampleFields`."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, sample: int) -> Sample:
        """Return a sample. Raises IndexError if there is no such sample."""


def normalize(weights: Sequence[float]) -> list[float]:
    """Return weights that sum to 1, with Megatron-LM's rounding."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def parse_blend(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Return the prefixes and weights of a `--data-path`: weight and prefix in turn, or only prefixes (weights None).

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
            "every weight positive, or only prefixes"
        )
    return parts[1::2], numbers


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def build_blend_index(weights: Sequence[float], size: int, limits: Sequence[int] | None = None) -> Arrays:
    """Return the source of each sample of a blend of `size` samples.

    Each choice depends on all choices before it. After some samples, however, the counts at the start have no more
    influence. Stretches of the blend are therefore computed together, each from counts that are guessed some samples
    before it. A stretch is computed again if its initial counts differ from the final counts of the stretch before.
    The result therefore always equals that of a simple loop.

    Args:
        weights: one per dataset, with sum 1.
        size: number of samples in the blend.
        limits: number of samples of each dataset; a dataset whose samples are all used is not chosen again.

    Returns:
        datasets: dataset of each sample, int16 [size].
        samples: number of the sample in that dataset, int64 [size].
        counts: number of samples taken from each dataset, int64 [datasets].
    """
    choices = partial(_choices, np.array(weights)[:, None], None if limits is None else np.array(limits)[:, None])
    stretches = max(1, min(size // STRETCH, STRETCHES, DEFICITS // len(weights)))
    length = -(-size // stretches)
    lead = min(LEAD, length)
    starts = np.arange(stretches) * length
    # The rule chooses the dataset with the largest deficit. The counts are therefore likely to be the shares rounded
    # down, and one more for the largest remainders.
    shares = np.array(weights)[:, None] * (starts - lead)
    begins = np.floor(shares)
    ranks = (begins - shares).argsort(axis=0, kind="stable").argsort(axis=0)
    begins += ranks < starts - lead - begins.sum(axis=0)
    for _ in choices(starts - lead, begins, lead):
        pass
    begins[:, 0] = 0
    ends = np.empty_like(begins)
    datasets, samples = np.empty((stretches, length), np.int16), np.empty((stretches, length), np.int64)
    wrong: slice | np.ndarray = slice(None)
    while True:
        counts = begins[:, wrong].copy()
        for place, (chosen, taken) in enumerate(choices(starts[wrong], counts, length)):
            datasets[wrong, place], samples[wrong, place] = chosen, taken
        ends[:, wrong] = counts
        wrong = np.flatnonzero((begins[:, 1:] != ends[:, :-1]).any(axis=0)) + 1
        if len(wrong) == 0:
            break
        begins[:, wrong] = ends[:, wrong - 1]
    flat = datasets.reshape(-1)
    beyond = np.bincount(flat[size:], minlength=len(weights))
    counts = ends[:, -1].astype(np.int64) - beyond
    return {"datasets": flat[:size], "samples": samples.reshape(-1)[:size], "counts": counts}


def _choices(
    weights: np.ndarray, limits: np.ndarray | None, places: np.ndarray, counts: np.ndarray, length: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield, for each of `length` steps, the dataset and its sample at all places, int64 and float64 [places].

    Every step advances all places by one and updates `counts`, with exactly Megatron-LM's floating-point operations.

    Args:
        weights: float64 [datasets, 1].
        limits: int64 [datasets, 1].
        places: samples of the blend before each step, int64 [places].
        counts: samples taken from each dataset, integers in float64 [datasets, places].
        length: number of steps.
    """
    columns = np.arange(len(places))
    behind = np.empty_like(counts)
    for step in range(length):
        np.multiply(weights, np.maximum(places + step, 1), out=behind)
        behind -= counts
        if limits is not None:
            behind[counts >= limits] = -np.inf
        chosen = behind.argmax(axis=0)
        yield chosen, counts[chosen, columns]
        counts[chosen, columns] += 1


class BlendedDataset(Generic[Sample]):
    """Samples of several datasets by weight.

    Args:
        datasets: datasets to blend, each with at least as many samples as the blend takes from it.
        weights: one per dataset; None: in proportion to their lengths, with each sample used at most once.
        size: number of samples in the blend.
        cache: cache for the index.
        prefixes: paths of the datasets; the first one determines where the index is stored.

    Raises:
        DataError: there are too many datasets, or they have too few samples.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[Sample]],
        weights: Sequence[float] | None,
        size: int,
        cache: IndexCache,
        prefixes: Sequence[str],
    ) -> None:
        if len(datasets) > np.iinfo(np.int16).max:
            raise DataError(f"a blend of {len(datasets)} prefixes: at most 32767, merge some (megalite-merge-datasets)")
        self.datasets, self.prefixes = datasets, prefixes
        lengths = [len(dataset) for dataset in datasets]
        if weights is None and size > sum(lengths):
            raise DataError(
                f"the run needs {size} samples, but --data-path without weights uses the {sum(lengths)} samples of "
                "its prefixes once: give weights (1 prefix_a 1 prefix_b) to repeat data, or train for less"
            )
        shares = normalize(lengths if weights is None else weights)
        limits = lengths if weights is None else None
        index = cache.get(
            prefixes[0],
            {"kind": "blend", "version": 1, "weights": shares, "size": size, "limits": limits},
            lambda: build_blend_index(shares, size, limits),
        )
        self.dataset_index, self.dataset_sample_index = index["datasets"], index["samples"]
        for number, (count, length) in enumerate(zip(index["counts"], lengths, strict=True)):
            if count > length:
                raise DataError(
                    f"the blend needs {count} samples of its dataset {number + 1}, which has {length}: give a larger "
                    "--mid-level-dataset-surplus"
                )

    def __len__(self) -> int:
        return len(self.dataset_index)

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first samples are of each dataset."""
        counts = np.zeros(len(self.datasets), np.int64)
        for start in range(0, samples, _PIECE):
            counts += np.bincount(self.dataset_index[start : min(start + _PIECE, samples)], minlength=len(counts))
        found: list[int] = counts.tolist()
        return found

    def __getitem__(self, sample: int) -> Sample:
        """Return a sample. Raises IndexError if there is no such sample."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of a dataset of {len(self)}")
        dataset = self.datasets[int(self.dataset_index[sample])]
        return dataset[int(self.dataset_sample_index[sample])]
