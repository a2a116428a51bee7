"""Tiles: matrices as codes of 8 or 4 bits, with a scale for each part of a row, or for each square of a weight.

A value is code * scale, and with two levels code * scale * outer. Values are quantized from fp32: fp64 is rounded to it
first. Codes are rounded to nearest, ties to even, and saturate. A tile with an infinity or a NaN has the scale NaN, so
it is dequantized to NaN; so has a tensor or a row with a scale of its own. The last tile of a row may be short.

`recipes.py` has what a scale covers, `scales_of` how it follows from a maximum, docs/fp8_tables.md the rules in words.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.formats import TILE_FORMATS
from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.recipes import Recipe

LEAST_INNER = 2.0**-6
"""Smallest e4m3 scale. Those below have fewer bits, and what they quantize would get others when quantized again."""
LARGEST_INNER = 448.0
LEAST_OUTER = 2.0**-120
"""Smallest scale of a row: the inverse of both levels together is a number of fp32."""
GREATEST = torch.finfo(torch.float32).max


class Tiles(NamedTuple):
    """One operand of a product whose contraction runs along the columns.

    Attributes:
        codes: [rows, columns], of the format's dtype; of e2m1, uint8 with one code each.
        scales: a scalar (tensorwise), [rows, blocks], or for squares of a weight [blocks of rows, blocks].
        outer: fp32 [rows]; None with one level of scales.
    """

    codes: Tensor
    scales: Tensor
    outer: Tensor | None = None


class WeightTiles(NamedTuple):
    """A weight [out, in] for the product of the forward, and [in, out] for the one of its input's gradient."""

    forward: Tiles
    backward: Tiles


def largest(values: Tensor, recipe: Recipe) -> Tensor | None:
    """Return the largest magnitude that scales need from every rank that shares the tensor, in fp32; NaN as infinity.

    A maximum over ranks keeps an infinity, while it may lose a NaN.

    Returns:
        A scalar (tensorwise), [rows] (nvfp4), or None if tiles need no more than themselves.
    """
    if recipe.block and recipe.scaling != "two levels":
        return None
    if not values.numel():
        return values.new_zeros(values.shape[:-1] if recipe.block else (), dtype=torch.float32)
    low, high = torch.aminmax(values, dim=-1) if recipe.block else torch.aminmax(values)
    return torch.maximum(-low, high).to(torch.float32).nan_to_num(nan=math.inf, posinf=math.inf)


# ------------------------------------------------------------------------------------------------- the reference


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


def round_to_codes(scaled: Tensor, format: torch.dtype) -> Tensor:
    """Round fp32 values, which it overwrites, to codes, ties to even. What is no number becomes zero."""
    limit = TILE_FORMATS[format].largest
    scaled.nan_to_num_(0.0).clamp_(-limit, limit)
    if format != torch.float4_e2m1fn_x2:
        return scaled.to(format)
    size = scaled.abs()  # in steps of 0.5 below 2, of 1 below 4, then of 2
    steps = torch.where(size < 2.0, (size * 2.0).round(), size.round() + 2.0)
    steps = torch.where(size < 4.0, steps, (size * 0.5).round() + 4.0)
    return steps.to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3


