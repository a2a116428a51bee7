"""Reading samples in their shuffled order: a second of CPU time, against joining the same pieces from a numpy.memmap.

    python -m benchmarks.data_access [--samples 20000] [--rounds 9]

A file of 200 million tokens (uint16) in documents of some 1,000, samples of 4,096 tokens. The limit knows where the
pieces of each sample lie and does nothing but slice the map and concatenate, into int64, which a sample is. The rivals
take turns, round by round; a figure is the median over rounds, with quartiles. The loader's one worker also makes
labels, loss masks and positions and stacks micro-batches of 4.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.data_index import random_lengths
from benchmarks.results import write_results
from megalite.data.fields import FieldsDataset
from megalite.data.gpt_dataset import GPTDataset
from megalite.data.index_cache import IndexCache
from megalite.data.indexed_dataset import IndexedDataset, bin_path
from megalite.data.loader import MicroBatchLoader
from megalite.data.sampler import equal_deal
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter

TOKENS, DOCUMENTS, SEQUENCE_LENGTH, MICRO_BATCH = 200_000_000, 200_000, 4096, 4


def write_tokens(prefix: Path) -> None:
    lengths = random_lengths(DOCUMENTS, TOKENS)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.array_split(lengths, 20):
            writer.add_documents(np.random.RandomState(1).randint(0, 50_000, part.sum()), part, np.ones_like(part))
        writer.finish()


def pieces(dataset: GPTDataset, sample: int) -> list[tuple[int, int]]:
    """Return the places of a sample's pieces in the file, counted in tokens."""
    place = int(dataset.shuffle_index[sample])
    (first, start), (last, end) = (map(int, row) for row in dataset.sample_index[place : place + 2])
    found = []
    for position in range(first, last + 1):
        document = int(dataset.document_index[position])
        begin = int(dataset.indexed.sequence_pointers[document]) // 2
        length = int(dataset.indexed.sequence_lengths[document])
        found.append((begin + (start if position == first else 0), begin + (end + 1 if position == last else length)))
    return found


def measure(rivals: dict[str, Callable[[], None]], samples: int, rounds: int) -> dict[str, list[float]]:
    """Lower quartile, median and upper quartile of each rival's samples a CPU second."""
    rates: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            began = time.process_time()
            run()
            rates[name].append(samples / (time.process_time() - began))
    return {name: statistics.quantiles(values, n=4) for name, values in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        prefix = Path(directory) / "tokens"
        write_tokens(prefix)
        indexed = IndexedDataset(prefix)
        dataset = GPTDataset(indexed, range(len(indexed)), None, SEQUENCE_LENGTH, 1, IndexCache())
        tokens = np.memmap(bin_path(prefix), np.uint16, mode="r")
        samples = range(min(arguments.samples, len(dataset)) // MICRO_BATCH * MICRO_BATCH)
        places = [pieces(dataset, sample) for sample in samples]
        loader = MicroBatchLoader(
            FieldsDataset(dataset, eod=0),
            micro_batch_size=MICRO_BATCH,
            vocab_size=50_000,
            num_workers=1,
        )

        def limit() -> None:
            for where in places:
                np.concatenate([tokens[begin:end] for begin, end in where], dtype=np.int64)

        def ours() -> None:
            for sample in samples:
                dataset[sample]

        def loaded() -> None:
            for first in range(0, len(samples) - MICRO_BATCH, MICRO_BATCH):
                loader.micro_batches(first, equal_deal(0, 1, 1))

        for sample in samples[:100]:
            joined = np.concatenate([tokens[begin:end] for begin, end in places[sample]], dtype=np.int64)
            if not np.array_equal(joined, dataset[sample]):
                raise SystemExit("the samples differ")
        with loader:
            rates = measure(
                {"limit": limit, "dataset": ours, "loader, one worker": loaded}, len(samples), arguments.rounds
            )
    for name, (low, median, high) in rates.items():
        share = median / rates["limit"][1]
        print(f"{name:20} {median:9,.0f} samples/s ({low:,.0f} to {high:,.0f}), {share:.2f} of the limit")
    print("written to", write_results("data_access", {"samples a CPU second: quartiles": rates}))


if __name__ == "__main__":
    main()
