"""Tiles: matrices as codes of 8 or 4 bits, with a scale for each part of a row, or for each square of a weight.

A value is code * scale, and with two levels code * scale * outer. Values are quantized from fp32: fp64 is rounded to it
first. Codes are rounded to nearest, ties to even, and saturate. A tile with an infinity or a NaN has the scale NaN and
is dequantized to NaN; so is a whole row or tensor whose largest magnitude is not finite. A tile's last part may be short.

`recipes.py` has what a scale covers, `scales` how it follows from a maximum, docs/fp8_tables.md the rules in words.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.formats import TILE_FORMATS
from megalite_kernels.recipes import Recipe

LEAST = 2.0**-6  # smallest e4m3 scale: below, scales have fewer bits, and quantizing again would give others
LARGEST_SCALE = 448.0  # of e4m3
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
    if recipe.scaling == "quotient" and not recipe.block:
        found = values.abs().amax() if values.numel() else values.new_zeros(())
    elif recipe.scaling == "two levels":
        found = values.abs().amax(-1) if values.shape[-1] else values.new_zeros(values.shape[:-1])
    else:
        return None
    return found.to(torch.float32).nan_to_num(nan=float("inf"), posinf=float("inf"))


# ------------------------------------------------------------------------------------------------- the reference


def scales(top: Tensor, recipe: Recipe, largest_code: float) -> tuple[Tensor, Tensor]:
    """Return the scales, and what values are multiplied with, for fp32 maxima: both in fp32, of the same shape.

    - quotient: the factor is largest code / maximum, and the scale its inverse, each rounded to fp32.
    - ceiling: the factor is the power of two below that quotient.
    - floor: the scale is the power of two of the maximum over the one of the largest code, at least 2^-127.

    A maximum of zero has the factor 1 (floor: 2^127), one that is not finite the scale NaN and the factor 0.
    """
    finite = top < float("inf")
    if recipe.scaling == "floor":
        exponent = int(torch.tensor(largest_code).frexp()[1]) - 1
        field = ((top.view(torch.int32) >> 23) - exponent).clamp(min=0)
        factors = ((254 - field) << 23).view(torch.float32)
    else:
        # The dividend is a tensor: on a GPU, torch divides a Python number by multiplying with an inverse, which rounds.
        factors = (torch.full_like(top, largest_code) / top).clamp(max=GREATEST)
        factors = torch.where(top > 0.0, factors, 1.0)
        if recipe.scaling == "ceiling":
            factors = (factors.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where(finite, 1.0 / factors, float("nan")), torch.where(finite, factors, 0.0)


def round_to_codes(scaled: Tensor, format: torch.dtype) -> Tensor:
    """Round fp32 values, which it overwrites, to codes, ties to even; what is not a number becomes zero."""
    limit = TILE_FORMATS[format].largest
    scaled.nan_to_num_(0.0).clamp_(-limit, limit)
    if format != torch.float4_e2m1fn_x2:
        return scaled.to(format)
    size = scaled.abs()
    steps = torch.where(size < 2.0, (size * 2.0).round(), size.round() + 2.0)
    steps = torch.where(size < 4.0, steps, (size * 0.5).round() + 4.0)
    return steps.to(torch.uint8) | scaled.signbit().to(torch.uint8) << 3


def values_of(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for without their scales. uint8 holds e2m1."""
    if codes.dtype != torch.uint8:
        return codes.to(dtype)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=dtype, device=codes.device)
    return torch.cat((table, -table))[codes.int()]


def quantize_reference(values: Tensor, recipe: Recipe, format: torch.dtype, top: Tensor | None) -> Tiles:
    code = TILE_FORMATS[format].largest
    narrow = values.to(torch.float32)
    if not recipe.block:
        scale, factor = scales(top, recipe, code)
        return Tiles(round_to_codes(narrow * factor, format), scale)
    blocks = _in_blocks(narrow, recipe.block)
    tops = blocks.abs().amax(-1).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    outer = None
    if top is None:
        scale, factor = scales(tops, recipe, code)
    else:
        outer, inner = scales(top, recipe, code * LARGEST_SCALE)
        wanted = tops / torch.full_like(tops, code) * inner[:, None]
        scale = wanted.clamp(LEAST, LARGEST_SCALE).to(torch.float8_e4m3fn)
        scale = torch.where(tops < float("inf"), scale.to(torch.float32), float("nan"))
        factor = (1.0 / (scale * outer[:, None])).nan_to_num_(nan=0.0, posinf=GREATEST)
    codes = round_to_codes(blocks * factor[..., None], format).flatten(1)[:, : values.shape[1]]
    return Tiles(codes.contiguous(), _stored(scale, recipe), outer)


def quantize_squares_reference(values: Tensor, recipe: Recipe, format: torch.dtype) -> Tiles:
    """Quantize a weight [out, in] with one scale for each square of the block's size."""
    rows, columns, block = *values.shape, recipe.block
    padded = F.pad(values.to(torch.float32), (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    tops = squares.abs().amax((1, 3)).nan_to_num_(nan=float("inf"), posinf=float("inf"))
    scale, factor = scales(tops, recipe, TILE_FORMATS[format].largest)
    codes = round_to_codes(squares * factor[:, None, :, None], format).view(padded.shape)
    return Tiles(codes[:rows, :columns].contiguous(), scale)


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return [rows, blocks, block], the last one filled with zeros."""
    return F.pad(values, (0, -values.shape[1] % block)).unflatten(1, (-1, block))


def _stored(scale: Tensor, recipe: Recipe) -> Tensor:
    """Return scales in the dtype in which the recipe keeps them, which has them all."""
    if recipe.name == "mxfp8":
        return (scale.view(torch.int32) >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return scale.to(torch.float8_e4m3fn) if recipe.name == "nvfp4" else scale


# ------------------------------------------------------------------------------------------------- public functions


def quantize(values: Tensor, recipe: Recipe, format: torch.dtype, top: Tensor | None = None) -> Tiles:
    """Quantize activations or gradients [rows, columns], whose tiles are parts of one row.

    Args:
        format: `recipe.forward` or `recipe.backward`.
        top: what `largest` returns of these values, or the maximum of it over all ranks that share the tensor.
    """
    return quantize_reference(values, recipe, format, largest(values, recipe) if top is None else top)


def quantize_weight(
    values: Tensor, recipe: Recipe, top: Tensor | None = None, transposed_top: Tensor | None = None
) -> WeightTiles:
    """Quantize a weight [out, in] for both of its products.

    Tensorwise and in squares, both have the same codes; otherwise those of the backward are of tiles along `out`.

    Args:
        top: see `quantize`.
        transposed_top: the same of the transposed weight, for nvfp4.
    """
    if recipe.block and recipe.scaling != "ceiling":
        forward = quantize(values, recipe, recipe.forward, top)
        return WeightTiles(forward, quantize(values.t(), recipe, recipe.forward, transposed_top))
    if recipe.block:
        forward = quantize_squares_reference(values, recipe, recipe.forward)
    else:
        forward = quantize(values, recipe, recipe.forward, top)
    turned = forward.scales.t() if recipe.block else forward.scales
    return WeightTiles(forward, Tiles(forward.codes.t(), turned))


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
