"""Sums of squares of a flat buffer, one for each block of 64 elements, of which L2 norms are made.

A block's sum depends on its elements alone, not on what stands beside it in the buffer: whoever adds the blocks up
exactly gets the same bits however the elements are dealt into buffers of whole blocks. In float64 by the reference; the
kernel adds up a block in fp32, scaled by a power of two where squares would overflow or vanish, to within 1e-6 of the
reference. An infinity or a NaN makes its block's sum one of them.
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
    """Add up in chunks that stay in a processor's cache. torch adds up all rows of a matrix in the same order."""
    sums = torch.empty(-(-values.numel() // BLOCK), dtype=torch.float64, device=values.device)
    blocks = max(launch.chunk_elements(values.device) // BLOCK, 1)
    for out, chunk in zip(sums.split(blocks), values.split(blocks * BLOCK), strict=True):
        wide = chunk.double()
        squares = pad(wide * wide, (0, -chunk.numel() % BLOCK))
        torch.sum(squares.view(-1, BLOCK), 1, out=out)
    return sums


# ------------------------------------------------------------------------------------------------- what is called


def sums_of_squares(values: Tensor) -> Tensor:
    """[elements] to float64 [elements / 64, rounded up], on the same device.

    Raises:
        ValueError: the elements do not lie side by side.
    """
    if not current().runs_triton("optimizer", values):
        return sums_of_squares_reference(values)
    if not values.is_contiguous():
        raise ValueError("a flat buffer's elements lie side by side")
    from megalite_kernels.optimizer_kernels import launch_sums_of_squares

    return launch_sums_of_squares(values)
