"""Formats of 8 and 4 bits and recipes over them, from their definitions, with nothing of the kernels or of torch.

A format is a table of all its codes, and a number is rounded by a search in it. Python's floats hold what is needed
exactly: the table, the middle of two codes, and products of two fp32 numbers.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

GREATEST = 2.0**128 - 2.0**104  # of fp32


@dataclass(frozen=True)
class Table:
    """The finite magnitudes of a format by code, and the bit of the sign."""

    values: tuple[float, ...]
    sign: int

    @property
    def largest(self) -> float:
        return self.values[-1]

    def code(self, value: float) -> int:
        """Return the code nearest to a value: of two as near the even one, and beyond the largest that one."""
        negative, size = math.copysign(1.0, value) < 0, min(abs(value), self.largest)
        code = bisect_right(self.values, size) - 1
        if code + 1 < len(self.values):
            middle = (self.values[code] + self.values[code + 1]) / 2
            code += size > middle or (size == middle and code % 2 == 1)
        return code | (self.sign if negative else 0)

    def value(self, code: int) -> float:
        """Return what a code stands for; a NaN or an infinity is an IndexError."""
        found = self.values[code & (self.sign - 1)]
        return -found if code & self.sign else found

    def ties(self) -> list[float]:
        """Return the middle of each two neighbours."""
        return [(low + high) / 2 for low, high in pairwise(self.values)]


def table(exponent_bits: int, mantissa_bits: int, bias: int, codes: int) -> Table:
    """Return the first `codes` magnitudes of a format with subnormal numbers."""
    values = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits) / (1 << mantissa_bits)
        values.append(2.0 ** (exponent - bias) * (1 + mantissa) if exponent else 2.0 ** (1 - bias) * mantissa)
    return Table(tuple(values), 1 << (exponent_bits + mantissa_bits))


E4M3 = table(4, 3, 7, 127)  # the last one of 128 is a NaN
E5M2 = table(5, 2, 15, 124)  # then an infinity and three NaN
E2M1 = table(2, 1, 1, 8)


def fp32(value: float) -> float:
    """Round to fp32, ties to even."""
    found: float = struct.unpack("f", struct.pack("f", value))[0]
    return found


@dataclass(frozen=True)
class Part:
    """A tile: codes and its scale, None for NaN."""

    codes: list[int]
    scale: float | None


def quantized(values: Sequence[float], scaling: str, format: Table, top: float, outer: float | None = None) -> Part:
    """Quantize fp32 values that share a scale.

    Args:
        scaling: see `Recipe.scaling`; "inner" for the scale below `outer`.
        top: the largest magnitude that decides on the scale.
    """
    if not math.isfinite(top):
        signs = [math.isfinite(value) and math.copysign(1.0, value) < 0 for value in values]
        return Part([format.sign if negative else 0 for negative in signs], None)
    if scaling == "floor":
        of_largest = math.frexp(format.largest)[1]
        scale = 2.0 ** max(math.frexp(top)[1] - of_largest if top else -127, -127)
        factor = 1 / scale
    elif scaling == "inner":
        assert outer is not None
        wanted = fp32(fp32(top / format.largest) / outer)
        scale = E4M3.value(E4M3.code(max(wanted, 2.0**-6)))
        factor = fp32(fp32(1 / outer) / scale)
    else:
        factor = fp32(min(format.largest / top, GREATEST)) if top else 1.0
        if scaling == "ceiling":
            factor = 2.0 ** (math.frexp(factor)[1] - 1)
        scale = fp32(1 / factor)
    return Part([format.code(fp32(value * factor)) for value in values], scale)


def row_scale(top: float) -> float:
    """Return the outer scale of nvfp4."""
    return max(fp32(top / (6 * 448)), 2.0**-120)
