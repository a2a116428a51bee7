"""A fault that a test plants in a run: what is to happen, where, and when."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """It falls when its rank comes into the phase in that step of its process, or behind it."""

    phase: str
    rank: int
    step: int
    """Of this process, from 1 on; 0 for what comes before the first."""
    kind: str

    def __str__(self) -> str:
        return f"{self.phase}/{self.rank}/{self.step}/{self.kind}"

    @staticmethod
    def read(text: str) -> Fault:
        """As `str` writes it."""
        phase, rank, step, kind = text.split("/")
        return Fault(phase, int(rank), int(step), kind)

    def record(self, folder: Path) -> Path:
        """The file that it leaves there when it falls."""
        return folder / str(self).replace("/", "-")
