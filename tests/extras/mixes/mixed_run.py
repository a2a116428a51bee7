"""A run with a mix, without a network: token files, schedules, and what a checkpoint would keep."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megalite.config import DataConfig
from megalite.config.training import TrainingConfig
from megalite.data.tokenizers import build_tokenizer
from megalite.extras.mixes.from_flags import ScheduledMix
from megalite.preprocessing.indexed_writer import IndexedDatasetWriter
from tests.harness.token_files import add_document

SEED = 5
WHERE = Path("run/iter_0000001")
WHOLE = DataConfig(seq_length=4, tokenizer_type="NullTokenizer", split="1,0,0")
Phases = Sequence[Mapping[str, Any]]


def write_files(folder: Path, tokens: Mapping[str, int], seed: int = 0) -> dict[str, str]:
    """Write a token file for each name, of short documents, in which no two tokens are equal. Returns the prefixes."""
    random, first, prefixes = np.random.RandomState(seed), 0, {}
    for name, count in tokens.items():
        prefixes[name] = str(folder / f"{name}_text_document")
        with IndexedDatasetWriter(prefixes[name], np.dtype("<i4")) as writer:
            left = count
            while left:
                length = min(left, int(random.randint(1, 12)))
                add_document(writer, np.arange(first, first + length))
                first, left = first + length, left - length
            writer.finish()
    return prefixes


@dataclass(frozen=True)
class MixedRun:
    """Options of a run of mixed samples. `at` is the folder of its files."""

    at: Path
    sources: Mapping[str, Any]
    phases: Phases
    length: int = 4
    data: DataConfig = WHOLE

    def open(self) -> ScheduledMix:
        """Open the mix."""
        path = self.at / "mix.yaml"
        path.write_text(yaml.safe_dump({"sources": dict(self.sources), "phases": list(self.phases)}))
        data = replace(self.data, data_mix_schedule=str(path), seq_length=self.length)
        return ScheduledMix(data, SEED, build_tokenizer(data, 10_000_000))

    def checkpoint(self, mix: ScheduledMix) -> dict[str, Any]:
        """Return the configuration that a checkpoint of the run has, as it is read again."""
        config = {"data": asdict(replace(self.data, seq_length=self.length, data_mix_schedule="mix.yaml"))}
        saved: dict[str, Any] = json.loads(json.dumps(config | mix.saved()))
        return saved


def of_blend(data: DataConfig, samples: int) -> dict[str, Any]:
    """Return the configuration that a checkpoint of a run with `--data-path` has."""
    training = TrainingConfig(micro_batch_size=1, global_batch_size=1, train_samples=samples, seed=SEED)
    saved: dict[str, Any] = json.loads(json.dumps({"data": asdict(data), "training": asdict(training)}))
    return saved


def samples_of(mix: ScheduledMix, numbers: range) -> dict[str, list[list[int]]]:
    """Return the inputs of the samples with these numbers, by source, in order."""
    found: dict[str, list[list[int]]] = {name: [] for name in mix.names}
    for number in numbers:
        found[mix.names[mix.of(number)]].append(mix[number][:-1].tolist())
    return found
