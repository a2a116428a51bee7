"""Exact sums of float64 numbers: the result does not depend on the order of the additions or on the split over ranks.

The mantissas of numbers with the same exponent are added as integers on the device. The sums of all exponents and
ranks are added on the host, as integers of any length: it waits for the device once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalite.parallel import collectives
from megalite.parallel.mesh import Group

MANTISSA_BITS = 53
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1073, 1024  # exponents that frexp returns
UNIT_BITS = MANTISSA_BITS - LOWEST_EXPONENT
"""Every float64 number is a multiple of 2**-UNIT_BITS."""
EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
INFINITIES, NANS, COLUMNS = EXPONENTS, EXPONENTS + 1, EXPONENTS + 2
"""Columns of the table beside those of the exponents, with the numbers of infinities and of NaNs."""
HALF_BITS = 26
"""Number of bits in the lower half of a mantissa. Sums of 2**36 halves, over all ranks, do not overflow int64."""


def sums_over_ranks(numbers: Sequence[Tensor], group: Group) -> list[float]:
    """Return the sum of each tensor's elements over the ranks of a group, rounded once, with the same bits on each.

    Args:
        numbers: float64 tensors on the mesh's device. No element may be negative. All ranks pass the same number of
            tensors; their sizes may differ.
        group: the ranks.

    Returns:
        One number per tensor. It is infinity if the sum exceeds the range of float64 or if an element is infinite, and
        NaN if an element is NaN.
    """
    table = collectives.all_reduce_(_table(numbers), group).cpu().numpy()
    return [_rounded(table[:, row]) for row in range(len(numbers))]


def _table(numbers: Sequence[Tensor]) -> Tensor:
    """Return the sums of the upper and of the lower halves of mantissas, per exponent: int64 [2, tensors, COLUMNS]."""
    every = torch.cat(list(numbers))  # one launch of each kernel for all
    infinite, neither = every == math.inf, every.isnan()
    mantissas, exponents = torch.frexp(every)
    digits = mantissas.mul_(2.0**MANTISSA_BITS).long().masked_fill_(infinite | neither, 1)
    places = exponents.sub_(LOWEST_EXPONENT).masked_fill_(infinite, INFINITIES).masked_fill_(neither, NANS)
    for row, part in enumerate(places.split([len(each) for each in numbers])):
        part += row * COLUMNS
    table = digits.new_zeros(2, len(numbers) * COLUMNS)
    table[0].index_add_(0, places, digits >> HALF_BITS)
    table[1].index_add_(0, places, digits & ((1 << HALF_BITS) - 1))
    return table.view(2, len(numbers), COLUMNS)


def _rounded(halves: NDArray[np.int64]) -> float:
    if halves[:, EXPONENTS:].any():
        return math.nan if halves[1, NANS] else math.inf
    present = np.flatnonzero(halves.any(0))
    columns = zip(present.tolist(), *halves[:, present].tolist(), strict=True)
    total = sum(((high << HALF_BITS) + low) << place for place, high, low in columns)
    try:
        return total / (1 << UNIT_BITS)  # Python rounds the quotient of two integers to nearest.
    except OverflowError:
        return math.inf
