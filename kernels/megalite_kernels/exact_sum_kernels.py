"""Triton kernels of exact sums, and their launcher: see exact_sum.py.

Programs add up tiles of numbers, each in a row of digits of its own. A second kernel adds up the rows of a tensor and
carries once. All of it is addition of integers, so the result does not depend on the number of programs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.digits import DIGIT_BITS, DIGITS, UNIT_BITS
from megalite_kernels.launch import unit

TILE = 1024  # numbers that a program loads at once
TILES = 4  # per program, at least
PROGRAMS = 512  # per tensor, at most
COLUMNS = DIGITS + 2
WIDTH = 128  # columns of a row of a program: at least `COLUMNS`, and a power of two
ROWS = 32  # that the second kernel loads at once
SHIFT = UNIT_BITS - 1075  # a number is mantissa * 2**(exponent + SHIFT) units, with the biased exponent
FINITE = 2047  # exponents are below it

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["units", "programs"])
def _sum_digits(
    bits: tl.tensor,
    partials: tl.tensor,
    units: tl.tensor,
    programs: tl.tensor,
    UNIT: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
    SHIFT: tl.constexpr,
    FINITE: tl.constexpr,
) -> None:
    """Write the sum of every `programs`-th tile as a row of digits. Each number is in three of them."""
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    element = tl.arange(0, TILE)
    found = tl.zeros([WIDTH], tl.int64)
    digit_mask = tl.full([], (1 << DIGIT_BITS) - 1, tl.int64)
    tiles = (tl.cast(units, tl.int64) * UNIT + TILE - 1) // TILE
    for tile in range(program, tiles, tl.cast(programs, tl.int64)):
        start = tile * TILE
        present = start // UNIT + element // UNIT < units
        word = tl.load(bits + start + element, mask=present, other=0)
        exponent = ((word >> 52) & FINITE).to(tl.int32)
        fraction = word & ((1 << 52) - 1)
        finite = exponent < FINITE
        others = tl.sum(tl.where(finite, 0, tl.where(fraction == 0, 1, 1 << 32)), 0)  # both numbers in one sum
        found += tl.where(column == 0, others & digit_mask, 0) + tl.where(column == 1, others >> 32, 0)
        mantissa = tl.where(finite, tl.where(exponent > 0, fraction | (1 << 52), fraction), 0)
        place = tl.where(exponent > 0, exponent, 1) + SHIFT
        digit = place // DIGIT_BITS + 2
        shift = (place % DIGIT_BITS).to(tl.int64)
        lower = (mantissa << shift) & digit_mask
        above = mantissa >> (DIGIT_BITS - shift)
        middle, upper = above & digit_mask, above >> DIGIT_BITS
        first = tl.min(tl.where(mantissa > 0, digit, WIDTH), 0)
        last = tl.max(digit, 0)
        for each in range(first, last + 3):
            part = tl.where(digit == each, lower, 0) + tl.where(digit + 1 == each, middle, 0)
            part += tl.where(digit + 2 == each, upper, 0)
            found += tl.where(column == each, tl.sum(part, 0), 0)
    tl.store(partials + program * WIDTH + column, found)


@triton.jit(do_not_specialize=["programs"])
def _add_rows(
    partials: tl.tensor,
    digits: tl.tensor,
    programs: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
) -> None:
    """Add up the rows of a tensor, one program each, and carry from each digit to the next."""
    tensor = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    row = tl.arange(0, ROWS)
    found = tl.zeros([ROWS, WIDTH], tl.int64)
    for first in range(0, programs, ROWS):
        present = first + row < programs
        place = (tensor * programs + first + row)[:, None] * WIDTH + column[None, :]
        found += tl.load(partials + place, mask=present[:, None], other=0)
    total = tl.sum(found, 0)
    carry = total >> DIGIT_BITS
    after = column[:, None] + 1 == column[None, :]
    carried = tl.sum(tl.where(after, carry[:, None], 0), 0)
    digit_mask = tl.full([], (1 << DIGIT_BITS) - 1, tl.int64)
    tl.store(digits + tensor * COLUMNS + column, (total & digit_mask) + carried, mask=column < COLUMNS)


# ------------------------------------------------------------------------------------------------- the launcher


def launch_exact_digits(bits: Sequence[Tensor]) -> Tensor:
    """Launch one kernel a tensor, and one for all together."""
    most = max(each.numel() for each in bits)
    programs = max(min(-(-most // (TILE * TILES)), PROGRAMS), 1)
    partials = torch.empty(len(bits), programs, WIDTH, dtype=torch.int64, device=bits[0].device)
    digits = torch.empty(len(bits), COLUMNS, dtype=torch.int64, device=bits[0].device)
    for each, rows in zip(bits, partials, strict=True):
        size = unit(each.numel())
        _sum_digits[(programs,)](
            each, rows, each.numel() // size, programs, size, TILE, WIDTH, DIGIT_BITS, SHIFT, FINITE, num_warps=4
        )
    _add_rows[(len(bits),)](partials, digits, programs, ROWS, WIDTH, COLUMNS, DIGIT_BITS, num_warps=16)
    return digits
