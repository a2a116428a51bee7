"""Planted faults: a correct suite fails on wrong code. `make mutants` plants them.

Each mutant changes one piece of text in a copy of the tree and names a test that must then fail. They stand in
ROOM.toml, where ROOM is that of the changed file: its package below megalite/ or megalite/extras/ (`foundations` for
modules without a package), else its top-level folder. tests/unit/test_mutants.py checks that each still finds its
text and its test.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(Path(__file__).parent.glob("*.toml"))


@dataclass(frozen=True)
class Mutant:
    fault: str
    file: str
    old: str
    new: str
    test: str

    def apply(self, root: Path) -> None:
        """Plant the fault in a tree. Raises ValueError where the text is not there exactly once."""
        path = root / self.file
        text = path.read_text()
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.fault}: the text to change occurs {count} times in {self.file}:\n{self.old}")
        path.unlink()  # other trees may have it by a hard link
        path.write_text(text.replace(self.old, self.new))
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            compiled.unlink()


def mutants_of(file: Path) -> list[Mutant]:
    """The mutants of a TOML file, in their order."""
    return [Mutant(**fields) for fields in tomllib.loads(file.read_text())["mutant"]]
