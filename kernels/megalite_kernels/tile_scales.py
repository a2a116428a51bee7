"""Tiles, and how their scales follow from the largest magnitudes that they cover."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megalite_kernels.recipes import Recipe

LEAST_INNER = 2.0**-6
"""Smallest e4m3 scale. Those below have fewer bits, and what they quantize would get others when quantized again."""
LARGEST_INNER = 448.0
LEAST_OUTER = 2.0**-120
"""Smallest scale of a row: the inverse of both levels together is a number of fp32."""
GREATEST = torch.finfo(torch.float32).max


class Tiles(NamedTuple):
    """One operand of a product whose contraction runs along the columns. A scale is for a part of a row, or for all.

    Attributes:
        codes: [rows, columns], of the format's dtype; of e2m1, uint8 with one code each.
        scales: a scalar (tensorwise), or [rows, blocks].
        outer: fp32 [rows]; None with one level of scales.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor | None = None

    def scales_of_rows(self, block: int) -> Tensor:
        """Return the scales of each row, [rows, blocks], or the only one."""
        return self.scales


class Squares(Tiles):
    """Tiles of a weight, whose scales, [blocks of rows, blocks], are for as many rows as columns."""

    def scales_of_rows(self, block: int) -> Tensor:
        """See `Tiles`."""
        return self.scales.repeat_interleave(block, 0)[: len(self.codes)]


class WeightTiles(NamedTuple):
    """A weight [out, in] for the product of the forward, and [in, out] for the one of its input's gradient.

    Of several matrices, one is below the other in each. A square has rows of one matrix.
    """

    forward: Tiles
    backward: Tiles


def scales_of(top: Tensor, recipe: Recipe, largest_code: float) -> tuple[Tensor, Tensor]:
    """Return the scales of maxima, and what values are multiplied with: fp32 of the maxima's shape.

    - quotient: the factor is largest code / maximum, and the scale its inverse, each rounded to fp32.
    - ceiling: the factor is the largest power of two up to that quotient, so that no code saturates.
    - floor: the scale is the power of two of the maximum over the one of the largest code, at least 2^-127.

    A maximum of zero has the factor 1 (floor: 2^127). One that is not finite has the scale NaN and the factor 0.
    """
    finite = top < math.inf
    if recipe.scaling == "floor":
        exponent = math.frexp(largest_code)[1] - 1
        field = ((top.view(torch.int32) >> 23) - exponent).clamp(min=0)
        factors = ((254 - field) << 23).view(torch.float32)
    else:
        # The dividend is a tensor: on a GPU, torch divides a Python number by multiplying with an inverse.
        factors = torch.where(top > 0.0, (torch.full_like(top, largest_code) / top).clamp(max=GREATEST), 1.0)
        if recipe.scaling == "ceiling":
            factors = (factors.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(finite, 1.0 / factors, math.nan), torch.where(finite, factors, 0.0)


def outer_scales(top: Tensor, largest_code: float) -> Tensor:
    """Return the scales of rows: the maximum over the largest code with the largest scale of a tile."""
    found = (top / torch.full_like(top, largest_code * LARGEST_INNER)).clamp(min=LEAST_OUTER)
    return torch.where(top < math.inf, found, math.nan)


def inner_scales(tops: Tensor, outer: Tensor, largest_code: float) -> tuple[Tensor, Tensor]:
    """Return the e4m3 scales [rows, blocks] below those of rows, as fp32, and what values are multiplied with."""
    wanted = tops / torch.full_like(tops, largest_code) / outer[:, None]
    rounded = wanted.clamp(LEAST_INNER, LARGEST_INNER).to(torch.float8_e4m3fn).to(torch.float32)
    finite = outer.isfinite()[:, None]
    factors = (1.0 / outer)[:, None] / rounded
    return torch.where(finite, rounded, math.nan), torch.where(finite, factors, 0.0)
