"""Fates of the keys in the JSON files of a Hugging Face folder; `folder_keys.toml` lists those that no code reads."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megalite.errors import CheckpointError
from megalite.small_files import shown

_SHOWN = 20


@cache
def _tables() -> dict[str, Any]:
    with Path(__file__).with_suffix(".toml").open("rb") as file:
        return tomllib.load(file)


@dataclass(frozen=True)
class Fates:
    """Fate of each key of a file. A key is in one of the three parts; others are refused as unknown."""

    applied: Set[str]
    no_effect: Mapping[str, str]
    """Keys that change nothing here, with the reason."""
    refused: Mapping[str, str]
    """Keys that are refused unless they are null, with what to do."""

    @classmethod
    def of(cls, file: str, family: str | None = None, applied: Set[str] = frozenset()) -> Fates:
        """Return the fates for a file, the name of a table. `applied`: keys that code reads, beside those listed."""
        table = _tables()[file]
        own = table.get(family, {})

        def by_key(fate: str) -> dict[str, str]:
            lines = [*table.get(fate, {}).items(), *own.get(fate, {}).items()]
            return {key: reason for reason, keys in lines for key in keys.split()}

        return cls(applied | by_key("applied").keys(), by_key("no_effect"), by_key("refused"))

    def problems(self, found: Mapping[str, Any]) -> list[str]:
        """Return a line for each key of a file that is refused."""
        lines = [f"{name}: {why}" for name, why in self.refused.items() if found.get(name) is not None]
        known = {*self.applied, *self.no_effect, *self.refused}
        unknown = [name for name in found if name not in known]
        lines += [f"{name[:80]} is unknown: {shown(found[name])}" for name in unknown[:_SHOWN]]
        return lines + ["(a key without meaning for the network may be deleted)"] * bool(unknown)


def check_keys(path: Path, found: Mapping[str, Any], file: str) -> None:
    """Raise CheckpointError if a file has keys that are refused. `file`: name of its table."""
    if problems := Fates.of(file).problems(found):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{path} has keys that megalite does not apply:\n{lines}")