def values_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for without their scales. Those in uint8 are e2m1."""
    if codes.dtype != torch.uint8:
        return codes.to(dtype)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype, device=codes.device)
    return torch.cat((table, -table))[codes.int()]


def quantize_reference(values: Tensor, recipe: Recipe, format: torch.dtype, top: Tensor | None) -> Tiles:
    """Return the tiles of `quantize`, with the scales of the tensor or of its rows from `top`."""
    code = TILE_FORMATS[format].largest
    narrow = values.to(torch.float32)
    if not recipe.block:
        scale, factor = scales_of(_given(top), recipe, code)
        return Tiles(round_to_codes(narrow * factor, format), scale)
    blocks = F.pad(narrow, (0, -narrow.shape[1] % recipe.block)).unflatten(1, (-1, recipe.block))
    tops = _tops(blocks, (-1,))
    if recipe.scaling == "two levels":
        outer = outer_scales(_given(top), code)
        scale, factor = inner_scales(tops, outer, code)
    else:
        outer = None
        scale, factor = scales_of(tops, recipe, code)
    codes = round_to_codes(blocks * factor[..., None], format).flatten(1)[:, : values.shape[1]]
    return Tiles(codes.contiguous(), _stored(scale, recipe), outer)


def quantize_squares_reference(values: Tensor, recipe: Recipe) -> Tiles:
    """Quantize a weight [out, in] with one scale for each square of the block's size."""
    (rows, columns), block = values.shape, recipe.block
    padded = F.pad(values.to(torch.float32), (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scale, factor = scales_of(_tops(squares, (1, 3)), recipe, TILE_FORMATS[recipe.forward].largest)
    codes = round_to_codes(squares * factor[:, None, :, None], recipe.forward).view(padded.shape)
    return Tiles(codes[:rows, :columns].contiguous(), scale)


def _tops(blocks: Tensor, dimensions: tuple[int, ...]) -> Tensor:
    """Return the largest magnitudes over these dimensions, infinity for NaN."""
    return blocks.abs().amax(dimensions).nan_to_num_(nan=math.inf, posinf=math.inf)


def _given(top: Tensor | None) -> Tensor:
    if top is None:
        raise ValueError("a recipe with one scale for a tensor or a row needs its largest magnitude: see `largest`")
    return top


def _stored(scale: Tensor, recipe: Recipe) -> Tensor:
    """Return scales in the dtype in which the recipe keeps them, which has them all."""
    if recipe.scaling == "floor":
        return (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale.to(torch.float8_e4m3fn) if recipe.scaling == "two levels" else scale


# ------------------------------------------------------------------------------------------------- public functions


def quantize(values: Tensor, recipe: Recipe, format: torch.dtype, top: Tensor | None = None) -> Tiles:
    """Quantize activations or gradients [rows, columns], whose tiles are parts of one row.

    Args:
        format: `recipe.forward` or `recipe.backward`.
        top: what `largest` returns of these values, or the maximum of it over all ranks that share the tensor.
    """
    top = largest(values, recipe) if top is None else top
    if not current().runs_triton("tiles", values):
        return quantize_reference(values, recipe, format, top)
    from megalite_kernels.tiles_kernels import launch_quantize

    return launch_quantize(values, recipe, format, top)


def quantize_weight(
    values: Tensor, recipe: Recipe, top: Tensor | None = None, transposed_top: Tensor | None = None
) -> WeightTiles:
    """Quantize a weight [out, in] for both of its products.

    Tensorwise and in squares, both have the same codes: the backward's are a view, or on a GPU, whose products read
    along the contraction, a copy. Otherwise the backward's tiles run along `out` and have codes of their own.

    Args:
        top: see `quantize`.
        transposed_top: the same of the transposed weight, for nvfp4.
    """
    if recipe.block and not recipe.in_squares:
        forward = quantize(values, recipe, recipe.forward, top)
        return WeightTiles(forward, quantize(values.t().contiguous(), recipe, recipe.forward, transposed_top))
    if recipe.block and current().runs_triton("tiles", values):
        from megalite_kernels.tiles_kernels import launch_quantize_squares

        forward, turned = launch_quantize_squares(values, recipe)
        return WeightTiles(forward, Tiles(turned, forward.scales.t()))
    if recipe.block:
        return for_both(quantize_squares_reference(values, recipe))
    return for_both(quantize(values, recipe, recipe.forward, top))


def for_both(forward: Tiles) -> WeightTiles:
    """Return both operands of a weight, from that of the forward, if they have the same codes."""
    turned = forward.codes.t()
    turned = turned.contiguous() if on_gpu(turned) else turned
    return WeightTiles(forward, Tiles(turned, forward.scales.t()))


def dequantize(tiles: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return the values of tiles [rows, columns]: computed in fp32, or in fp64 if that is asked for."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows, columns = tiles.codes.shape
    found, scale = values_of(tiles.codes, wide), tiles.scales.to(wide)
    if recipe.block:
        scale = scale.repeat_interleave(recipe.block, 1)[:, :columns]
        if len(scale) != rows:
            scale = scale.repeat_interleave(recipe.block, 0)[:rows]
    found = found * scale
    return (found if tiles.outer is None else found * tiles.outer.to(wide)[:, None]).to(dtype)
