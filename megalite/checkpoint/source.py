"""Sources of tensors, for writing a checkpoint and for filling a network."""

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
    """Set of tensors, any box of which can be read. Threads may share a source."""

    @property
    def tensors(self) -> Mapping[str, Kind]:
        """Tensors' shapes and dtypes, by name."""

    def fill(self, name: str, box: Box, values: Tensor) -> None:
        """Copy a box of a tensor into `values`, cast to the dtype of `values`.

        `values` has the shape of the box, with any strides.

        Raises CheckpointError if it cannot be read.
        """


def numbers_as_numbers(name: str) -> str:
    """Return a sort key for names, such that `layers.10` comes after `layers.9`."""
    return re.sub(r"\d+", lambda number: number[0].zfill(20), name)
