"""Digits of an exact sum of float64 numbers: see exact_sum.py."""

from __future__ import annotations

MANTISSA_BITS = 53
LOWEST_EXPONENT, HIGHEST_EXPONENT = -1073, 1024  # exponents that frexp returns
UNIT_BITS = MANTISSA_BITS - LOWEST_EXPONENT
DIGIT_BITS = 32
DIGITS = -(-(HIGHEST_EXPONENT + 64 + UNIT_BITS) // DIGIT_BITS)
"""Digits of a sum: enough for 2**64 numbers of the largest size."""
