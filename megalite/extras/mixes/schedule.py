"""The file of `--data-mix-schedule`: sources, and from which token on they are mixed with which weights.

    sources:
      web:  {path: data/web_text_document}
      code: {paths: [data/python_text_document, data/rust_text_document]}
      math: {path: data/math_text_document, max_epochs: 4}
    phases:
      - weights: {web: 0.7, code: 0.3}
      - from: 2T
        weights: {web: 0.4, code: 0.3, math: 0.3}

Instead of a mapping, `sources` may be the path of a list with a line `name,prefix` for each token file (a name with
several lines is one source), and `weights` that of a list of lines `name,weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from os.path import realpath
from pathlib import Path
from typing import Any

import yaml

from megalite.config.yaml_file import LimitedLoader, nearest
from megalite.errors import DataError
from megalite.small_files import MIB, read_small_file, reason, shown

_LARGEST = 16 * MIB
"""Largest size of a schedule or a list in bytes: some hundred thousand paths."""
MOST = 2**62
"""More samples or tokens than any run has."""
_LEAST = 1e-12
"""Least share of a source in a phase."""
_COUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:e[0-9]{1,2})?) ?([KMBT]?)", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
MARK = "@"
"""Separates the name of a source from the checksum of its former files, once these have changed."""
_KEYS = {"path", "paths", "max_epochs"}


@dataclass(frozen=True)
class SourceFiles:
    """Token files that are one source.

    Attributes:
        prefixes: their paths, without the suffix.
        max_epochs: most times that the run reads all of them; None: no limit.
    """

    prefixes: tuple[str, ...]
    max_epochs: float | None = None


@dataclass(frozen=True)
class Phase:
    """Weights from a token of the run on: positive, and not yet normalized."""

    first_token: int
    weights: Mapping[str, float]


@dataclass(frozen=True)
class Schedule:
    """Sources by name, and phases in order, of which the first begins at token 0."""

    path: str
    sources: Mapping[str, SourceFiles]
    phases: tuple[Phase, ...]


def read_schedule(path: str) -> Schedule:
    """Return the schedule in a file.

    Raises:
        DataError: the file cannot be read or has a mistake; the message names the line.
    """
    try:
        loader = LimitedLoader(_text(path))
        root = _mapping(loader.get_single_node(), path, "expected sources and phases")
        return _Reader(path, loader).schedule(root)
    except yaml.YAMLError as error:
        raise DataError(f"--data-mix-schedule {path}: not YAML: {' '.join(str(error).split())[:300]}") from error


def mixed_prefixes(path: str) -> list[str]:
    """Return the paths of all files that phases of a schedule read. Raises DataError, as `read_schedule`."""
    schedule = read_schedule(path)
    names = dict.fromkeys(name for phase in schedule.phases for name in phase.weights)
    return [prefix for name in names for prefix in schedule.sources[name].prefixes]


def tokens_of(text: str) -> int:
    """Return a number of tokens: digits with underscores, or a number with K, M, B or T. Raises ValueError."""
    found = _COUNT.fullmatch(text.strip())
    if found is None or len(text) > 40:
        raise ValueError(f"{shown(text)} is no number of tokens: write 2000000, 2_000_000, 2e6 or 2M (K, M, B, T)")
    number, unit = found[1].replace("_", ""), _UNITS[found[2].upper()]
    value = int(number) * unit if number.isdigit() else round(float(number) * unit)
    if value >= MOST:
        raise ValueError(f"{text} tokens are more than any run has")
    return value


def require_shares(weights: Mapping[str, float]) -> None:
    """Raise DataError if a source has too small a share of positive weights."""
    least, total = min(weights, key=lambda name: weights[name]), sum(weights.values())
    if not weights[least] >= _LEAST * total < math.inf:
        raise DataError(f"the weight of {least} is less than {_LEAST:g} of all: leave it out, or give it more")


class _Reader:
    """Reader of the nodes of one file."""

    def __init__(self, path: str, loader: LimitedLoader) -> None:
        self._path, self._loader = path, loader

    def schedule(self, root: Mapping[str, yaml.Node]) -> Schedule:
        """Return the schedule of the root's entries."""
        if unknown := root.keys() - {"sources", "phases"}:
            raise self._error(root[min(unknown)], f"unknown key {shown(min(unknown))}: expected sources and phases")
        for name in ("sources", "phases"):
            if name not in root:
                raise DataError(f"--data-mix-schedule {self._path}: {name} is missing")
        sources = self._sources(root["sources"])
        phases = tuple(self._phases(root["phases"], sources))
        self._check_prefixes(sources)
        return Schedule(self._path, sources, phases)

    def _sources(self, node: yaml.Node) -> dict[str, SourceFiles]:
        """Return the sources of a mapping or of a list."""
        if isinstance(node, yaml.ScalarNode):
            found: dict[str, list[str]] = {}
            for name, prefix, _ in _lines(str(node.value)):
                found.setdefault(name, []).append(prefix)
            listed = {name: SourceFiles(tuple(prefixes)) for name, prefixes in found.items()}
        else:
            entries = self._entries(node, "expected a mapping from the name of each source, or the path of a list")
            listed = {name: self._source(name, body) for name, body in entries.items()}
        if marked := [name for name in listed if MARK in name]:
            raise self._error(node, f"{shown(marked[0])}: names of sources are without {MARK}")
        return listed

    def _source(self, name: str, node: yaml.Node) -> SourceFiles:
        keys = self._entries(node, f"{shown(name)}: expected path or paths, and perhaps max_epochs")
        if unknown := keys.keys() - _KEYS:
            raise self._error(keys[min(unknown)], f"{shown(name)} has an unknown key {shown(min(unknown))}")
        given = [self._value(keys[key]) for key in ("path", "paths") if key in keys]
        prefixes = [given[0]] if len(given) == 1 and isinstance(given[0], str) else given[0] if given else None
        if len(given) != 1 or not isinstance(prefixes, list) or not prefixes or not all(map(_is_text, prefixes)):
            raise self._error(node, f"{shown(name)}: give path: PREFIX, or paths: a list of prefixes")
        epochs = self._number(keys["max_epochs"], f"max_epochs of {name}") if "max_epochs" in keys else None
        return SourceFiles(tuple(prefixes), epochs)

    def _phases(self, node: yaml.Node, sources: Mapping[str, SourceFiles]) -> Iterator[Phase]:
        """Yield the phases, each of which begins behind the one before."""
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self._error(node, "phases: expected a list of entries with from and weights")
        before = -1
        for body in node.value:
            entries = self._entries(body, "expected a phase: from and weights")
            if "weights" not in entries or entries.keys() - {"from", "weights"}:
                raise self._error(body, "a phase has from (a number of tokens) and weights, and nothing else")
            first = self._first_token(entries.get("from"), is_first=before < 0, at=body)
            if first <= before:
                raise self._error(body, f"this phase begins at token {first:,}, but the one before it at {before:,}")
            before = first
            yield Phase(first, self._weights(entries["weights"], sources))

    def _first_token(self, node: yaml.Node | None, *, is_first: bool, at: yaml.Node) -> int:
        if node is None and not is_first:
            raise self._error(at, "from is missing: the number of tokens of the run after which this phase begins")
        try:
            first = 0 if node is None else tokens_of(str(getattr(node, "value", "")))
        except ValueError as error:
            raise self._error(at, f"from: {error}") from error
        if is_first and first:
            raise self._error(at, "the first phase must begin at 0: leave its from out")
        return first

    def _weights(self, node: yaml.Node, sources: Mapping[str, SourceFiles]) -> dict[str, float]:
        """Return the weights of a mapping or of a list, of sources that there are."""
        if isinstance(node, yaml.ScalarNode):
            found = {name: (text, place) for name, text, place in _lines(str(node.value))}
        else:
            entries = self._entries(node, "weights: expected a mapping from names to weights, or the path of a list")
            found = {name: (str(getattr(each, "value", "")), self._place(each)) for name, each in entries.items()}
        weights = {}
        for name, (text, place) in found.items():
            if name not in sources:
                raise DataError(f"{place}: there is no source {shown(name)}{nearest(name, sources)}")
            weights[name] = _positive(text, f"{place}: the weight of {name}", "leave a source out that gives nothing")
        if not weights:
            raise self._error(node, "a phase needs at least one source with a weight")
        try:
            require_shares(weights)
        except DataError as error:
            raise self._error(node, str(error)) from error
        return weights

    def _check_prefixes(self, sources: Mapping[str, SourceFiles]) -> None:
        seen: dict[str, str] = {}
        for name, source in sources.items():
            for prefix in source.prefixes:
                other = seen.setdefault(realpath(prefix), name)
                if other != name or [*map(realpath, source.prefixes)].count(realpath(prefix)) > 1:
                    raise DataError(
                        f"--data-mix-schedule {self._path}: {prefix} is in {other} and {name}: its samples would be "
                        "repeated; name it once"
                    )

    def _number(self, node: yaml.Node, what: str) -> float:
        return _positive(str(getattr(node, "value", "")), f"{self._place(node)}: {what}", "leave it out for no limit")

    def _value(self, node: yaml.Node) -> Any:
        try:
            return self._loader.value_of(node)
        except TypeError as error:
            raise self._error(node, str(error)) from error

    def _entries(self, node: yaml.Node | None, expected: str) -> dict[str, yaml.Node]:
        return _mapping(node, self._path, expected)

    def _place(self, node: yaml.Node) -> str:
        return f"--data-mix-schedule {self._path}, line {node.start_mark.line + 1}"

    def _error(self, node: yaml.Node, what: str) -> DataError:
        return DataError(f"{self._place(node)}: {what}")


