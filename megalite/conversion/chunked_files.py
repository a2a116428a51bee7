"""Tensors that are stored in chunks: one per rank that saved them, per layer, or per half."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import add

import torch
from torch import Tensor

from megalite.checkpoint.integrity import covers
from megalite.checkpoint.tensors import Kind
from megalite.conversion.mapping import LastTensor
from megalite.errors import CheckpointError
from megalite.parallel.sharding import Box


@dataclass(frozen=True)
class Chunk:
    """Box of a tensor, with a function that reads its values."""

    box: Box
    dtype: torch.dtype
    read: Callable[[], Tensor]
    """Function that returns the values, in the box's shape."""

    def rows_from(self, first: int) -> Chunk:
        """Return the same chunk, moved down by `first` rows."""
        offset, *rest = self.box.offset
        return Chunk(Box((offset + first, *rest), self.box.size), self.dtype, self.read)

    def of_row(self, row: int) -> Chunk:
        """Return the same chunk as a part of row `row` of a tensor with one more axis, its first."""
        box = Box((row, *self.box.offset), (1, *self.box.size))
        return Chunk(box, self.dtype, lambda: self.read().unsqueeze(0))


class ChunkedFiles:
    """Tensors that are assembled from chunks when they are read. Each thread keeps the tensor that it read last."""

    def __init__(self, chunks: Mapping[str, Iterable[Chunk]], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check the chunks. `shapes` has the tensors that are read only up to the given shape, from their beginning.

        Raises CheckpointError if the chunks of a tensor do not contain each of its elements once.
        """
        self._chunks = {name: list(each) for name, each in chunks.items()}
        self._last = LastTensor()
        self.tensors: dict[str, Kind] = {}
        for name, found in self._chunks.items():
            if len({len(chunk.box.size) for chunk in found}) > 1:
                raise CheckpointError(f"the pieces of {name} have different numbers of axes")
            stops = (map(add, chunk.box.offset, chunk.box.size) for chunk in found)
            whole = tuple(max(each) for each in zip(*stops, strict=True))
            if not covers((chunk.box for chunk in found), Box.whole(whole)):
                raise CheckpointError(f"the pieces of {name} {list(whole)} do not have each of its elements once")
            wanted = shapes.get(name, whole)
            fits = len(wanted) == len(whole) and all(a <= b for a, b in zip(wanted, whole, strict=True))
            self.tensors[name] = Kind(wanted if fits else whole, found[0].dtype)

    def tensor(self, name: str) -> Tensor:
        return self._last.get(name, partial(self._whole, name))

    def _whole(self, name: str) -> Tensor:
        kind, chunks = self.tensors[name], self._chunks[name]
        whole = Box.whole(kind.shape)
        if len(chunks) == 1:
            return chunks[0].read()[whole.slices()]
        values = torch.empty(kind.shape, dtype=kind.dtype)
        for chunk in chunks:
            both = chunk.box.intersection(whole)
            if both is not None:
                values[both.slices()] = chunk.read()[both.relative_to(chunk.box).slices()]
        return values
