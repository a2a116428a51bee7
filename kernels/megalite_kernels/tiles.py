"""Tiles: matrices as codes of 8 or 4 bits, with a scale for each part of a row, or for each square of a weight.

A value is code * scale, and with two levels code * scale * outer. Values are quantized from fp32: fp64 is rounded to it
first. Codes are rounded to nearest, ties to even, and saturate. A tile with an infinity or a NaN has the scale NaN, so
it is dequantized to NaN; so has a tensor or a row with a scale of its own. The last tile of a row may be short.

`recipes.py` has what a scale covers, `tile_scales.py` how it follows from a maximum, and docs/fp8_tables.md the rules
in words.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.formats import TILE_FORMATS
from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.recipes import Recipe
from megalite_kernels.tile_scales import Squares, Tiles, WeightTiles, inner_scales, outer_scales, scales_of


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
    if not recipe.block and current().runs_triton("tiles", values):
        from megalite_kernels.tiles_kernels import launch_largest

        return launch_largest(values)
    low, high = torch.aminmax(values, dim=-1) if recipe.block else torch.aminmax(values)
    return torch.maximum(-low, high).to(torch.float32).nan_to_num(nan=math.inf, posinf=math.inf)


# ------------------------------------------------------------------------------------------------- the reference


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
    outer = outer_scales(_given(top), code) if recipe.scaling == "two levels" else None
    scale, factor = scales_of(tops, recipe, code) if outer is None else inner_scales(tops, outer, code)
    codes = round_to_codes(blocks * factor[..., None], format).flatten(1)[:, : values.shape[1]]
    return Tiles(codes.contiguous(), _stored(scale, recipe), outer)


def quantize_squares_reference(values: Tensor, recipe: Recipe, matrices: int = 1) -> Squares:
    """Quantize matrices [out, in], one below the other, with one scale for each square of the block's size."""
    of_each, block = values.to(torch.float32).unflatten(0, (matrices, -1)), recipe.block
    rows, columns = of_each.shape[1:]
    padded = F.pad(of_each, (0, -columns % block, 0, -rows % block))
    squares = padded.unflatten(2, (-1, block)).unflatten(1, (-1, block))
    scale, factor = scales_of(_tops(squares, (2, 4)), recipe, TILE_FORMATS[recipe.forward].largest)
    codes = round_to_codes(squares * factor[:, :, None, :, None], recipe.forward).view(padded.shape)
    return Squares(codes[:, :rows, :columns].flatten(0, 1).contiguous(), scale.flatten(0, 1))


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
    values: Tensor,
    recipe: Recipe,
    matrices: int = 1,
    top: Tensor | None = None,
    transposed_top: Tensor | None = None,
) -> WeightTiles:
    """Quantize a weight of so many matrices [out, in], one below the other, for both of its products.

    Tensorwise and in squares, both have the same codes: the backward's are a view, or on a GPU, whose products read
    along the contraction, a copy. Otherwise the backward's tiles run along `out` and have codes of their own.

    Args:
        matrices: their number: one, if the tensor has one scale.
        top: see `quantize`.
        transposed_top: the same of the transposed matrices, for nvfp4.
    """
    if not recipe.block:
        return for_both(quantize(values, recipe, recipe.forward, top))
    if not recipe.in_squares:
        forward = quantize(values, recipe, recipe.forward, top)
        turned = transposed(values, matrices).contiguous()
        return WeightTiles(forward, quantize(turned, recipe, recipe.forward, transposed_top))
    if not current().runs_triton("tiles", values):
        return for_both(quantize_squares_reference(values, recipe, matrices), matrices)
    from megalite_kernels.tiles_kernels import launch_quantize_squares

    forward, codes = launch_quantize_squares(values, recipe, matrices)
    return WeightTiles(forward, Squares(codes, transposed(forward.scales, matrices)))


def for_both(forward: Tiles, matrices: int = 1) -> WeightTiles:
    """Return both operands of a weight, from that of the forward, if they have the same codes."""
    codes = transposed(forward.codes, matrices)
    codes = codes.contiguous() if on_gpu(codes) else codes
    scales = transposed(forward.scales, matrices) if forward.scales.dim() else forward.scales
    return WeightTiles(forward, forward._replace(codes=codes, scales=scales))


def transposed(stacked: Tensor, matrices: int) -> Tensor:
    """Transpose each of so many matrices, one below the other: [matrices * rows, columns], a view of one matrix."""
    return stacked.unflatten(0, (matrices, -1)).transpose(1, 2).flatten(0, 1)


def filled(codes: Tensor, unit: int) -> Tensor:
    """Return codes of 8 bits, contiguous, with columns of zeros up to a multiple of `unit`, which change no sum."""
    missing = -codes.shape[1] % unit
    return F.pad(codes.view(torch.uint8), (0, missing)).view(codes.dtype) if missing else codes.contiguous()


def dequantize(tiles: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return the values of tiles [rows, columns]: computed in fp32, or in fp64 if that is asked for."""
    in_fp32 = tiles.scales.dtype == torch.float32 and dtype != torch.float64
    if in_fp32 and not isinstance(tiles, Squares) and current().runs_triton("tiles", tiles.codes):
        from megalite_kernels.tiles_kernels import launch_dequantize

        return launch_dequantize(tiles, recipe, dtype)
    return dequantize_reference(tiles, recipe, dtype)


def dequantize_reference(tiles: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = tiles.scales_of_rows(recipe.block).to(wide)
    if recipe.block:
        scale = scale.repeat_interleave(recipe.block, 1)[:, : tiles.codes.shape[1]]
    found = values_of(tiles.codes, wide) * scale
    return (found if tiles.outer is None else found * tiles.outer.to(wide)[:, None]).to(dtype)
