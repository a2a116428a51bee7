"""Runs as they are recorded in their directories: the lines of metrics.jsonl as columns, decisions, configuration."""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

import yaml

from megalite.config.yaml_file import LimitedLoader
from megalite.errors import CheckpointError, ConfigurationError
from megalite.small_files import LARGEST as LARGEST_CONFIG
from megalite.small_files import reason
from megalite.storage import AnyPath, open_directory, read_small, without_credentials
from megalite.training.facts import LARGEST, Facts, number
from megalite.training.metrics import open_lines, parsed_lines

MOST_LINES = 4_000_000
"""Lines of a file that are read."""
MOST_KEYS = 2000
"""Figures of a run that are read: a name beyond them is left out, and said."""
KINDS = {"valid_loss": "validation", "test_loss": "test", "grad_norm": "steps", "sample": "samples"}
"""Kind of a line by a key that only its kind has."""
LAST_STEP = 2**62
MOST_SAMPLES = 100
"""Texts of a run that are kept: of more, the first, the last, and some between."""
LONGEST_SAMPLE = 4000
"""Characters of a text that are kept."""


@dataclass
class Column:
    """Values of one figure, and the lines of its table that have them."""

    lines: array[int] = field(default_factory=lambda: array("l"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def cut(self, line: int) -> None:
        """Remove the values of this line and of those after it."""
        at = bisect_left(self.lines, line)
        del self.lines[at:], self.values[at:]


class Table:
    """Lines of one kind. Steps increase: a line for a step that is run again replaces those from that step on.

    Attributes:
        steps: the number of the step of each line.
        columns: the other figures, by their keys, in the order of the file.
        left_out: True if the lines have more than `MOST_KEYS` figures.
    """

    def __init__(self) -> None:
        self.steps: array[int] = array("q")
        self.columns: dict[str, Column] = {}
        self.left_out = False

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record. Values that are no numbers are left out."""
        step = record["iteration"]
        if self.steps and step <= self.steps[-1]:
            self._cut(step)
        line = len(self.steps)
        self.steps.append(step)
        columns = self.columns
        for key, value in record.items():
            if type(value) is not float or not -LARGEST < value < LARGEST:
                found = None if key == "iteration" else number(value)
                if found is None:
                    continue
                value = found
            column = columns.get(key)
            if column is None:
                if len(columns) == MOST_KEYS:
                    self.left_out = True
                    continue
                column = columns[key] = Column()
            column.lines.append(line)
            column.values.append(value)

    def _cut(self, step: int) -> None:
        line = bisect_left(self.steps, step)
        del self.steps[line:]
        for column in self.columns.values():
            column.cut(line)

    def last(self, key: str) -> float | None:
        """Return the last value of a figure, or None if there is none."""
        column = self.columns.get(key)
        return column.values[-1] if column is not None and column.values else None

    def values(self, key: str) -> array[float]:
        """Return the values of a figure, without the lines that lack it."""
        column = self.columns.get(key)
        return array("d") if column is None else column.values

    def pairs(self, key: str) -> Iterator[tuple[int, float]]:
        """Yield each step that has the figure, with its value."""
        column = self.columns.get(key)
        if column is not None:
            for line, value in zip(column.lines, column.values, strict=True):
                yield self.steps[line], value


@dataclass(frozen=True)
class Recorded:
    """A run as its directory records it.

    Attributes:
        name: the name of its directory.
        samples: texts that the network has written, each with its step.
        facts: what follows from its records.
        decisions: the lines of its ledger.
        config: its configuration by section.
        finished: whether it is marked as finished.
        problems: what could not be read, as text.
    """

    name: str
    place: str
    steps: Table
    validation: Table
    test: Table
    samples: tuple[tuple[int, str], ...]
    facts: Facts
    decisions: tuple[Mapping[str, Any], ...]
    config: Mapping[str, Any]
    finished: bool
    problems: tuple[str, ...]


def read_run(place: str, metrics: AnyPath | None = None) -> Recorded:
    """Read a run directory, or a metrics file alone. What is damaged or missing is told, and the rest is read.

    Args:
        place: the path or URL of either.
        metrics: the metrics file of a directory; None: metrics.jsonl in it.

    Raises:
        ConfigurationError: there is no such directory or file.
    """
    given = open_directory(place)
    alone = given.is_file()
    if not alone and isinstance(given, Path) and not given.is_dir():
        raise ConfigurationError(f"{place}: there is no such run directory, nor such a file of metrics")
    directory = given.parent if alone else given
    tables = {"steps": Table(), "validation": Table(), "test": Table()}
    problems: list[str] = []
    metrics = given if alone else metrics or given / "metrics.jsonl"
    facts, samples = _read_metrics(metrics, tables, problems)
    return Recorded(
        name=(given if isinstance(given, Path) else Path(given.name)).absolute().name or place,
        place=without_credentials(place),
        **tables,
        samples=tuple(samples),
        facts=facts,
        decisions=() if alone else tuple(_read_decisions(directory / "ledger.jsonl", problems)),
        config={} if alone else _read_config(directory / "config.yaml", problems),
        finished=not alone and _is_there(directory / "DONE"),
        problems=tuple(problems),
    )


def _read_metrics(
    path: AnyPath, tables: Mapping[str, Table], problems: list[str]
) -> tuple[Facts, list[tuple[int, str]]]:
    """Read the lines of metrics into the tables. Returns what follows from them, and the samples of text."""
    facts, samples, damaged = Facts(), list[tuple[int, str]](), 0
    try:
        with open_lines(path) as lines:
            for _, record in islice(parsed_lines(lines, "iteration"), MOST_LINES):
                kind = None if record is None else next((kind for key, kind in KINDS.items() if key in record), None)
                if record is None or kind is None or abs(step := cast(int, record["iteration"])) > LAST_STEP:
                    damaged += 1
                    continue
                if kind == "samples":
                    samples.append((step, str(record["sample"])[:LONGEST_SAMPLE]))
                    if len(samples) == 2 * MOST_SAMPLES:
                        del samples[1:-1:2]
                else:
                    tables[kind].add(record)
                facts.add(record)
            if next(lines, ""):
                problems.append(f"{path} has more than {MOST_LINES:,} lines: those after them are left out")
    except FileNotFoundError:
        problems.append(f"{path} is not there: no step is finished yet")
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {reason(error)}")
    if damaged:
        problems.append(f"{path} has {damaged:,} damaged line{'s' if damaged > 1 else ''}, left out here")
    if any(table.left_out for table in tables.values()):
        problems.append(f"{path} has more than {MOST_KEYS:,} figures: some are left out")
    return facts, samples


def _read_decisions(path: AnyPath, problems: list[str]) -> Iterator[Mapping[str, Any]]:
    try:
        with open_lines(path) as lines:
            found = [record for _, record in islice(parsed_lines(lines, "step"), MOST_LINES) if record is not None]
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {reason(error)}")
        return
    yield from found


def _read_config(path: AnyPath, problems: list[str]) -> Mapping[str, Any]:
    """Return the configuration by section, whatever version has written it; empty if there is none."""
    try:
        text = read_small(path, largest=LARGEST_CONFIG).decode()
        found = LimitedLoader(without_credentials(text)).get_single_data()
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, yaml.YAMLError, CheckpointError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {' '.join(str(error).split())[:300]}")
        return {}
    return {str(key): value for key, value in found.items()} if isinstance(found, dict) else {}


def _is_there(path: AnyPath) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return a configuration as text by "section.field"."""
    found: dict[str, str] = {}
    for section, fields in config.items():
        if isinstance(fields, Mapping):
            found |= {f"{section}.{name}": _text(value) for name, value in fields.items()}
        else:
            found[section] = _text(fields)
    return found


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=str)
    except (TypeError, ValueError, RecursionError):  # a key of another kind, or a list within itself
        return str(value)
