"""Triton kernels that quantize to tiles, and their launchers: see tiles.py. They have the reference's bits."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.formats import TILE_FORMATS
from megalite_kernels.launch import tile, unit
from megalite_kernels.quantization_kernels import dequantized
from megalite_kernels.recipes import Recipe, Scaling
from megalite_kernels.tile_scales import GREATEST, LARGEST_INNER, LEAST_INNER, Squares, Tiles, outer_scales

TILE = 2048  # elements of a program
BLOCK_OF_ONE_SCALE = 128  # elements of a row that a program has together
SQUARE_WARPS = 16
_SCALING: dict[Scaling, tuple[int, torch.dtype]] = {
    "quotient": (0, torch.float32),
    "ceiling": (1, torch.float32),
    "floor": (2, torch.float8_e8m0fnu),
    "two levels": (3, torch.float8_e4m3fn),
}
"""Numbers of the rules in the kernels, and the dtype of their scales."""

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _rounded(scaled: tl.tensor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr) -> tl.tensor:
    """Round fp32 magnitudes within a format's range to its codes without sign, ties to even, in int32."""
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) >> 23, 127 + LOWEST)
    unit = (exponent + (23 - MANTISSA)) << 23  # adding it as a float rounds to whole steps, found in the low bits
    steps = (scaled + unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - unit
    return ((exponent - (127 + LOWEST)) << MANTISSA) + steps


@triton.jit
def _codes(
    values: tl.tensor, factors: tl.tensor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, LARGEST: tl.constexpr
) -> tl.tensor:
    """Return the codes of fp32 values times factors, in int32."""
    bits = values.to(tl.int32, bitcast=True)
    scaled = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) * factors
    number = scaled == scaled
    codes = _rounded(tl.minimum(tl.where(number, scaled, 0.0), LARGEST), MANTISSA, LOWEST)
    SIGN: tl.constexpr = 8 if MANTISSA == 1 else 128
    return tl.where((bits < 0) & number, codes | SIGN, codes)


