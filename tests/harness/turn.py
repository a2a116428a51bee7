"""Shares of what is too much for every commit: commits take turns, so that any N in a row run all of it."""

from __future__ import annotations

import zlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """Turn `number`, from 1, of `count`. A name always has the same turn, whatever other names there are."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Turn:
        """Read "2/4". Raises ValueError."""
        number, count = map(int, text.split("/"))
        if not 1 <= number <= count:
            raise ValueError(f"turn {number} of {count}: from 1 to {count}")
        return cls(number, count)

    def has(self, name: str) -> bool:
        """Tell whether it is the turn of this name."""
        return zlib.crc32(name.encode()) % self.count == self.number - 1
