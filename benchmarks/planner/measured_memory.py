"""Memory that Megatron-LM's functional tests measured: each row of measured_memory.csv as a configuration.

The rows are of https://github.com/NVIDIA/Megatron-LM at d98e8a64. `static_bytes` and `peak_bytes` are what the last
rank notes after a step as `mem-allocated-bytes` and `mem-max-allocated-bytes`, in
`tests/functional_tests/test_cases/CASE/golden_values_dev_GPU.json`. `flags` are those of its `model_config.yaml` on
which memory can depend. `gpus` are those of `tests/test_utils/recipes`: a node of 8 for A100 and H100, 2 of 4 for
GB200, or 1 if the name says so. `vocabulary` is the size of the vocabulary, before padding, where it is known.
"""

from __future__ import annotations

import csv
import functools
import shlex
from dataclasses import dataclass
from pathlib import Path

from megalite.config import RunConfig
from megalite.config.parse import parse_arguments
from megalite.config.validate import resolve
from megalite.errors import ConfigurationError

FILE = Path(__file__).with_name("measured_memory.csv")
_RUN = "--tokenizer-type NullTokenizer --mock-data --lr 1e-4 --train-iters 1"


@dataclass(frozen=True)
class Case:
    """Row of the table as a configuration."""

    name: str
    gpu: str
    gpus: int
    flags: tuple[str, ...]
    config: RunConfig
    static: int
    """Measured bytes after a step."""
    peak: int
    """Measured bytes at most during a step."""

    @property
    def of_transformer_engine(self) -> bool:
        """True if the layers are Transformer Engine's."""
        return self.flags[self.flags.index("--transformer-impl") + 1] == "transformer_engine"


def rows() -> list[dict[str, str]]:
    """Return the rows of the table."""
    with FILE.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def measured() -> tuple[tuple[Case, ...], dict[tuple[str, str], str]]:
    """Return all cases, and the reason for each row that is none, by its name and GPU."""
    found, reasons = [], {}
    for row in rows():
        try:
            found.append(_case(row))
        except ConfigurationError as error:
            reasons[row["case"], row["gpu"]] = str(error).splitlines()[0]
    return tuple(found), reasons


def _case(row: dict[str, str]) -> Case:
    flags = tuple(shlex.split(row["flags"]))
    words = [*flags, *_RUN.split()]
    if row["vocabulary"]:
        words += ["--vocab-size", str(int(row["vocabulary"]) - 1)]  # NullTokenizer has one more
    config = parse_arguments(words).config
    if not row["gpus"]:
        raise ConfigurationError("its number of GPUs is not published")
    resolve(config, int(row["gpus"]))
    gpus, static, peak = (int(row[name]) for name in ("gpus", "static_bytes", "peak_bytes"))
    return Case(row["case"], row["gpu"], gpus, flags, config, static, peak)
