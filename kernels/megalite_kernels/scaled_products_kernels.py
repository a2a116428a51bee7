"""Triton kernel of products of 8-bit codes with a scale for each block, whole or by group: see scaled_products.py.

A program computes one tile of a result. Tensor cores add up a block of the contraction from zero. The sum, times the
product of its two scales, is added in fp32, block by block in order: what tensor cores lose in sums of fewer bits does
not grow with the number of blocks. Where the product of two scales is beyond fp32, the result is infinite or NaN.

A row's numbers are the same in any group and beside any others: rows are filled up to a tile in registers alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.grouped_kernels import NEIGHBOURS, SIDE, WARPS, numbers, side, tile_of_groups
from megalite_kernels.launch import UNIT
from megalite_kernels.tile_scales import Squares, Tiles
from megalite_kernels.tiles import filled

STAGES = 3  # of 32 KiB: with more, they do not fit into the shared memory of compute capability 8.9

# ------------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["count"])
def multiply_codes(
    rows: tl.tensor,
    matrices: tl.tensor,
    row_scales: tl.tensor,
    scales: tl.tensor,
    ends: tl.tensor,
    output: tl.tensor,
    count: tl.tensor,
    columns: tl.tensor,
    GROUPS: tl.constexpr,
    OUT: tl.constexpr,
    NUMBERS: tl.constexpr,
    BLOCK: tl.constexpr,
    SQUARES: tl.constexpr,
    TILE_OUT: tl.constexpr,
    SIDE: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
) -> None:
    """Multiply the rows of each group with its matrix [OUT, columns]. Tiles do not cross groups; the last are idle.

    Args:
        scales: [rows of squares, blocks], or of rows [blocks, rows], so that those of a tile are beside each other.
        ends: the end of each group's rows; None: all `count` rows are one group.
        SQUARES: True if a scale of a matrix covers BLOCK rows. They are TILE_OUT, unless there is one tile of outputs.
    """
    tiles_out = tl.cdiv(OUT, TILE_OUT)
    program, tiles = tl.program_id(0), tl.num_programs(0) // tiles_out
    of_rows, of_out = tl.swizzle2d(program // tiles_out, program % tiles_out, tiles, tiles_out, NEIGHBOURS)
    if ends is None:
        group, first, end = of_rows * 0, of_rows * SIDE, count
    else:
        group, first, end = tile_of_groups(ends, of_rows, GROUPS, NUMBERS, SIDE)
    if group < GROUPS:
        blocks = tl.cdiv(columns, BLOCK)
        row = (first + tl.arange(0, SIDE)).to(tl.int64)
        present = row < end
        out = of_out * TILE_OUT + tl.arange(0, TILE_OUT)
        inside = out < OUT
        inner = tl.arange(0, BLOCK)
        matrix_row = group.to(tl.int64) * OUT + out
        left = rows + row[:, None] * columns + inner[None, :]
        right = matrices + matrix_row[None, :] * columns + inner[:, None]
        of_left, of_right = row_scales + row * blocks, scales + matrix_row
        of_square = scales + (group.to(tl.int64) * tl.cdiv(OUT, BLOCK) + of_out) * blocks
        total = tl.zeros((SIDE, TILE_OUT), tl.float32)
        for block in range(blocks):
            within = block * BLOCK + inner < columns
            a = tl.load(left + block * BLOCK, present[:, None] & within[None, :], 0.0)
            b = tl.load(right + block * BLOCK, within[:, None] & inside[None, :], 0.0)
            scale = tl.load(of_left + block, present, 0.0)[:, None]
            if SQUARES:  # loaded before the product, so that it arrives while tensor cores multiply
                scale = scale * tl.load(of_square + block)
            else:
                scale = scale * tl.load(of_right + block * (GROUPS * OUT), inside, 0.0)[None, :]
            total += tl.dot(a, b) * scale
        place = output + row[:, None] * OUT + out[None, :]
        tl.store(place, total.to(output.dtype.element_ty), present[:, None] & inside[None, :])


# ------------------------------------------------------------------------------------------------- launcher


def launch_product(a: Tiles, b: Tiles, ends: Tensor | None, block: int, dtype: torch.dtype) -> Tensor:
    """Multiply rows [rows, columns] with the matrix [outputs, columns] of their group: [rows, outputs].

    Args:
        b: the matrices of all groups, one below the other.
        ends: int32 [groups], on the device: group i ends before row ends[i]. None: there is one group.
        block: columns that share a scale.
    """
    count, groups = len(a.codes), 1 if ends is None else len(ends)
    outputs = len(b.codes) // groups
    squares, scales = (True, b.scales) if isinstance(b, Squares) else (False, b.scales.t())
    output = torch.empty(count, outputs, dtype=dtype, device=a.codes.device)
    if output.numel():
        codes, matrices = (filled(part.codes, UNIT) for part in (a, b))  # rows of whole accesses; blocks stay as many
        wide = min(side(outputs), block)
        most = -(-count // SIDE) + (0 if ends is None else groups)  # a group's last tile may be almost empty
        multiply_codes[(most * -(-outputs // wide),)](
            *(codes, matrices, a.scales.contiguous(), scales.contiguous(), ends, output),
            *(count, codes.shape[1], groups, outputs, numbers(groups)),
            *(block, squares, wide, SIDE, NEIGHBOURS),
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return output
