"""The sum of the squares of a flat buffer, of which an L2 norm is made.

In float64 by the reference. The kernel adds up the squares of a few thousand elements at a time in fp32, scaled by a
power of two where they would overflow or vanish, and torch adds those sums in float64: the same bits in each run, and
within 1e-6 of the reference's. An infinity or a NaN anywhere makes the sum one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import tile, unit

if TYPE_CHECKING:
    import triton.language as tl

COLUMNS = 4096  # of what a program adds up

# ------------------------------------------------------------------------------------------------- the reference


def sum_of_squares_reference(values: Tensor) -> Tensor:
    """By chunks that stay in a processor's cache."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for chunk in values.split(launch.chunk_elements(values.device)):
        wide = chunk.double()
        total += torch.dot(wide, wide)
    return total


# ------------------------------------------------------------------------------------------------- the kernel


@kernel
def _sum_squares(
    values: tl.tensor, sums: tl.tensor, scales: tl.tensor, units: tl.tensor, UNIT: tl.constexpr, COLUMNS: tl.constexpr
) -> None:
    """Each program writes the sum of the squares of its elements, each times a scale, and that scale."""
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    start = program.to(tl.int64) * COLUMNS
    present = start // UNIT + column // UNIT < units
    x = tl.load(values + start + column, mask=present, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 0)  # which passes over NaN; the sum does not
    scale = tl.where(largest > 2.0**40, 2.0**-90, tl.where(largest < 2.0**-40, 2.0**90, 1.0))
    scaled = x * scale
    tl.store(sums + program, tl.sum(scaled * scaled, 0))
    tl.store(scales + program, scale)


# ------------------------------------------------------------------------------------------------- what is called


def sum_of_squares(values: Tensor) -> Tensor:
    """[elements] to one float64 number, on the same device.

    Raises:
        ValueError: the elements do not lie side by side.
    """
    if not runs_triton("optimizer", values):
        return sum_of_squares_reference(values)
    if not values.is_contiguous():
        raise ValueError("a flat buffer's elements lie side by side")
    elements, each = values.numel(), unit(values.numel())
    programs = -(-elements // COLUMNS)
    sums, scales = (torch.empty(programs, dtype=torch.float32, device=values.device) for _ in range(2))
    if elements:
        warps = tile(COLUMNS, largest=COLUMNS).warps
        _sum_squares[(programs,)](values, sums, scales, elements // each, each, COLUMNS, num_warps=warps)
    return (sums.double() / scales.double().square_()).sum()
