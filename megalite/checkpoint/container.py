"""How boxes stand in a file: what of its bytes is theirs, and what the file's format puts around them.

The layout of a file is a pure function of its parts: where each box will stand is known before anything is written, to
whoever knows the parts. A writer streams `before`, the box's bytes and `after`, box by box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megalite.parallel.sharding import Box


def entry(tensor: str, box: Box) -> str:
    """The name of a tensor's box, as in `model/norm@64`."""
    return f"{tensor}@{','.join(map(str, box.offset))}"


@dataclass(frozen=True)
class Part:
    """A box of a global tensor."""

    name: str
    """The tensor's."""
    shape: tuple[int, ...]
    """The whole tensor's."""
    dtype: torch.dtype
    box: Box

    @property
    def size(self) -> int:
        """Bytes."""
        return self.box.numel * self.dtype.itemsize

    @property
    def entry(self) -> str:
        """What the box is called where a file names its boxes."""
        return entry(self.name, self.box)


@dataclass(frozen=True)
class Place:
    """Where the bytes of a part stand in its file."""

    before: bytes
    """What stands in front of them, behind the part before."""
    start: int
    stop: int
    """Bytes [start, stop) of the file, the box's elements in row-major order."""
    after: Callable[[int], bytes]
    """What stands behind them, given their CRC-32; of one length whatever that is."""
