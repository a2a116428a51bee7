"""Sums of squares of a flat buffer, one per block of 64 elements, from which L2 norms are computed.

A block's sum depends only on its elements, not on its position in the buffer. An exact sum over all blocks therefore
has the same bits, no matter how the blocks are distributed over buffers. The reference sums in float64. The kernel sums
a block in fp32, scaled by a power of two if squares would overflow or underflow, with an error within 1e-6 of the
reference. The sum of a block that contains an infinity or a NaN is an infinity or a NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite_kernels import launch
from megalite_kernels.implementation import current

BLOCK = 64

# ------------------------------------------------------------------------------------------------- the reference


def sums_of_squares_reference(values: Tensor) -> Tensor:
    """Compute the sums in chunks that fit in the cache. torch sums every row of a matrix in the same order."""
    sums = torch.empty(-(-values.numel() // BLOCK), dtype=torch.float64, device=values.device)
    blocks = max(launch.chunk_elements(values.device) // BLOCK, 1)
    for out, chunk in zip(sums.split(blocks), values.split(blocks * BLOCK), strict=True):
        wide = chunk.double()
        squares = pad(wide * wide, (0, -chunk.numel() % BLOCK))
        torch.sum(squares.view(-1, BLOCK), 1, out=out)
    return sums


# ------------------------------------------------------------------------------------------------- public functions


def sums_of_squares(values: Tensor) -> Tensor:
    """Compute the sums of [elements] as float64 [elements / 64, rounded up], on the same device.

    Raises:
        ValueError: the buffer is not contiguous.
    """
    if not current().runs_triton("optimizer", values):
        return sums_of_squares_reference(values)
    if not values.is_contiguous():
        raise ValueError("a flat buffer must be contiguous")
    from megalite_kernels.optimizer_kernels import launch_sums_of_squares

    return launch_sums_of_squares(values, BLOCK)
