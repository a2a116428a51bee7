"""Fixed-point sums: values on a grid, which fp64 adds exactly, so that no bit depends on the order or on the split.

Every value is rounded once to a multiple of a power of two. A sum of such multiples has no rounding as long as it stays
below 2**53 of them, so the additions that are there (in buffers, in collectives of any algorithm) are those of whole
numbers. What might go beyond becomes infinite, and the step is not applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.parallel.parameter import Gradient

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
        return multiples.masked_fill_(multiples.abs() > self.largest, math.inf)


GRADIENT_EXPONENT, LOSS_EXPONENT = -46, -20
"""Exponents of the grids: gradients reach 2**6 in sum, and sums of losses 2**32."""
_USES = 8
"""Most gradients of a parameter in a micro-batch, which are added one by one: those of its uses."""


@dataclass(frozen=True)
class FixedPoint:
    """Rounding of all gradients of a run, and of the terms of its loss."""

    micro_batches: int
    """Most micro-batches in a step, over all ranks."""
    dtype: torch.dtype
    """Dtype in which gradients are computed."""

    def gradient(self, gradient: Gradient) -> FixedPointGradient:
        return FixedPointGradient(gradient, Grid.of(GRADIENT_EXPONENT, _USES * self.micro_batches), self.dtype)

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
        rounded = self.grid.rounded(computed)
        if overwrite:
            target.copy_(rounded)
        else:
            target.add_(rounded)

    @property
    def kept_bytes(self) -> int | None:
        return self.gradient.kept_bytes
