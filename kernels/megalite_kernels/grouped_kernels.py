"""Triton kernels of grouped products, and their launchers: see grouped.py.

The offsets of the groups are read on the device. A program computes one tile of a result and adds up in fp32, in the
order of the inner dimension, so the bits are always the same. Programs whose tiles have a factor in common follow each
other (`tl.swizzle2d`), so that it is still in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import UNIT, as_rows, tile

SIDE, DEPTH = 128, 64  # of a tile, and the part of the inner dimension that a program loads at once
FEWEST = 16  # of each size of a tile: what tensor cores multiply
WARPS, STAGES = 8, 3  # with more stages, tiles do not fit into the shared memory of AMD's GPUs
NEIGHBOURS = 8  # tiles of one column that follow each other
COLUMNS = 4096  # wider rows are read in several tiles

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def tile_of_groups(
    ends: tl.tensor, tile: tl.tensor, GROUPS: tl.constexpr, NUMBERS: tl.constexpr, SIDE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Return the group of a tile of SIDE rows, its first row and its group's end. Tiles begin at groups' first rows.

    Tiles beyond those of all groups have the group GROUPS.
    """
    number = tl.arange(0, NUMBERS)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < GROUPS), other=0)
    end = tl.load(ends + number, mask=number < GROUPS, other=0)
    counts = (end - begin + SIDE - 1) // SIDE
    group = tl.sum((tl.cumsum(counts, 0) <= tile).to(tl.int32), 0)
    before = tl.sum(tl.where(number < group, counts, 0), 0)
    first = tl.sum(tl.where(number == group, begin, 0), 0) + (tile - before) * SIDE
    return group, first, tl.sum(tl.where(number == group, end, 0), 0)


