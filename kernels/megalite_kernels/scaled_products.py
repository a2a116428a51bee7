"""Products of tiles. On a CPU they are emulated: exact within a block, and the same bits with any number of threads.

Codes are multiplied in float64 block by block. A block's sum is exact in any order for up to 2^17 products of e4m3
codes; it is multiplied with its two scales, whose product is exact, and the blocks are added in order. With two levels
of scales, codes times their e4m3 scales are multiplied, which is exact for up to 1,024 columns, and these parts are
added in order. Products with e5m2 codes are exact to float64's rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from megalite_kernels.recipes import Recipe
from megalite_kernels.tiles import Tiles, values_of

EXACT_COLUMNS = 1024  # of products of e2m1 codes and their e4m3 scales


def product(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    """Return a @ b.T of tiles [rows, columns] and [outputs, columns], [rows, outputs].

    In float64 it is not rounded further; other dtypes are rounded to fp32 first.
    """
    return product_reference(a, b, recipe, dtype)


def grouped_product(
    a: Tiles, b: Sequence[Tiles], offsets: Sequence[int], ends: Tensor, recipe: Recipe, dtype: torch.dtype
) -> Tensor:
    """Multiply each row with the matrix of its group: tiles [rows, columns], each [outputs, columns].

    Args:
        offsets: [groups + 1], from 0 to the number of rows: group g has the rows from offsets[g] to offsets[g + 1].
        ends: offsets[1:] as an int32 tensor on the device.
    """
    output = a.codes.new_empty(len(a.codes), b[0].codes.shape[0], dtype=dtype)
    for matrix, (start, stop) in zip(b, pairwise(offsets), strict=True):
        output[start:stop] = product(rows_of(a, start, stop), matrix, recipe, dtype)
    return output


def rows_of(tiles: Tiles, start: int, stop: int) -> Tiles:
    """Return the tiles of some rows, each of which has scales of its own, or of a tensor with one scale."""
    codes, scales, outer = tiles
    return Tiles(
        codes[start:stop], scales[start:stop] if scales.dim() else scales, None if outer is None else outer[start:stop]
    )


def product_reference(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
    first, second = values_of(a.codes, torch.float64), values_of(b.codes, torch.float64)
    columns = first.shape[1]
    if recipe.scaling == "two levels":
        first *= _by_column(a.scales, recipe, columns)
        second *= _by_column(b.scales, recipe, columns)
        found = _sum_of_parts(first, second, EXACT_COLUMNS, None)
        found *= a.outer.double()[:, None] * b.outer.double()
    elif recipe.block:
        both = _by_row(a, recipe), _by_row(b, recipe)
        found = _sum_of_parts(first, second, recipe.block, both)
    else:
        found = torch.mm(first, second.t())
        found *= a.scales.double() * b.scales.double()
    return found if dtype == torch.float64 else found.to(torch.float32).to(dtype)


def _sum_of_parts(first: Tensor, second: Tensor, size: int, scales: tuple[Tensor, Tensor] | None) -> Tensor:
    """Add the products of parts of `size` columns, in order, each times its scales [rows, parts], [outputs, parts]."""
    total = first.new_zeros(len(first), len(second))
    for part, start in enumerate(range(0, first.shape[1], size)):
        found = torch.mm(first[:, start : start + size], second[:, start : start + size].t())
        if scales is not None:
            found *= scales[0][:, part, None] * scales[1][:, part]
        total += found
    return total


def _by_column(scales: Tensor, recipe: Recipe, columns: int) -> Tensor:
    return scales.double().repeat_interleave(recipe.block, 1)[:, :columns]


def _by_row(tiles: Tiles, recipe: Recipe) -> Tensor:
    """Return the scales [rows, blocks] in float64; a row has those of its square."""
    found, rows = tiles.scales.double(), len(tiles.codes)
    return found if len(found) == rows else found.repeat_interleave(recipe.block, 0)[:rows]
