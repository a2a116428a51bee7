"""Sources of tensors: a checkpoint is written from a source, and a network is filled from one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from megalite.parallel.sharding import Box


@dataclass(frozen=True)
class Kind:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

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


class Source(Protocol):
    """Tensors of which any box can be read. Threads may share one."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """Tensors' shapes and dtypes, by name."""

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Copy a box of a tensor into `values`, of the box's shape and any strides, cast to its dtype.

        Raises CheckpointError if it cannot be read.
        """


def numbers_as_numbers(name: str) -> str:
    """Return a key to sort names by, so that `layers.10` comes after `layers.9`."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), name)
