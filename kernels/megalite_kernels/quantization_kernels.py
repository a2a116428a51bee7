"""Triton kernels of quantization and their launchers, and two functions for other kernels: see quantization.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.formats import FORMATS, storage
from megalite_kernels.launch import tile

TILE = 2048  # elements per tile; also the largest block

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def quantized(
    values: tl.tensor,
    seed: tl.tensor,
    first: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Quantize fp32 [rows, block] in registers to codes in int32 [rows, block] and scales [rows].

    `first`: index of each row's first element in the full tensor, int64 [rows].
    """
    bits = values.to(tl.int32, bitcast=True)
    top = tl.max(bits & 0x7FFFFFFF, 1)
    finite = top < 0x7F800000
    quotients = tl.div_rn(top.to(tl.float32, bitcast=True), LARGEST)
    scales = (quotients.to(tl.int32, bitcast=True) & -128).to(tl.float32, bitcast=True)
    scales = tl.where(scales >= 2.0 ** (MANTISSA - LOWEST - 126), scales, 0.0)
    bits = tl.where(finite[:, None], bits, 0)
    positive = (bits & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    inverses = tl.div_rn(1.0, tl.where(scales > 0.0, scales, float("inf")))
    scaled = tl.minimum(positive * inverses[:, None], LARGEST)
    exponent = tl.maximum(scaled.to(tl.int32, bitcast=True) >> 23, 127 + LOWEST)
    unit = (exponent + (23 - MANTISSA - 14 * STOCHASTIC)) << 23
    steps = (scaled + unit.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) - unit
    if STOCHASTIC:
        ROWS: tl.constexpr = values.shape[0]
        BLOCK: tl.constexpr = values.shape[1]
        counter = (first >> 3)[:, None] + tl.arange(0, BLOCK // 8)[None, :]
        a, b, c, d = tl.randint4x(seed, counter)
        words = tl.join(tl.join(a, c), tl.join(b, d))
        random = tl.join(words & 0xFFFF, words >> 16).reshape(ROWS, BLOCK)
        steps = (steps + (random >> 2).to(tl.int32)) >> 14
    codes = ((exponent - (127 + LOWEST)) << MANTISSA) + steps
    codes = tl.where(bits < 0, -codes if MANTISSA == 7 else codes | 0x80, codes)
    return codes, tl.where(finite, scales, float("nan"))


@triton.jit
def dequantized(codes: tl.tensor, scales: tl.tensor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr) -> tl.tensor:
    """Return stored codes [rows, block] in registers times scales [rows], in fp32 [rows, block]."""
    codes = codes.to(tl.int32)
    if MANTISSA == 7:
        return codes.to(tl.float32) * scales[:, None]
    field = (codes & 0x7F) >> MANTISSA
    steps = (codes & ((1 << MANTISSA) - 1)) + ((field > 0).to(tl.int32) << MANTISSA)
    unit = ((tl.maximum(field, 1) + (126 + LOWEST - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    positive = steps.to(tl.float32) * unit * scales[:, None]
    sign = (codes & 0x80) << 24  # set as a bit, so that zero keeps its sign, too
    return (positive.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["elements", "seed", "offset"])
def _quantize(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    elements: tl.tensor,
    seed: tl.int64,
    offset: tl.int64,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize ROWS blocks per program. WHOLE is False if the last block of the tensor is short."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(elements, BLOCK)
    inside = present[:, None] if WHOLE else place < elements
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    found, scale = quantized(x, seed, offset + row * BLOCK, MANTISSA, LOWEST, LARGEST, STOCHASTIC)
    tl.store(codes + place, found.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=present)


@triton.jit(do_not_specialize=["elements"])
def _dequantize(
    codes: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    elements: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    WHOLE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Dequantize ROWS blocks per program. WHOLE is False if the last block of the tensor is short."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(elements, BLOCK)
    inside = present[:, None] if WHOLE else place < elements
    found = tl.load(codes + place, mask=inside, other=0)
    x = dequantized(found, tl.load(scales + row, mask=present, other=0.0), MANTISSA, LOWEST)
    tl.store(values + place, x.to(values.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- launchers


def launch_quantize(
    values: Tensor, format: torch.dtype, block: int, seed: int | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the codes [elements] and the fp32 scales [blocks]. A seed of None rounds to nearest."""
    flat = values.reshape(-1).contiguous()
    blocks, shape = -(-len(flat) // block), tile(block, largest=TILE)
    codes = torch.empty(len(flat), dtype=format, device=values.device)
    scales = torch.empty(blocks, dtype=torch.float32, device=values.device)
    signed = ((seed or 0) + 2**63) % 2**64 - 2**63  # the int64 number with the same bits
    if blocks:
        _quantize[(-(-blocks // shape.rows),)](
            *(flat, codes.view(storage(format)), scales, len(flat), signed, offset, *FORMATS[format]),
            *(seed is not None, len(flat) % block == 0, shape.rows, block),
            num_warps=shape.warps,
        )
    return codes, scales


def launch_dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    shape = tile(block, largest=TILE)
    values = torch.empty(len(codes), dtype=dtype, device=codes.device)
    if len(codes):
        _dequantize[(-(-len(scales) // shape.rows),)](
            *(codes.contiguous().view(storage(codes.dtype)), scales.contiguous(), values, len(codes)),
            *(*FORMATS[codes.dtype][:2], len(codes) % block == 0, shape.rows, block),
            num_warps=shape.warps,
        )
    return values
