"""Numbers that are hard to round to few bits, and their tiles by each recipe, as `fp8_vectors.py` writes them."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from torch import Tensor

from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import largest, quantize_reference, quantize_weight, values_of

COLUMNS = 256
WEIGHT = (144, COLUMNS)  # its last squares are short
VARIANTS = {
    "tensorwise": recipe("tensorwise"),
    "tensorwise_hybrid": recipe("tensorwise", "hybrid"),
    "blockwise": recipe("blockwise"),
    "blockwise_hybrid": recipe("blockwise", "hybrid"),
    "blockwise_quotient": replace(recipe("blockwise"), scaling="quotient"),
    "mxfp8": recipe("mxfp8"),
    "mxfp8_ceiling": replace(recipe("mxfp8"), scaling="ceiling"),
    "nvfp4": recipe("nvfp4"),
}
"""Recipes by their names in the file; those that are not megalite's are what other programs do by default."""


def numbers(rows: int, columns: int, seed: int) -> Tensor:
    """Return numbers of many sizes, of 16 significant bits, that depend on the seed alone."""
    draw = random.Random(seed).getrandbits
    drawn = [(draw(17) - 2**16) * 2.0 ** (draw(3) - 20) for _ in range(rows * columns)]
    return torch.tensor(drawn, dtype=torch.float32).view(rows, columns)


def ties(by: Recipe) -> Tensor:
    """Return rows with every code and the middle of each two, of both signs; tiles have powers of two as scales."""
    e2m1 = by.backward == torch.float4_e2m1fn_x2
    codes = torch.arange(8 if e2m1 else 128, dtype=torch.uint8)
    known = values_of(codes if e2m1 else codes.view(by.backward), torch.float32)
    known = known[known.isfinite()]
    found = torch.cat([known, (known[1:] + known[:-1]) / 2])
    found = torch.cat([found, -found])
    width = (by.block or COLUMNS) - 1  # the first of each tile is the largest code
    tiles = _filled(found, width, known[-1])
    rows = _filled(torch.cat([known[-1].expand(len(tiles), 1), tiles], 1).flatten(), COLUMNS, known[-1])
    if e2m1:
        rows = rows * 256.0
        rows[:, -1] = 6.0 * 448.0  # so that the row's scale is 1
    return rows


def _filled(values: Tensor, width: int, last: Tensor) -> Tensor:
    """Return values as rows of this width, the last one filled up."""
    return torch.cat([values, last.expand(-len(values) % width)]).view(-1, width)


def cases(by: Recipe) -> dict[str, Tensor]:
    """Return fp32 values [rows, 256] by what is hard about them."""
    subnormal, zero, bad = numbers(3, COLUMNS, 1), torch.zeros(2, COLUMNS), numbers(4, COLUMNS, 2)
    subnormal = subnormal * torch.tensor([[2.0**-130], [2.0**-126], [2.0**-70]])
    zero[1] = -0.0
    bad[0, 5], bad[1, 140], bad[2, 255] = float("inf"), -float("inf"), float("nan")
    return {"tie": ties(by), "subnormal": subnormal, "zero": zero, "infinite": bad, "random": numbers(8, COLUMNS, 3)}


def quantized(values: Tensor, by: Recipe) -> Tiles:
    """Return the tiles of gradients, whose codes activations have, too, but for hybrid."""
    codes, scales, outer = quantize_reference(values, by, by.backward, largest(values, by))
    if by.name == "mxfp8" and scales.dtype == torch.float32:  # powers of two that were rounded up
        scales = (scales.view(torch.int32) >> 23 & 0xFF).to(torch.uint8).view(torch.float8_e8m0fnu)
    return Tiles(codes, scales, outer)


def quantized_weight(values: Tensor, by: Recipe) -> Tiles:
    if by.name == "mxfp8":  # also with scales rounded up, which elsewhere are those of squares
        return quantized(values, by)
    return quantize_weight(values, by).forward
