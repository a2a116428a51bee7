"""Fates of the keys in the JSON files of a Hugging Face folder; `folder_keys.toml` lists those that no code reads."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from megalite.errors import CheckpointError
from megalite.small_files import shown

_SHOWN = 20
NULL = "null says nothing"


@cache
def _tables() -> dict[str, Any]:
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


@dataclass(frozen=True)
class KeyFate:
    """Fate of a key that a file has."""

    key: str
    kind: Literal["used", "noted", "refused"]
    """`noted`: it is not read, and `why` says why not."""
    why: str


@dataclass(frozen=True)
class Fates:
    """Fate of each key of a file. A key is in one of the three parts; others are refused as unknown."""

    applied: Mapping[str, str]
    """Keys that code reads, with what they are for, if the table says it."""
    no_effect: Mapping[str, str]
    """Keys that change nothing here, with the reason."""
    refused: Mapping[str, str]
    """Keys that are refused unless they are null, with what to do."""

    @classmethod
    def of(cls, file: str, family: str | None = None, applied: Set[str] = frozenset()) -> Fates:
        """Return the fates for a file, a table. `applied`: keys that code reads, whatever the table says."""
        table = _tables()[file]
        own = table.get(family, {})

        def by_key(fate: str) -> dict[str, str]:
            lines = [*table.get(fate, {}).items(), *own.get(fate, {}).items()]
            return {key: reason for reason, keys in lines for key in keys.split()}

        refused = {key: reason for key, reason in by_key("refused").items() if key not in applied}
        return cls(dict.fromkeys(applied, "") | by_key("applied"), by_key("no_effect"), refused)

    def of_keys(self, found: Mapping[str, Any]) -> Iterator[KeyFate]:
        """Yield the fate of each key of a file."""
        for name, value in found.items():
            if name in self.applied:
                yield KeyFate(name, "used", self.applied[name])
            elif name in self.no_effect:
                yield KeyFate(name, "noted", self.no_effect[name])
            elif name in self.refused:
                yield KeyFate(name, "noted", NULL) if value is None else KeyFate(name, "refused", self.refused[name])
            else:
                yield KeyFate(name, "refused", f"is unknown: {shown(value)}")

    def problems(self, found: Mapping[str, Any]) -> list[str]:
        """Return a line for each key of a file that is refused."""
        refused = [fate for fate in self.of_keys(found) if fate.kind == "refused"]
        lines = [f"{fate.key}: {fate.why}" for fate in refused if fate.key in self.refused]
        unknown = [f"{fate.key[:80]} {fate.why}" for fate in refused if fate.key not in self.refused]
        lines += unknown[:_SHOWN]
        return lines + ["(a key without meaning for the network may be deleted)"] * bool(unknown)


def check_keys(path: Path, found: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError if a file has keys that are refused. `file`: name of its table."""
    if problems := Fates.of(file).problems(found):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} has keys that megalite does not apply:\n{lines}")
