"""Sums of float64 numbers without rounding: alike in whatever order, and on whichever ranks, they are added up.

A sum is an integer that counts units of 2**-1126, of which every float64 number is a multiple.
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
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1073, 1024  # of frexp
UNIT_BITS = MANTISSA_BITS - LOWEST_EXPONENT
LIMB_BITS = 32
LIMBS = -(-(HIGHEST_EXPONENT + 64 + UNIT_BITS) // LIMB_BITS)
"""Room for 2**64 of the largest numbers."""
HALF_BITS = 26


def sums_over_ranks(numbers: Sequence[Tensor], mesh: ParallelMesh) -> list[float]:
    """The sum of each tensor's numbers over all ranks, rounded once: the same on every rank.

    Args:
        numbers: tensors of float64 on the mesh's device, of zero or more; as many on all ranks, sizes may differ.

    Returns:
        infinity for a sum that float64 does not hold, infinity or NaN where they are among its numbers.
    """
    rows = torch.stack([_limbs(tensor) for tensor in numbers]).to(mesh.device)
    return [_rounded(row) for row in collectives.all_reduce_(rows, mesh.world()).tolist()]


def _limbs(numbers: Tensor) -> Tensor:
    """A sum in limbs of 32 bits, and behind them how many infinities and NaNs there are: int64 [LIMBS + 2]."""
    limbs = np.zeros(LIMBS + 2, np.int64)
    if bool(numbers.isfinite().all()):
        total = _integer(numbers)
        limbs[:LIMBS] = np.frombuffer(total.to_bytes(LIMBS * LIMB_BITS // 8, "little"), "<u4")
    else:
        limbs[LIMBS:] = int(numbers.isinf().sum()), int(numbers.isnan().sum())
    return torch.from_numpy(limbs)


def _integer(numbers: Tensor) -> int:
    """The sum of finite numbers that are not negative, in units."""
    mantissas, exponents = torch.frexp(numbers)
    digits = (mantissas * 2.0**MANTISSA_BITS).long()
    places = exponents.long() - LOWEST_EXPONENT
    table = digits.new_zeros(2, HIGHEST_EXPONENT - LOWEST_EXPONENT + 1)  # in halves: 2**36 of them do not overflow
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
        return total / (1 << UNIT_BITS)  # of two integers: rounded to nearest
    except OverflowError:
        return math.inf
