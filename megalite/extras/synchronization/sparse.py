"""Few elements, as they are: the largest, those above a sampled threshold, or random ones.

A receiver gets their values and int32 indices, and zeros elsewhere. An index of `length` marks an entry that is not
used. The values' own dtype travels, so with a ratio of 1 nothing is lost.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.extras.synchronization.compressor import Compressor, Field, finite
from megalite.extras.synchronization.hashing import positions
from megalite_kernels.compression import compact

SAMPLED = 400  # elements of a sample above its threshold: a standard deviation of 5 % in how many pass


@dataclass(frozen=True)
class Sparse(Compressor):
    """Values of some positions.

    Attributes:
        ratio: share of the elements that is sent, above 0 and at most 1.
        dtype: dtype of the gradients, and of the values that are sent.
    """

    ratio: float
    dtype: torch.dtype = torch.float32

    def count(self, length: int) -> int:
        """Return how many of `length` elements are sent, at least 1."""
        return min(max(math.ceil(self.ratio * length), 1), length)

    def fields(self, length: int) -> list[Field]:
        return [(self.count(length), self.dtype), (self.count(length), torch.int32)]

    @abstractmethod
    def choose(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """Return indices, int32 or int64, and values [parts, count]. Indices of a part differ, but for `length`."""

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (kept, indices) = self.allocate(values)
        where, chosen = self.choose(values, key)
        whole = finite(values)
        kept.copy_(torch.where(whole, chosen, math.nan))
        indices.copy_(torch.where(whole, where, torch.arange(where.shape[1], device=values.device)))
        return packed

    def entries(self, packed: Tensor, length: int, key: int) -> tuple[Tensor, Tensor]:
        """Return indices in int64 and values [parts, count] of packed parts."""
        kept, indices = self.views(packed, length)
        return indices.long(), kept

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        indices, kept = self.entries(packed, length, key)
        parts = len(packed)
        # Unused entries of all parts are zeros for the same place behind the last part.
        first = length * torch.arange(parts, device=packed.device)[:, None]
        places = torch.where(indices < length, indices + first, parts * length)
        values = torch.zeros(parts * length + 1, dtype=dtype, device=packed.device)
        values.scatter_(0, places.flatten(), kept.to(dtype).flatten())
        return values[:-1].view(parts, length)

    def sum(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        indices, kept = self.entries(packed, length, key)
        total = torch.zeros(length + 1, dtype=dtype, device=packed.device)
        for where, each in zip(indices, kept, strict=True):  # a rank's indices differ: no order within it
            total.scatter_(0, where, total.gather(0, where) + each.to(dtype))
        return total[:-1]


class TopK(Sparse):
    """The elements of the largest magnitude (arXiv:1809.07599)."""

    def choose(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        indices = values.abs().topk(self.count(values.shape[1]), dim=1, sorted=False).indices
        return indices, values.gather(1, indices)


class Threshold(Sparse):
    """Elements above a threshold that a sample lets about the ratio pass (arXiv:1712.01887).

    If more pass than are sent, the first are sent. A part's last entries are unused if fewer do. Zeros never pass,
    except with a ratio of 1.
    """

    def choose(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        length = values.shape[1]
        count = self.count(length)
        if count == length:
            return compact(values, values.new_zeros(len(values)), count)
        size = min(math.ceil(SAMPLED / self.ratio), length)
        sample = values[:, positions(length, size, key, values.device)].abs()
        above = sample.topk(max(round(self.ratio * size), 1), dim=1, sorted=False).values.amin(1)
        least = torch.nextafter(above.new_zeros(()), above.new_ones(()))
        return compact(values, torch.maximum(above, least), count)


class RandomK(Sparse):
    """Elements at positions drawn from the key (arXiv:1809.07599). The positions do not travel."""

    def fields(self, length: int) -> list[Field]:
        return [(self.count(length), self.dtype)]

    def choose(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        indices = positions(values.shape[1], self.count(values.shape[1]), key, values.device)
        return indices.expand(len(values), -1), values[:, indices]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (kept,) = self.allocate(values)
        kept.copy_(torch.where(finite(values), self.choose(values, key)[1], math.nan))
        return packed

    def entries(self, packed: Tensor, length: int, key: int) -> tuple[Tensor, Tensor]:
        (kept,) = self.views(packed, length)
        return positions(length, self.count(length), key, packed.device).expand(len(packed), -1), kept
