"""Two marks in a file in memory, by which a node's agent asks a rank to finish its step, and sees whether it can."""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE = 4096
"""Size in bytes of the page at the start of the file, in which a slot has its header (slot.py)."""
_ASKED, _COMPUTES = PAGE - 2, PAGE - 1
"""Positions of the marks, the last bytes of this page."""


@dataclass(frozen=True)
class Marks:
    """Marks of one rank, which its agent shares with it."""

    descriptor: int

    def clear(self) -> None:
        """Begin a generation. The file gets room for the marks if it has none."""
        if os.fstat(self.descriptor).st_size < PAGE:
            os.ftruncate(self.descriptor, PAGE)
        os.pwrite(self.descriptor, b"\0\0", _ASKED)

    def ask(self) -> None:
        """Ask the rank to keep its gradients, and to go no further: another rank has failed."""
        os.pwrite(self.descriptor, b"\1", _ASKED)

    @property
    def is_asked(self) -> bool:
        """Return whether the agent has asked."""
        return os.pread(self.descriptor, 1, _ASKED) == b"\1"

    def set_computing(self, computing: bool) -> None:
        """Tell whether the rank computes gradients that it could still keep."""
        os.pwrite(self.descriptor, b"\1" if computing else b"\0", _COMPUTES)

    @property
    def is_computing(self) -> bool:
        """Return whether the rank computes gradients that it could still keep."""
        return os.pread(self.descriptor, 1, _COMPUTES) == b"\1"
