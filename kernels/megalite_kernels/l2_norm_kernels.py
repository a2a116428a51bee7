"""The Triton kernel of sums of squares, and what launches it: see l2_norm.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.l2_norm import BLOCK
from megalite_kernels.launch import tile, unit

BLOCKS = 64  # that a program adds up

# ------------------------------------------------------------------------------------------------- the kernel


@triton.jit(do_not_specialize=["units"])
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


# ------------------------------------------------------------------------------------------------- what launches it


def launch_sums_of_squares(values: Tensor) -> Tensor:
    elements, each = values.numel(), unit(values.numel())
    blocks = -(-elements // BLOCK)
    sums, scales = (torch.empty(blocks, dtype=torch.float32, device=values.device) for _ in range(2))
    if elements:
        size = BLOCKS * BLOCK
        programs, warps = -(-blocks // BLOCKS), tile(size, largest=size).warps
        _sum_squares[(programs,)](values, sums, scales, elements // each, each, BLOCKS, BLOCK, num_warps=warps)
    return sums.double() / scales.double().square_()
