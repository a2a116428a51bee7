"""Triton's products of blocks of 8 bits on a GPU: beside the emulation, by group beside whole ones, and their time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from megalite_kernels import grouped
from megalite_kernels.implementation import current
from megalite_kernels.measure import Step, time_interleaved
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import each_of, grouped_product, product, rows_of, torch_multiplies_blocks
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import quantize, quantize_weight

TOLERANCE = 2.0**-7
"""Error of a product, relative to the sum of the magnitudes of its terms."""
SLOWEST = 1.0
"""Time of experts' products, rows quantized, of bf16's: beyond it they are of no use."""
COUNTS = (0, 1, 127, 0, 128, 129, 300, 0)
"""Rows of each group."""
WIDTHS = ((1024, 768), (1000, 200))
"""Columns and outputs: whole blocks, and none."""


def multiply(a: Tiles, b: Tiles, offsets: list[int], by: Recipe, dtype: torch.dtype) -> Tensor:
    """Multiply rows with the matrix of their group, or the only one: by Triton's kernel, or on a CPU the emulation."""
    ends = torch.tensor(offsets[1:], dtype=torch.int32).to(a.codes.device) if len(offsets) > 2 else None
    if dtype != torch.float64 and current().runs_triton("scaled_products", a.codes):
        from megalite_kernels.scaled_products_kernels import launch_product

        return launch_product(a, b, ends, by.block, dtype)
    return product(a, b, by, dtype) if ends is None else grouped_product(a, b, offsets, ends, by, dtype)


def operands() -> Iterator[tuple[str, Recipe, Tiles, Tiles, list[int]]]:
    """Yield operands on the CPU, with the offsets of groups: of a weight, whole and by group, and of parts of rows.

    One row has an infinity.
    """
    generator, offsets = torch.Generator().manual_seed(4), [0, *accumulate(COUNTS)]
    for format in ("e4m3", "hybrid"):
        by = recipe("blockwise", format)
        for columns, outputs in WIDTHS:
            values = torch.randn(offsets[-1], columns, generator=generator)
            values[-1, columns // 2] = math.inf
            weights = torch.randn(len(COUNTS) * outputs, columns, generator=generator)
            a, name = quantize(values, by, by.backward), f"{format}, {columns} to {outputs}"
            yield f"whole, {name}", by, a, quantize_weight(weights[:outputs], by).forward, [0, offsets[-1]]
            yield f"of rows, {name}", by, a, quantize(weights[:outputs], by, by.forward), [0, offsets[-1]]
            yield f"of groups, {name}", by, a, quantize_weight(weights, by, len(COUNTS)).forward, offsets


def errors(device: str) -> dict[str, float]:
    """Return the largest error of each product against the emulation; infinity if other numbers are NaN."""
    found = {}
    for name, by, a, b, offsets in operands():
        exact = multiply(a, b, offsets, by, torch.float64)
        terms = multiply(_magnitudes(a), _magnitudes(b), offsets, by, torch.float64)
        ours = multiply(moved(a, device), moved(b, device), offsets, by, torch.bfloat16).cpu().double()
        error = ((ours - exact).abs() / terms).nan_to_num_(0.0).max().item()
        found[name] = error if torch.equal(ours.isnan(), exact.isnan()) else math.inf
    return found


def different_numbers(device: str) -> dict[str, int]:
    """Return how many numbers of each product by group are not those of the group's product alone, to the bit."""
    found = {}
    for name, by, a, b, offsets in operands():
        if len(offsets) == 2:
            continue
        a, b = moved(a, device), moved(b, device)
        together = multiply(a, b, offsets, by, torch.float32)
        alone = [
            multiply(rows_of(a, start, stop), matrix, [0, stop - start], by, torch.float32)
            for matrix, (start, stop) in zip(each_of(b, len(offsets) - 1), pairwise(offsets), strict=True)
        ]
        found[name] = int((together.nan_to_num(0.5) != torch.cat(alone).nan_to_num(0.5)).sum())
    return found


def moved(tiles: Tiles, device: str) -> Tiles:
    return type(tiles)(*(None if part is None else part.to(device) for part in tiles))


def _magnitudes(tiles: Tiles) -> Tiles:
    return tiles._replace(codes=(tiles.codes.view(torch.uint8) & 0x7F).view(tiles.codes.dtype))


def times(device: str) -> dict[str, float]:
    """Return the time of products of 8,192 rows at hidden 4,096: of 8 experts, rows quantized, of torch's in bf16; and
    of a whole one of codes, of cuBLAS's where torch has it.
    """
    (rows, width), groups, by = (8192, 4096) if device == "cuda" else (128, 256), 8, recipe("blockwise")
    offsets = [rows * number**2 // groups**2 for number in range(groups + 1)]  # from 1/64 to 15/64 of the rows
    ends = torch.tensor(offsets[1:], dtype=torch.int32, device=device)
    values = torch.randn(rows, width, device=device).bfloat16()
    weights = torch.randn(groups * width, width, device=device).bfloat16()
    matrices, tiles = weights.view(groups, width, width).transpose(1, 2), quantize_weight(weights, by, groups).forward
    a, b = quantize(values, by, by.forward), quantize_weight(weights[:width], by).forward

    def rounded() -> Tensor:
        return grouped_product(quantize(values, by, by.forward), tiles, offsets, ends, by, torch.bfloat16)

    steps: list[Step] = [
        lambda mark: grouped.grouped_product(values, matrices, offsets, ends),
        lambda mark: rounded(),
        lambda mark: multiply(a, b, [0, rows], by, torch.bfloat16),
        lambda mark: product(a, b, by, torch.bfloat16),
    ]
    (plain,), (experts,), (whole,), (other,) = time_interleaved(steps, values.device)
    found = {"experts of bf16": experts / plain}
    has_other = device == "cpu" or torch_multiplies_blocks(torch.device(device))
    return found | ({"whole of cuBLAS": whole / other} if has_other else {})
