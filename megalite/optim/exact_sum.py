"""Exact sums of float64 numbers: the result does not depend on the order of the additions or on the split over ranks.

The mantissas of numbers with the same exponent are added as integers on the device, and the sums of all exponents as
digits of 32 bits, which ranks add up. The host, which waits for the device once, puts the digits together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
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
DIGIT_BITS, PIECE_BITS = 32, 16
DIGITS = -(-(HIGHEST_EXPONENT + 64 + UNIT_BITS) // DIGIT_BITS)
"""Digits of a sum: enough for 2**64 numbers of the largest size."""
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
    return [_rounded(row) for row in collectives.all_reduce_(_digits(_table(numbers)), group).tolist()]


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


def _digits(table: Tensor) -> Tensor:
    """Return sums as digits of 32 bits, not carried over, and numbers of infinities and NaNs: [tensors, DIGITS + 2].

    Digits of many ranks can be added without overflow.
    """
    pieces = torch.arange(0, 64, PIECE_BITS, device=table.device)
    exponents = torch.arange(EXPONENTS, device=table.device).unsqueeze(1)
    digits = table.new_zeros(table.shape[1], DIGITS)
    for half, bits in zip(table[..., :EXPONENTS], (HALF_BITS, 0), strict=True):
        places = exponents + (pieces + bits)
        values = ((half.unsqueeze(2) >> pieces) & ((1 << PIECE_BITS) - 1)) << places % DIGIT_BITS
        digit = (places // DIGIT_BITS).flatten()
        digits.index_add_(1, digit, (values & ((1 << DIGIT_BITS) - 1)).flatten(1))
        digits.index_add_(1, digit + 1, (values >> DIGIT_BITS).flatten(1))
    return torch.cat([digits, table[1, :, EXPONENTS:]], dim=1)


def _rounded(row: Sequence[int]) -> float:
    *digits, infinities, nans = row
    if infinities or nans:
        return math.nan if nans else math.inf
    total = sum(digit << DIGIT_BITS * position for position, digit in enumerate(digits))
    try:
        return total / (1 << UNIT_BITS)  # Python rounds the quotient of two integers to nearest.
    except OverflowError:
        return math.inf
