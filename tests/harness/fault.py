"""Fault that a test plants in a run: the kind of fault, the place and the time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    """Fault that occurs when its rank enters the phase in that step of its process, or in a later step."""

    phase: str
    rank: int
    step: int
    """Step of this process, from 1; 0 for the time before the first step."""
    kind: str

    def __str__(self) -> str:
        return f"{self.phase}/{self.rank}/{self.step}/{self.kind}"

    @staticmethod
    def read(text: str) -> Fault:
        """Parse the result of `str`."""
        phase, rank, step, kind = text.split("/")
        return Fault(phase, int(rank), int(step), kind)

    def record(self, folder: Path) -> Path:
        """Return the path of the file that the fault creates when it occurs."""
        return folder / str(self).replace("/", "-")
