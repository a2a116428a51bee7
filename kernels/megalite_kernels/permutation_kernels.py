"""Triton kernels of the permutation of rows, and their launchers: see permutation.py.

One kernel serves both directions: it adds the rows at the places of each output row, of which `permute` has one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import as_rows, tile

COLUMNS = 4096  # wider rows are split over several programs

# ------------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["rows"])
def add_rows(
    input: tl.tensor,
    places: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Add the rows of the input at the places [rows, CHOICES] of each output row; -1 is no row."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    present, inside = row < rows, (column < WIDTH)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for choice in range(CHOICES):
        place = tl.load(places + row * CHOICES + choice, mask=present, other=-1)
        source = input + place[:, None] * stride + column[None, :]
        total += tl.load(source, mask=(place >= 0)[:, None] & inside, other=0.0).to(tl.float32)
    target = output + row[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(output.dtype.element_ty), mask=present[:, None] & inside)


# ------------------------------------------------------------------------------------------------- launchers


def launch_copy(input: Tensor, tokens: Tensor) -> Tensor:
    return launch_add(input, tokens[:, None])


def launch_add(rows: Tensor, places: Tensor) -> Tensor:
    source, (count, choices), width = as_rows(rows), places.shape, rows.shape[1]
    output = torch.empty((count, width), dtype=rows.dtype, device=rows.device)
    if count:
        shape = tile(width, largest=COLUMNS)
        add_rows[(-(-count // shape.rows), -(-width // shape.columns))](
            *(source, places.contiguous(), output, count, source.stride(0)),
            *(choices, width, shape.rows, shape.columns),
            num_warps=shape.warps,
        )
    return output