def _mapping(node: yaml.Node | None, path: str, expected: str) -> dict[str, yaml.Node]:
    """Return the entries of a mapping. Raises DataError if it is none, or has a key twice."""
    where = f"--data-mix-schedule {path}" + ("" if node is None else f", line {node.start_mark.line + 1}")
    if not isinstance(node, yaml.MappingNode):
        raise DataError(f"{where}: {expected}")
    found: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
        if not name or name in found:
            raise DataError(f"{where}: {f'{shown(name)} is given twice' if name else expected}")
        found[name] = value
    return found


def _lines(path: str) -> Iterator[tuple[str, str, str]]:
    """Yield the two values of each line of a list, and its place. Blank lines and those that begin with # are none."""
    for number, line in enumerate(_text(path).splitlines(), 1):
        if (text := line.strip()) and not text.startswith("#"):
            name, comma, value = map(str.strip, text.partition(","))
            if not (name and comma and value):
                raise DataError(f"{path}, line {number}: expected name,value and found {shown(text)}")
            yield name, value, f"{path}, line {number}"


def _positive(text: str, what: str, otherwise: str) -> float:
    parse: Callable[[str], float] = float
    try:
        value = parse(text)
    except ValueError:
        raise DataError(f"{what} is {shown(text)}, which is no number") from None
    if not 0 < value < math.inf:
        raise DataError(f"{what} is {text}: it must be positive; {otherwise}")
    return value


def _text(path: str) -> str:
    try:
        return read_small_file(Path(path), largest=_LARGEST).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise DataError(f"--data-mix-schedule: {path} cannot be read: {reason(error)}") from error


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
