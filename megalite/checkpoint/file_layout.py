"""Places of boxes in a file: which bytes belong to a box, and which bytes the file's format puts around it.

The layout of a file is a pure function of its parts: the byte range of each box is known before anything is written. A
writer streams `before`, the box's bytes and `after`, box by box.
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
        """Name of the box, in files that name their boxes."""
        return entry(self.name, self.box)


@dataclass(frozen=True)
class ByteRange:
    """Range of a part's bytes in its file."""

    before: bytes
    """Bytes directly in front of the box's bytes, after the previous part."""
    start: int
    stop: int
    """End of bytes [start, stop) of the file, which are the box's elements in row-major order."""
    after: Callable[[int], bytes]
    """Function from the CRC-32 of the box's bytes to the bytes that follow them; the length does not depend on the
    CRC-32."""
