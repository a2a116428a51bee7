"""Building the order of a token file's samples: CPU seconds, against megatron-core's functions where it is installed.

    python -m benchmarks.data_index [--tokens 1e9] [--documents 1e6] [--epochs 3] [--rounds 9]

Lengths are drawn at random; no token is read, so the file is its lengths alone. The rivals take turns, round by round;
a figure is the median over rounds, with quartiles. Each rival builds the document index, the sample index and the
shuffle index; the sample index, which is compiled C++ there, is also timed by itself.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import warnings
from collections.abc import Callable

import numpy as np

from benchmarks.results import write_results
from megalite.data.gpt_dataset import (
    Epochs,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)

SEED, SEQUENCE_LENGTH = 1234, 1024
Build = Callable[[], tuple[np.ndarray, ...]]


def random_lengths(documents: int, tokens: int) -> np.ndarray:
    """Lengths of documents, int32, that sum to about `tokens`; spread like those of texts."""
    drawn = np.random.RandomState(SEED).lognormal(sigma=1.2, size=documents)
    return np.maximum(1, drawn * tokens / drawn.sum()).astype(np.int32)


def ours(lengths: np.ndarray, epochs: Epochs) -> Build:
    def build() -> tuple[np.ndarray, ...]:
        random = np.random.RandomState(SEED)
        document_index = build_document_index(range(len(lengths)), epochs, random)
        sample_index = build_sample_index(lengths[document_index], epochs.samples, SEQUENCE_LENGTH)
        return document_index, sample_index, build_shuffle_index(epochs, random)

    return build


def theirs(lengths: np.ndarray, epochs: Epochs) -> Build:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import gpt_dataset, helpers

    def build() -> tuple[np.ndarray, ...]:
        random, apart = np.random.RandomState(SEED), epochs.samples_before_last is not None
        documents = np.arange(len(lengths), dtype=np.int32)
        document_index = gpt_dataset._build_document_index(documents, epochs.count, random, apart)
        sample_index = helpers.build_sample_idx(
            lengths, document_index, SEQUENCE_LENGTH, epochs.count, int(lengths.sum(dtype=np.int64)), True, 1
        )
        first = epochs.samples_before_last if apart else epochs.samples
        return document_index, sample_index, gpt_dataset._build_shuffle_index(first, epochs.samples, random)

    return build


def theirs_sample_index(lengths: np.ndarray, epochs: Epochs, document_index: np.ndarray) -> Build:
    from megatron.core.datasets import helpers

    tokens = int(lengths.sum(dtype=np.int64))
    return lambda: (helpers.build_sample_idx(lengths, document_index, SEQUENCE_LENGTH, epochs.count, tokens, True, 1),)


def measure(rivals: dict[str, Build], rounds: int) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile of each rival's seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, build in rivals.items():
            gc.collect()
            began = time.process_time()
            build()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.quantiles(taken, n=4) for name, taken in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=float, default=1e9)
    parser.add_argument("--documents", type=float, default=1e6)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()

    results: dict[str, dict[str, list[float]]] = {}
    for share in (0.1, 0.3, 1.0):
        tokens, documents = int(arguments.tokens * share), int(arguments.documents * share)
        lengths = random_lengths(documents, tokens)
        total = int(lengths.sum(dtype=np.int64))
        epochs = plan_epochs(total, (arguments.epochs * total - 1) // SEQUENCE_LENGTH, SEQUENCE_LENGTH)
        built = ours(lengths, epochs)()
        rivals: dict[str, Build] = {
            "all indices": ours(lengths, epochs),
            "sample index": lambda lengths=lengths, epochs=epochs, order=built[0]: (
                build_sample_index(lengths[order], epochs.samples, SEQUENCE_LENGTH),
            ),
        }
        try:
            expected = theirs(lengths, epochs)()
        except ModuleNotFoundError:
            print("megatron-core is not installed: no comparison (pip install --no-deps megatron-core==0.16.1)")
        else:
            if not all(np.array_equal(a, b) for a, b in zip(built, expected, strict=True)):
                raise SystemExit("the indices differ")
            rivals["all indices, megatron-core"] = theirs(lengths, epochs)
            rivals["sample index, megatron-core"] = theirs_sample_index(lengths, epochs, built[0])
        name = f"{documents:,} documents, {total:,} tokens, {epochs.count} epochs, {epochs.samples:,} samples"
        results[name] = measure(rivals, arguments.rounds)
        print(name)
        for rival, (low, median, high) in results[name].items():
            ours_median = results[name][rival.split(",")[0]][1]
            print(f"  {rival:28} {median:7.3f} s ({low:.3f} to {high:.3f}), {median / ours_median:.2f} of ours")
    print("written to", write_results("data_index", {"seconds: quartiles": results}))


if __name__ == "__main__":
    main()