@triton.jit
def _scales(
    top: tl.tensor, LARGEST: tl.constexpr, EXPONENT: tl.constexpr, GREATEST: tl.constexpr, SCALING: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the scales, or the bytes of e8m0, and the factors of maxima, whose bits are given in int32."""
    finite = top < 0x7F800000
    if SCALING == 2:
        field = tl.maximum((top >> 23) - EXPONENT, 0)
        factors = ((254 - field) << 23).to(tl.float32, bitcast=True)
        scales = tl.where(finite, field, 255)
    else:
        number = tl.where(finite & (top > 0), top, 0x3F800000).to(tl.float32, bitcast=True)
        factors = tl.where(top > 0, tl.minimum(tl.div_rn(LARGEST, number), GREATEST), 1.0)
        if SCALING == 1:
            factors = (factors.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        scales = tl.where(finite, tl.div_rn(1.0, factors), float("nan"))
    return scales, tl.where(finite, factors, 0.0)


@triton.jit
def _inner_scales(
    top: tl.tensor, outer: tl.tensor, LARGEST: tl.constexpr, LEAST_INNER: tl.constexpr, LARGEST_INNER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the bytes of e4m3 scales below those of their rows, and the factors."""
    finite = (outer == outer) & (top < 0x7F800000)
    number = tl.where(finite, top, 0).to(tl.float32, bitcast=True)
    own = tl.where(finite, outer, 1.0)
    wanted = tl.div_rn(tl.div_rn(number, LARGEST), own)
    codes = _rounded(tl.minimum(tl.maximum(wanted, LEAST_INNER), LARGEST_INNER), 3, -6)
    exact = (((codes & 7) | 8) << 20).to(tl.float32)  # no scale is below the smallest exponent
    scales = exact * ((((codes >> 3) + (120 - 23)) << 23).to(tl.float32, bitcast=True))
    factors = tl.div_rn(tl.div_rn(1.0, own), scales)
    return tl.where(finite, codes, 127), tl.where(finite, factors, 0.0)


@triton.jit
def _elements(
    values: tl.tensor, elements: tl.tensor, UNIT: tl.constexpr, SIZE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the SIZE elements of a program in fp32, their places, and which there are; UNIT share a mask bit."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place // UNIT < elements // UNIT
    return tl.load(values + place, mask=inside, other=0.0).to(tl.float32), place, inside


@triton.jit(do_not_specialize=["elements"])
def _largest_of_parts(
    values: tl.tensor, tops: tl.tensor, elements: tl.tensor, UNIT: tl.constexpr, SIZE: tl.constexpr
) -> None:
    """Write the largest magnitude of SIZE elements, infinity for NaN."""
    x, _, _ = _elements(values, elements, UNIT, SIZE)
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    tl.store(tops + tl.program_id(0), tl.minimum(top, 0x7F800000).to(tl.float32, bitcast=True))


@triton.jit(do_not_specialize=["elements"])
def _quantize_tensor(
    values: tl.tensor,
    top: tl.tensor,
    codes: tl.tensor,
    scale: tl.tensor,
    elements: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    GREATEST: tl.constexpr,
    SCALING: tl.constexpr,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Quantize SIZE elements by the one scale of a tensor, which the first program writes."""
    x, place, inside = _elements(values, elements, UNIT, SIZE)
    own, factor = _scales(tl.load(top).to(tl.int32, bitcast=True), LARGEST, 0, GREATEST, SCALING)
    found = _codes(x, factor, MANTISSA, LOWEST, LARGEST)
    tl.store(codes + place, found.to(tl.uint8), mask=inside)
    tl.store(scale, own, mask=tl.program_id(0) == 0)


@triton.jit
def _places(
    block: tl.tensor, present: tl.tensor, columns: tl.constexpr, BLOCK: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return the places of the elements of blocks of rows of `columns` elements, and which there are of them."""
    within = tl.arange(0, BLOCK)[None, :]
    if columns % BLOCK == 0:
        return block[:, None] * BLOCK + within, present[:, None].broadcast_to(block.shape[0], BLOCK)
    PER_ROW: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    first = (block % PER_ROW) * BLOCK
    inside = present[:, None] & (first[:, None] + within < columns)
    return (block // PER_ROW * columns + first)[:, None] + within, inside


@triton.jit(do_not_specialize=["blocks"])
def _dequantize_blocks(
    codes: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    blocks: tl.tensor,
    columns: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Dequantize ROWS blocks of rows of `columns` elements; the last block of a row may be short."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = block < blocks
    place, inside = _places(block, present, columns, BLOCK)
    scale = tl.load(scales + (block * 0 if ONE_SCALE else block), mask=present, other=1.0)
    found = dequantized(tl.load(codes + place, mask=inside, other=0), scale, MANTISSA, LOWEST)
    tl.store(values + place, found.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def _quantize_blocks(
    values: tl.tensor,
    outer: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    blocks: tl.tensor,
    columns: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    EXPONENT: tl.constexpr,
    GREATEST: tl.constexpr,
    LEAST_INNER: tl.constexpr,
    LARGEST_INNER: tl.constexpr,
    SCALING: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize ROWS blocks of rows of `columns` elements; the last block of a row may be short."""
    PER_ROW: tl.constexpr = (columns + BLOCK - 1) // BLOCK
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = block < blocks
    place, inside = _places(block, present, columns, BLOCK)
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    if SCALING == 3:
        own = tl.load(outer + block // PER_ROW, mask=present, other=1.0)
        scale, factors = _inner_scales(top, own, LARGEST, LEAST_INNER, LARGEST_INNER)
    else:
        scale, factors = _scales(top, LARGEST, EXPONENT, GREATEST, SCALING)
    found = _codes(x, factors[:, None], MANTISSA, LOWEST, LARGEST)
    tl.store(codes + place, found.to(tl.uint8), mask=inside)
    tl.store(scales + block, scale.to(scales.dtype.element_ty), mask=present)


@triton.jit(do_not_specialize=["row_units"])
def _quantize_squares(
    values: tl.tensor,
    codes: tl.tensor,
    turned: tl.tensor,
    scales: tl.tensor,
    row_units: tl.tensor,
    columns: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    GREATEST: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    """Quantize a square of a matrix, and write its codes and their transpose.

    Args:
        row_units: rows of a matrix, UNIT each, for wide accesses.
    """
    rows, matrix = row_units.to(tl.int64) * UNIT, tl.program_id(2).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row // UNIT < row_units)[:, None]
    if columns % BLOCK:
        inside = inside & (column < columns)[None, :]
    before = matrix * rows * columns
    place = before + row[:, None] * columns + column[None, :]
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0)
    scale, factor = _scales(top, LARGEST, 0, GREATEST, SCALING)
    found = _codes(x, factor, MANTISSA, LOWEST, LARGEST).to(tl.uint8)
    tl.store(codes + place, found, mask=inside)
    other = before + column[:, None] * rows + row[None, :]
    tl.store(turned + other, tl.trans(found), mask=tl.trans(inside.broadcast_to(BLOCK, BLOCK)))
    of_row = (matrix * tl.num_programs(0) + tl.program_id(0)) * tl.num_programs(1)
    tl.store(scales + of_row + tl.program_id(1), scale)


# ------------------------------------------------------------------------------------------------- launchers


def _empty_codes(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device=like.device)


def _width(columns: int, block: int) -> int:
    """Return the width of rows for a kernel. Rows of whole blocks are taken for rows of one: one kernel is for all."""
    return columns if columns % block else block


def _parts_of_tensor(values: Tensor) -> tuple[int, int, int, int]:
    """Return the programs, at least one, the elements that share a mask bit, those of a program, and its warps."""
    shape = tile(TILE, largest=TILE)
    size = shape.rows * TILE
    return max(-(-values.numel() // size), 1), unit(values.numel()), size, shape.warps


def launch_largest(values: Tensor) -> Tensor:
    """Return the largest magnitude of all values, an fp32 scalar, infinity for NaN: see `tiles.largest`."""
    values = values.contiguous()
    programs, wide, size, warps = _parts_of_tensor(values)
    tops = torch.empty(programs, dtype=torch.float32, device=values.device)
    _largest_of_parts[(programs,)](values, tops, values.numel(), wide, size, num_warps=warps)
    return tops.amax()


def launch_quantize(values: Tensor, recipe: Recipe, format: torch.dtype, top: Tensor | None) -> Tiles:
    """Return the tiles of rows, [rows, columns]."""
    values = values.contiguous()
    mantissa, lowest, code = TILE_FORMATS[format]
    codes = _empty_codes(values, *values.shape)
    of_format = codes if format == torch.float4_e2m1fn_x2 else codes.view(format)
    (rows, columns), block = values.shape, recipe.block
    number, kept = _SCALING[recipe.scaling]
    if not block:
        assert top is not None
        scale = torch.empty((), dtype=kept, device=values.device)
        programs, wide, size, warps = _parts_of_tensor(values)
        _quantize_tensor[(programs,)](
            *(values, top, codes, scale, values.numel(), mantissa, lowest, code, GREATEST, number, wide, size),
            num_warps=warps,
        )
        return Tiles(of_format, scale)
    outer = outer_scales(top, code) if recipe.scaling == "two levels" and top is not None else None
    blocks, shape = rows * -(-columns // block), tile(block, largest=TILE)
    small = torch.uint8 if kept.itemsize == 1 else kept
    scales = torch.empty(rows, -(-columns // block), dtype=small, device=values.device)
    if blocks:
        width = _width(columns, block) if outer is None else columns
        _quantize_blocks[(-(-blocks // shape.rows),)](
            *(values, values if outer is None else outer, codes, scales, blocks, width, mantissa, lowest, code),
            *(math.frexp(code)[1] - 1, GREATEST, LEAST_INNER, LARGEST_INNER, number, shape.rows, block),
            num_warps=shape.warps,
        )
    return Tiles(of_format, scales.view(kept), outer)


def launch_dequantize(tiles: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return the values of tiles of rows with fp32 scales, or one of them, [rows, columns]."""
    codes = tiles.codes.contiguous()
    values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    (rows, columns), block = codes.shape, recipe.block or BLOCK_OF_ONE_SCALE
    blocks, shape = rows * -(-columns // block), tile(block, largest=TILE)
    if values.numel():
        _dequantize_blocks[(-(-blocks // shape.rows),)](
            *(codes.view(torch.uint8), tiles.scales.contiguous(), values, blocks, _width(columns, block)),
            *(*TILE_FORMATS[codes.dtype][:2], not recipe.block, shape.rows, block),
            num_warps=shape.warps,
        )
    return values


def launch_quantize_squares(values: Tensor, recipe: Recipe, matrices: int) -> tuple[Squares, Tensor]:
    """Return the tiles of matrices [matrices * out, in], and their codes [matrices * in, out]."""
    values = values.contiguous()
    rows, columns, block = len(values) // matrices, values.shape[1], recipe.block
    mantissa, lowest, code = TILE_FORMATS[recipe.forward]
    codes = _empty_codes(values, matrices * rows, columns)
    turned = _empty_codes(values, matrices * columns, rows)
    grid = (-(-rows // block), -(-columns // block), matrices)
    scales = torch.empty(matrices * grid[0], grid[1], dtype=torch.float32, device=values.device)
    wide = unit(rows)
    if values.numel():
        _quantize_squares[grid](
            *(values, codes, turned, scales, rows // wide, columns, mantissa, lowest, code),
            *(GREATEST, _SCALING[recipe.scaling][0], block, wide),
            num_warps=SQUARE_WARPS,
        )
    return Squares(codes.view(recipe.forward), scales), turned.view(recipe.forward)
