"""Sums of squares of a flat buffer, one for each block of 64 elements, of which L2 norms are made.

A block's sum depends on its elements alone, not on what stands beside it in the buffer: whoever adds the blocks up
exactly gets the same bits however the elements are dealt into buffers of whole blocks. In float64 by the reference; the
kernel adds up a block in fp32, scaled by a power of two where squares would overflow or vanish, to within 1e-6 of the
reference. An infinity or a NaN makes its block's sum one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite_kernels import launch
from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import tile, unit

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = 64
BLOCKS = 64  # that a program adds up

# ------------------------------------------------------------------------------------------------- the reference


def sums_of_squares_reference(values: Tensor) -> Tensor:
    """By chunks that stay in a processor's cache. torch adds up all rows of a matrix in the same order."""
    sums = torch.empty(-(-values.numel() // BLOCK), dtype=torch.float64, device=values.device)
    blocks = max(launch.chunk_elements(values.device) // BLOCK, 1)
    for out, chunk in zip(sums.split(blocks), values.split(blocks * BLOCK), strict=True):
        wide = chunk.double()
        squares = pad(wide * wide, (0, -chunk.numel() % BLOCK))
        torch.sum(squares.view(-1, BLOCK), 1, out=out)
    return sums


# ------------------------------------------------------------------------------------------------- the kernel


@kernel
def _sum_squares(
    values: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Each program writes its blocks' sums, of squares of elements times the block's scale, and the scales."""
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    block = tl.arange(0, BLOCKS)
    element = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    start = first * BLOCK
    present = start // UNIT + element // UNIT < units
    x = tl.load(values + start + element, mask=present, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)  # which passes over NaN; the sum does not
    scale = tl.where(largest > 2.0**40, 2.0**-90, tl.where(largest < 2.0**-40, 2.0**90, 1.0))
    scaled = x * scale[:, None]
    written = start // UNIT + block * BLOCK // UNIT < units
    tl.store(sums + first + block, tl.sum(scaled * scaled, 1), mask=written)
    tl.store(scales + first + block, scale, mask=written)


# ------------------------------------------------------------------------------------------------- what is called


def sums_of_squares(values: Tensor) -> Tensor:
    """[elements] to float64 [elements / 64, rounded up], on the same device.

    Raises:
        ValueError: the elements do not lie side by side.
    """
    if not runs_triton("optimizer", values):
        return sums_of_squares_reference(values)
    if not values.is_contiguous():
        raise ValueError("a flat buffer's elements lie side by side")
    elements, each = values.numel(), unit(values.numel())
    blocks = -(-elements // BLOCK)
    sums, scales = (torch.empty(blocks, dtype=torch.float32, device=values.device) for _ in range(2))
    if elements:
        size = BLOCKS * BLOCK
        programs, warps = -(-blocks // BLOCKS), tile(size, largest=size).warps
        _sum_squares[(programs,)](values, sums, scales, elements // each, each, BLOCKS, BLOCK, num_warps=warps)
    return sums.double() / scales.double().square_()