@triton.jit
def multiply_groups(
    rows: tl.tensor,
    matrices: tl.tensor,
    ends: tl.tensor,
    output: tl.tensor,
    row_stride: tl.tensor,
    matrix_stride: tl.tensor,
    in_stride: tl.tensor,
    out_stride: tl.tensor,
    GROUPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    """Multiply the rows of each group with its matrix [IN, OUT]. Tiles do not cross groups; the last ones are idle."""
    tiles_out = tl.cdiv(OUT, TILE_OUT)
    program, tiles = tl.program_id(0), tl.num_programs(0) // tiles_out
    of_rows, of_out = tl.swizzle2d(program // tiles_out, program % tiles_out, tiles, tiles_out, NEIGHBOURS)
    group, first, end = tile_of_groups(ends, of_rows, GROUPS, NUMBERS, SIDE)
    if group < GROUPS:
        row = (first + tl.arange(0, SIDE)).to(tl.int64)
        present = (row < end)[:, None]
        out = of_out * TILE_OUT + tl.arange(0, TILE_OUT)
        inside = (out < OUT)[None, :]
        matrix = matrices + group.to(tl.int64) * matrix_stride + out[None, :] * out_stride
        total = tl.zeros((SIDE, TILE_OUT), tl.float32)
        for start in range(0, IN, DEPTH):
            inner = start + tl.arange(0, DEPTH)
            left = tl.load(rows + row[:, None] * row_stride + inner[None, :], present & (inner < IN)[None, :], 0.0)
            right = tl.load(matrix + inner[:, None] * in_stride, (inner < IN)[:, None] & inside, 0.0)
            total = tl.dot(left, right, total)
        tl.store(output + row[:, None] * OUT + out[None, :], total.to(output.dtype.element_ty), present & inside)


@triton.jit
def add_products(
    gradients: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    before: tl.tensor,
    after: tl.tensor,
    gradient_stride: tl.tensor,
    row_stride: tl.tensor,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
    DEPTH: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    """Add gradients.T @ rows of each group to its matrix [OUT, IN], or write it without `before`."""
    tiles_out, tiles_in = tl.cdiv(OUT, TILE_OUT), tl.cdiv(IN, TILE_IN)
    program, group = tl.program_id(0), tl.program_id(1)
    of_out, of_in = tl.swizzle2d(program // tiles_in, program % tiles_in, tiles_out, tiles_in, NEIGHBOURS)
    begin = tl.where(group > 0, tl.load(ends + tl.maximum(group - 1, 0)), 0)
    end = tl.load(ends + group)
    out, inner = of_out * TILE_OUT + tl.arange(0, TILE_OUT), of_in * TILE_IN + tl.arange(0, TILE_IN)
    total = tl.zeros((TILE_OUT, TILE_IN), tl.float32)
    for start in range(begin, end, DEPTH):
        row = (start + tl.arange(0, DEPTH)).to(tl.int64)
        left_inside, right_inside = (out < OUT)[:, None] & (row < end)[None, :], (row < end)[:, None] & (inner < IN)
        left = tl.load(gradients + row[None, :] * gradient_stride + out[:, None], left_inside, 0.0)
        right = tl.load(rows + row[:, None] * row_stride + inner[None, :], right_inside, 0.0)
        total = tl.dot(left, right, total)
    place = group.to(tl.int64) * OUT * IN + out[:, None].to(tl.int64) * IN + inner[None, :]
    inside = (out < OUT)[:, None] & (inner < IN)[None, :]
    if before is not None:
        inside = inside & (out < tl.where(begin < end, OUT, 0))[:, None]  # nowhere without rows
        total += tl.load(before + place, inside, 0.0).to(tl.float32)
    tl.store(after + place, total.to(after.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["count"])
def scale_and_dot(
    gradients: tl.tensor,
    rows: tl.tensor,
    scale: tl.tensor,
    dots: tl.tensor,
    count: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write the dot products of gradients and rows, and multiply the gradients in place with the scale."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < count
    factor = tl.load(scale + row, mask=present, other=0.0)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, WIDTH, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = present[:, None] & (column < WIDTH)[None, :]
        place = gradients + row[:, None] * WIDTH + column[None, :]
        gradient = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(rows + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        total += gradient * value
        tl.store(place, (gradient * factor).to(gradients.dtype.element_ty), mask=inside)
    tl.store(dots + row, tl.sum(total, 1), mask=present)


# ------------------------------------------------------------------------------------------------- launchers


def side(width: int) -> int:
    """Return the size of a tile along a dimension of this size."""
    return max(FEWEST, min(SIDE, triton.next_power_of_2(width)))


def numbers(groups: int) -> int:
    """Return the size of what holds a number for each group."""
    return max(triton.next_power_of_2(groups), 2)


def _depth(*widths: int) -> int:
    """Return how much of the inner dimension is loaded at once: less through registers, where rows are not aligned."""
    return DEPTH // 2 if any(width % UNIT for width in widths) else DEPTH


def launch_products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply rows [rows, in] with their group's matrix [groups, in, out]; group i ends before row ends[i]."""
    rows, (groups, width, out) = as_rows(rows), matrices.shape
    output = rows.new_empty(len(rows), out)
    wide = side(out)
    most = -(-len(rows) // SIDE) + groups  # a group's last tile may be almost empty
    multiply_groups[(most * -(-out // wide),)](
        *(rows, matrices, ends, output, rows.stride(0), *matrices.stride()),
        *(groups, width, out, numbers(groups), wide, SIDE, _depth(width, out), NEIGHBOURS),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return output


def launch_sums(target: Tensor, gradients: Tensor, rows: Tensor, ends: Tensor, *, overwrite: bool) -> None:
    groups, out, width = target.shape
    gradients, rows, sides = as_rows(gradients), as_rows(rows), (side(out), side(width))
    tiles = -(-out // sides[0]) * -(-width // sides[1])
    add_products[(tiles, groups)](
        *(gradients, rows, ends, None if overwrite else target, target, gradients.stride(0), rows.stride(0)),
        *(out, width, *sides, _depth(width, out), NEIGHBOURS),
        num_warps=WARPS,
        num_stages=STAGES,
    )


def launch_scale(gradients: Tensor, rows: Tensor, scale: Tensor) -> Tensor:
    rows, (count, width) = as_rows(rows), gradients.shape
    dots = torch.empty(count, dtype=scale.dtype, device=scale.device)
    if count:
        shape = tile(width, largest=COLUMNS)
        scale_and_dot[(-(-count // shape.rows),)](
            *(gradients, rows, scale, dots, count, rows.stride(0), width, shape.rows, shape.columns),
            num_warps=shape.warps,
        )
    return dots
