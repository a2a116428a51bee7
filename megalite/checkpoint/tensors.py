"""Tensors by name: their kind, their boxes, sources to read them from, and the positions of boxes in a file.

The layout of a file is a pure function of its parts: the byte range of each box is known before anything is written.
For each box, a writer streams `before`, the bytes of the box, and `after`. The format of the file defines `before` and
`after`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from megalite.optim.replica import Relayout
from megalite.parallel.sharding import Box


@dataclass(frozen=True)
class Kind:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    relayout: Relayout | None = field(default=None, kw_only=True)
    """Rule for the first axis, if that enumerates replicas; None: no axis does."""

    @property
    def whole(self) -> Box:
        """Box of all elements."""
        return Box.whole(self.shape)

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.whole.numel * self.dtype.itemsize


def widest(kinds: Iterable[Kind]) -> torch.dtype:
    """Return the dtype that holds the values of all of these tensors."""
    return reduce(torch.promote_types, (kind.dtype for kind in kinds))


@dataclass(frozen=True)
class TensorBox:
    """Box of a global tensor."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dtype: torch.dtype
    box: Box
    relayout: Relayout | None = field(default=None, kw_only=True)
    """Rule for the first axis, if that enumerates replicas; None: no axis does."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.box.numel * self.dtype.itemsize

    @property
    def entry(self) -> str:
        """Name of the box, such as `model/norm@64`, for messages and for formats that name the boxes."""
        return f"{self.name}@{','.join(map(str, self.box.offset))}"


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


class Source(Protocol):
    """Set of tensors, any box of which can be read. Threads may share a source."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """Tensors' shapes and dtypes, by name."""

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Copy a box of a tensor into `values`, cast to the dtype of `values`.

        `values` has the shape of the box, with any strides.

        Raises CheckpointError if it cannot be read.
        """


Item = TypeVar("Item")


def packed(items: Iterable[Item], size: Callable[[Item], int], most: int) -> list[list[Item]]:
    """Divide the items, in order, into groups of at most this total size. A larger item is a group of its own."""
    groups: list[list[Item]] = []
    room = 0
    for item in items:
        if not groups or size(item) > room:
            groups.append([])
            room = most
        groups[-1].append(item)
        room -= size(item)
    return groups


def natural_order(name: str) -> str:
    """Return a sort key for names, such that `layers.10` comes after `layers.9`."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), name)
