"""8-bit number formats."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """Parameters of an 8-bit number format.

    Attributes:
        mantissa: number of bits of the mantissa.
        lowest: lowest exponent.
        largest: value of the largest code.
    """

    mantissa: int
    lowest: int
    largest: float


FORMATS = {
    torch.int8: Format(7, 7, 127.0),
    torch.float8_e4m3fn: Format(3, -6, 448.0),
    torch.float8_e5m2: Format(2, -14, 57344.0),
}

TILE_FORMATS = {
    torch.float8_e4m3fn: FORMATS[torch.float8_e4m3fn],
    torch.float8_e5m2: FORMATS[torch.float8_e5m2],
    torch.float4_e2m1fn_x2: Format(1, 0, 6.0),
}
"""Formats of the codes of tiles. Those of e2m1 are kept in uint8, one code each."""


def storage(format: torch.dtype) -> torch.dtype:
    """Return the integer dtype in which kernels see codes. Triton supports fp8 only on some GPUs."""
    return torch.int8 if format == torch.int8 else torch.uint8
