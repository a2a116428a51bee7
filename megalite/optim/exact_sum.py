"""Exact sums of float64 numbers: the result does not depend on the order of the additions or on the split over ranks.

A sum is kept as an integer, in units of 2**-1126. Every float64 number is a multiple of this unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import ParallelMesh

MANTISSA_BITS = 53
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1073, 1024  # exponents that frexp returns
UNIT_BITS = MANTISSA_BITS - LOWEST_EXPONENT
LIMB_BITS = 32
LIMBS = -(-(HIGHEST_EXPONENT + 64 + UNIT_BITS) // LIMB_BITS)
"""Number of limbs per sum: enough for 2**64 numbers of the largest size."""
HALF_BITS = 26
"""Number of bits in the lower half of a mantissa."""


def sums_over_ranks(numbers: Sequence[Tensor], mesh: ParallelMesh) -> list[float]:
    """Return the sum of each tensor's elements over all ranks, rounded once. The result is the same on every rank.

    Args:
        numbers: float64 tensors on the mesh's device. No element may be negative. All ranks pass the same number of
            tensors; their sizes may differ.
        mesh: the mesh of ranks.

    Returns:
        One number per tensor. It is infinity if the sum exceeds the range of float64 or if an element is infinite, and
        NaN if an element is NaN.
    """
    rows = torch.stack([_limbs(tensor) for tensor in numbers]).to(mesh.device)
    return [_rounded(row) for row in collectives.all_reduce_(rows, mesh.world()).tolist()]


def _limbs(numbers: Tensor) -> Tensor:
    """Return a sum as 32-bit limbs, followed by the numbers of infinities and of NaNs: int64 [LIMBS + 2].

    The limbs are stored in int64, so that limbs of many ranks can be added without overflow.
    """
    limbs = np.zeros(LIMBS + 2, np.int64)
    if bool(numbers.isfinite().all()):
        total = _integer(numbers)
        limbs[:LIMBS] = np.frombuffer(total.to_bytes(LIMBS * LIMB_BITS // 8, "little"), "<u4")
    else:
        limbs[LIMBS:] = int(numbers.isinf().sum()), int(numbers.isnan().sum())
    return torch.from_numpy(limbs)


def _integer(numbers: Tensor) -> int:
    """Return the sum of finite, non-negative numbers, in units of 2**-UNIT_BITS."""
    mantissas, exponents = torch.frexp(numbers)
    digits = (mantissas * 2.0**MANTISSA_BITS).long()
    places = exponents.long() - LOWEST_EXPONENT
    # Sum the mantissas per exponent. Each mantissa is split into two halves, so 2**36 of them do not overflow int64.
    table = digits.new_zeros(2, HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)
    table[0].index_add_(0, places, digits >> HALF_BITS)
    table[1].index_add_(0, places, digits & ((1 << HALF_BITS) - 1))
    present = table.any(0).nonzero().view(-1)
    columns = zip(present.tolist(), *table[:, present].tolist(), strict=True)
    return sum(((high << HALF_BITS) + low) << place for place, high, low in columns)


def _rounded(row: Sequence[int]) -> float:
    *limbs, infinities, nans = row
    if infinities or nans:
        return math.nan if nans else math.inf
    total = sum(limb << LIMB_BITS * position for position, limb in enumerate(limbs))
    try:
        return total / (1 << UNIT_BITS)  # Python rounds the quotient of two integers to nearest.
    except OverflowError:
        return math.inf
