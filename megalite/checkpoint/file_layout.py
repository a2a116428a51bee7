"""Positions of boxes in a file.

The layout of a file is a pure function of its parts: the byte range of each box is known before anything is written.
For each box, a writer streams `before`, the bytes of the box, and `after`. The format of the file defines `before` and
`after`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megalite.parallel.sharding import Box


def entry(tensor: str, box: Box) -> str:
    """Return the name of a tensor's box, such as `model/norm@64`."""
    return f"{tensor}@{','.join(map(str, box.offset))}"


@dataclass(frozen=True)
class TensorBox:
    """Box of a global tensor."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    box: Box

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.box.numel * self.dtype.itemsize

    @property
    def entry(self) -> str:
        """Name of the box, for formats that name the boxes."""
        return entry(self.name, self.box)


@dataclass(frozen=True)
class ByteRange:
    """Byte range of a part in its file."""

    before: bytes
    """Bytes of the format directly before the bytes of the box."""
    start: int
    stop: int
    """End of the byte range [start, stop) of the file, which has the elements of the box in row-major order."""
    after: Callable[[int], bytes]
    """Function from the CRC-32 of the box's bytes to the bytes that follow them.

    The number of bytes that it returns does not depend on the CRC-32.
    """
