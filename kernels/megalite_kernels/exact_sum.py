"""L2 norms with the same bits in any layout: sums of squares of blocks, and exact sums of them.

A flat buffer has one sum of squares per block of 64 elements. It depends only on these elements, not on their position
in the buffer. The reference sums in float64. The kernel sums a block in fp32, scaled by a power of two if squares would
overflow or underflow, with an error within 1e-6 of the reference. The sum of a block that contains an infinity or a NaN
is an infinity or a NaN.

An exact sum of float64 numbers has digits of 32 bits, so that the result does not depend on the order of additions.
Every finite float64 number is a multiple of 2**-UNIT_BITS. Its 53 bits are added to three digits of the sum, as
integers. The reference first adds the mantissas of numbers with the same exponent. No number may be negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite_kernels import launch
from megalite_kernels.digits import DIGIT_BITS, DIGITS, HIGHEST_EXPONENT, LOWEST_EXPONENT, MANTISSA_BITS, UNIT_BITS
from megalite_kernels.implementation import current

BLOCK = 64
EXPONENTS = HIGHEST_EXPONENT - LOWEST_EXPONENT + 1
INFINITIES, NANS, COLUMNS = EXPONENTS, EXPONENTS + 1, EXPONENTS + 2
"""Columns of the table beside those of the exponents, with the numbers of infinities and of NaNs."""
PIECE_BITS = 16
HALF_BITS = 26
"""Number of bits in the lower half of a mantissa. Sums of 2**36 halves do not overflow int64."""

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


def exact_digits_reference(numbers: Sequence[Tensor]) -> Tensor:
    """Return the rows of `exact_digits`: counts of infinities and NaNs, then the digits, lowest first."""
    table = _table(numbers)
    pieces = torch.arange(0, 64, PIECE_BITS, device=table.device)
    exponents = torch.arange(EXPONENTS, device=table.device).unsqueeze(1)
    digits = table.new_zeros(table.shape[1], DIGITS)
    for half, bits in zip(table[..., :EXPONENTS], (HALF_BITS, 0), strict=True):
        places = exponents + (pieces + bits)
        values = ((half.unsqueeze(2) >> pieces) & ((1 << PIECE_BITS) - 1)) << places % DIGIT_BITS
        digit = (places // DIGIT_BITS).flatten()
        digits.index_add_(1, digit, (values & ((1 << DIGIT_BITS) - 1)).flatten(1))
        digits.index_add_(1, digit + 1, (values >> DIGIT_BITS).flatten(1))
    return torch.cat([table[1, :, EXPONENTS:], digits], dim=1)


def _table(numbers: Sequence[Tensor]) -> Tensor:
    """Return the sums of the upper and of the lower halves of mantissas, per exponent: int64 [2, tensors, COLUMNS]."""
    every = torch.cat(list(numbers))  # one launch of each operation for all
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


def exact_digits(numbers: Sequence[Tensor]) -> Tensor:
    """Return the sum of each tensor's elements as int64 [tensors, columns], on the same device.

    The first two columns have the numbers of infinities and of NaNs, and column 2 + d has digit d. Digits are not
    carried over, but those of 2**29 ranks can be added without overflow.

    Args:
        numbers: float64 tensors, contiguous, each of less than 2**31 elements. No element may be negative.
    """
    bits = [each.view(torch.int64) for each in numbers]  # the kernel computes with integers alone
    if not current().runs_triton("optimizer", *bits):
        return exact_digits_reference(numbers)
    from megalite_kernels.exact_sum_kernels import launch_exact_digits

    return launch_exact_digits(bits)


def rounded(row: Sequence[int]) -> float:
    """Return the sum that a row of `exact_digits` says, rounded to nearest, once.

    It is infinity if it exceeds the range of float64 or if a number was infinite, and NaN if one was NaN.
    """
    infinities, nans, *digits = row
    if infinities or nans:
        return math.nan if nans else math.inf
    total = sum(digit << DIGIT_BITS * position for position, digit in enumerate(digits) if digit)
    try:
        return total / (1 << UNIT_BITS)  # Python rounds the quotient of two integers to nearest.
    except OverflowError:
        return math.inf
