"""Fixed-point sums: values on a grid, which fp64 adds exactly, so that no bit depends on the order or on the split.

Every value is rounded once to a multiple of a power of two. A sum of such multiples has no rounding as long as it stays
below 2**53 of them, so the additions that are there (in buffers, in collectives of any algorithm) are those of whole
numbers. What might go beyond becomes infinite, and the step is not applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megalite.errors import MegaliteError
from megalite.parallel.parameter import DenseGradient, Gradient
from megalite.parallel.sharding import Sharding

_BITS = 53
"""Significant bits of fp64."""


@dataclass(frozen=True)
class Grid:
    """Multiples of a power of two, up to which a number of values has an exact sum."""

    quantum: float
    """Distance between neighbours."""
    largest: float
    """Largest absolute value of one of the values."""

    @staticmethod
    def of(exponent: int, values: int) -> Grid:
        """Return the grid of multiples of 2**exponent for the sum of a number of values."""
        return Grid(2.0**exponent, 2.0 ** (_BITS - 1 + exponent - max(values - 1, 0).bit_length()))

    def rounded(self, values: Tensor) -> Tensor:
        """Return the nearest multiples, in fp64. Values that are too large become infinite; NaN remains."""
        multiples = values.to(torch.float64, copy=True).div_(self.quantum).round_().mul_(self.quantum)
        return multiples.masked_fill_((multiples > self.largest) | (multiples < -self.largest), math.inf)


GRADIENT_EXPONENT, LOSS_EXPONENT = -47, -16
"""Exponents of the grids: gradients reach 2**5 in sum, and sums of losses 2**36."""
_USES = 4
"""Most gradients of a parameter in a micro-batch, which are added one by one: those of its uses."""
_ROUNDED_ELEMENTS = 1 << 22
"""Number of elements that are rounded at a time, which takes 17 bytes for each."""


@dataclass(frozen=True)
class FixedPoint:
    """Rounding of all gradients of a run, and of the terms of its loss."""

    micro_batches: int
    """Most micro-batches in a step, over all ranks."""
    dtype: torch.dtype
    """Dtype in which gradients are computed."""

    def require(self, record: Sharding) -> None:
        """Raise MegaliteError if a parameter has more gradients in a micro-batch than are counted on."""
        if (times := sum(use.times for use in record.uses)) > _USES:
            raise MegaliteError(
                f"{record.name} is used {times} times in a micro-batch, and sums in fixed point count on at most "
                f"{_USES}: leave out --bitwise-elastic"
            )

    @cached_property
    def of_gradients(self) -> Grid:
        return Grid.of(GRADIENT_EXPONENT, _USES * self.micro_batches)

    def gradient(self, gradient: Gradient) -> FixedPointGradient:
        return FixedPointGradient(gradient, self.of_gradients, self.dtype)

    def term(self, value: Tensor) -> Tensor:
        """Return the sum of a term of the loss over a micro-batch, rounded."""
        return Grid.of(LOSS_EXPONENT, self.micro_batches).rounded(value)


@dataclass(frozen=True)
class FixedPointGradient(Gradient):
    """Gradient that is computed on its own, and rounded to a grid before it is added."""

    gradient: Gradient
    grid: Grid
    dtype: torch.dtype
    """Dtype in which it is computed."""

    def add_to(self, target: Tensor, *, overwrite: bool) -> None:
        computed = torch.empty(target.shape, dtype=self.dtype, device=target.device)
        self.gradient.add_to(computed, overwrite=True)
        for part, total in zip(
            computed.view(-1).split(_ROUNDED_ELEMENTS), target.view(-1).split(_ROUNDED_ELEMENTS), strict=True
        ):
            DenseGradient(self.grid.rounded(part)).add_to(total, overwrite=overwrite)

    @property
    def kept_bytes(self) -> int | None:
        return self.gradient.kept_bytes
