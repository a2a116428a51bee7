"""Interface of compressors: gradients as packed bytes of a fixed size, and what a receiver makes of them.

A compressor keeps no state. Whoever calls it adds the residual, values - restored values, to the next gradient (error
feedback, arXiv:1901.09847). All parts are packed by one batch of operations. Nothing waits for a GPU, and the same
input gives the same bytes on every rank. Values may have any scale. If a part has an infinity or a NaN, what is
restored from it is not finite either, so that every rank skips the step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, so that a GPU reads every field of every row in wide accesses
Field = tuple[int, torch.dtype]
"""Number and dtype of consecutive values of a packed part."""


class Compressor(ABC):
    """Method of packing gradients.

    `key` names the step and the bucket. What a method draws at random is a function of it and the same on all ranks.
    """

    @abstractmethod
    def fields(self, length: int) -> Sequence[Field]:
        """Return the fields of a packed part of `length` values, in their order."""

    @abstractmethod
    def pack(self, values: Tensor, key: int) -> Tensor:
        """Pack float [parts, length], length at least 1, into uint8 [parts, packed_bytes(length)]."""

    @abstractmethod
    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        """Return the values [parts, length] of what `pack` made with the same key."""

    def pack_with_residual(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Pack as `pack` does, and return the residual, values - restored values [parts, length], as well."""
        packed = self.pack(values, key)
        return packed, values - self.restore(packed, values.shape[1], values.dtype, key)

    def sum(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        """Return the sum [length] of the same part of all ranks [ranks, packed_bytes(length)], added in their order."""
        total = self.restore(packed[:1], length, dtype, key)
        for rank in range(1, len(packed)):
            total += self.restore(packed[rank : rank + 1], length, dtype, key)
        return total[0]

    def packed_bytes(self, length: int) -> int:
        """Return the bytes of a packed part of `length` values."""
        return sum(_aligned(field) for field in self.fields(length))

    def allocate(self, values: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return memory for the packed parts of [parts, length], with zeros between the fields, and views of these."""
        parts, length = values.shape
        packed = torch.empty(parts, self.packed_bytes(length), dtype=torch.uint8, device=values.device)
        end = 0
        for field in self.fields(length):
            start, end = end, end + _aligned(field)
            packed[:, start + _bytes(field) : end] = 0
        return packed, self.views(packed, length)

    def views(self, packed: Tensor, length: int) -> list[Tensor]:
        """Return the fields of packed parts, each [parts, number of values]."""
        found, start = [], 0
        for field in self.fields(length):
            found.append(packed[:, start : start + _bytes(field)].view(field[1]))
            start += _aligned(field)
        return found


def finite(values: Tensor) -> Tensor:
    """Tell for each part of [parts, length] if all its values are finite, as bool [parts, 1]."""
    return (values.amax(1).isfinite() & values.amin(1).isfinite())[:, None]


def _bytes(field: Field) -> int:
    count, dtype = field
    return count * dtype.itemsize


def _aligned(field: Field) -> int:
    return -(-_bytes(field) // ALIGNMENT) * ALIGNMENT
