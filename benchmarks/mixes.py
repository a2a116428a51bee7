"""Samples of a mix by schedule beside those of a blend (`--data-path`) of the same files, and the start of both.

    OMP_NUM_THREADS=1 python -m benchmarks.mixes

Samples are read in the order of a run, each with its tokens, in turns of the two; the figures are medians of the
process's CPU time over rounds. The first pass over what is measured is a round that does not count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import write_results
from megalite.config import DataConfig
from megalite.data.datasets import Samples, build_token_datasets
from megalite.data.tokenizers import build_tokenizer
from megalite.extras.mixes.from_flags import ScheduledMix
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter

LENGTH, ROUNDS, TURN = 4096, 11, 2_000
VOCABULARY = 50_000
TOKENS = {50: 4_000_000, 5_000: 100_000}
"""Tokens of each source, by the number of sources."""


def write(folder: Path, sources: int) -> list[str]:
    """Write a token file for each source, of documents of 500 tokens on average. Returns the prefixes."""
    random, prefixes = np.random.RandomState(0), []
    for number in range(sources):
        prefixes.append(str(folder / f"source{number:04}"))
        lengths = random.randint(100, 900, TOKENS[sources] // 500).astype(np.int64)
        with IndexedDatasetWriter(prefixes[-1], np.dtype("<u2")) as writer:
            tokens = random.randint(0, VOCABULARY, int(lengths.sum()))
            writer.add_documents(tokens, lengths, np.ones(len(lengths), np.int64))
            writer.finish()
    return prefixes


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def compare(folder: Path, sources: int) -> dict[str, float]:
    """Print and return the times of both with this many sources."""
    prefixes = write(folder, sources)
    weights = [1 + number % 7 for number in range(sources)]
    mixed = folder / "mix.yaml"
    (folder / "sources").write_text("".join(f"s{number},{prefix}\n" for number, prefix in enumerate(prefixes)))
    (folder / "weights").write_text("".join(f"s{number},{weight}\n" for number, weight in enumerate(weights)))
    mixed.write_text(f"sources: {folder}/sources\nphases:\n  - weights: {folder}/weights\n")
    plain = DataConfig(seq_length=LENGTH, tokenizer_type="NullTokenizer", split="1,0,0")
    tokenizer, samples = build_tokenizer(plain, VOCABULARY), (ROUNDS + 1) * TURN
    path = tuple(word for weight, prefix in zip(weights, prefixes, strict=True) for word in (str(weight), prefix))
    of_blend = DataConfig(seq_length=LENGTH, tokenizer_type="NullTokenizer", split="1,0,0", data_path=path)
    of_mix = DataConfig(seq_length=LENGTH, tokenizer_type="NullTokenizer", split="1,0,0", data_mix_schedule=str(mixed))
    figures, opened = dict[str, float](), dict[str, Any]()
    for name, start in {
        "blend, first start": lambda: build_token_datasets(of_blend, Samples(samples, 0, 0), 1, tokenizer),
        "blend": lambda: build_token_datasets(of_blend, Samples(samples, 0, 0), 1, tokenizer),
        "mix": lambda: ScheduledMix(of_mix, 1, tokenizer),
    }.items():
        began = time.perf_counter()
        opened[name] = start()
        figures[f"start of a {name}, s"] = time.perf_counter() - began
    blend, mix = opened["blend"].train, opened["mix"]
    turns: dict[str, list[float]] = {"blend": [], "mix": []}
    began = time.process_time()
    for sample in range(max(TURN, 2 * sources)):  # every source is touched, and begins its first pass
        mix[sample]
    first = time.process_time() - began
    for turn in range(ROUNDS + 1):
        for name, dataset in (("blend", blend), ("mix", mix)):
            turns[name].append(seconds(lambda d=dataset, t=turn: [d[n] for n in range(t * TURN, (t + 1) * TURN)]))
    for name, times in turns.items():
        quartiles = statistics.quantiles(times[1:], n=4)
        for what, value in zip(("lower quartile", "median", "upper quartile"), quartiles, strict=True):
            figures[f"{name}, us a sample, {what}"] = value / TURN * 1e6
    figures["first samples of the mix, with the orders of all sources, s"] = first
    figures["mix : blend"] = figures["mix, us a sample, median"] / figures["blend, us a sample, median"]
    for name, value in figures.items():
        print(f"{sources:5} sources  {name}: {value:.3f}")
    return figures


def main() -> None:
    """Compare 50 and 5,000 sources."""
    figures = {}
    for sources in TOKENS:
        with tempfile.TemporaryDirectory() as folder:
            figures[f"{sources} sources"] = compare(Path(folder), sources)
    print(f"written to {write_results('mixes', figures)}")


if __name__ == "__main__":
    main()
