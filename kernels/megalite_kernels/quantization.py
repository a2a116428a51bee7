"""Blockwise quantisation: flat tensors as codes of 8 bits, with one fp32 scale for each block of consecutive elements.

An element is code * scale, and the largest of a block has the largest code: 127 of int8, 448 of fp8 e4m3fn, 57344 of
e5m2 (arXiv:2110.02861 and arXiv:2209.05433 tell where that is enough). A scale has 17 significant bits, so that code *
scale is exact in fp32, whatever a compiler fuses it with. What was quantised once and comes again keeps each code and
scale, however it is rounded. The same code is for int8 and fp8: an integer is a number whose exponent is its lowest.

Rounding is to nearest, ties to even, or stochastic: up with a probability of the distance from the code below, in
steps of 2^-14, by the random numbers of Philox-4x32-10 (Salmon et al., SC'11) with the seed as the key. Element i of
the whole has the i-th 16 bits, little end first, of the outputs for the counters 0, 1, 2 and so on.

Of normal numbers in blocks of 256, the root mean square error is, relative to theirs and rounded to nearest or
stochastically, 0.70 % or 0.98 % in int8, 2.6 % or 3.7 % in e4m3fn, and 5.2 % or 7.4 % in e5m2.

A block with an infinity or no number has no number for its scale and comes back as such. A block whose smallest steps
would be fp32's subnormal numbers comes back as zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import tile

if TYPE_CHECKING:
    import triton.language as tl

TILE = 2048  # elements, and the largest block
GROUP = 8  # elements that share a counter


class Format(NamedTuple):
    """How a code is made: of a number's exponent, above the lowest, and the bits of its mantissa."""

    mantissa: int
    lowest: int
    largest: float


FORMATS = {
    torch.int8: Format(7, 7, 127.0),
    torch.float8_e4m3fn: Format(3, -6, 448.0),
    torch.float8_e5m2: Format(2, -14, 57344.0),
}

# ------------------------------------------------------------------------------------------------- the reference


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Philox-4x32-10: four words of 32 bits, each in int64, for each four of a counter."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(10):
        products = 0xD2511F53 * first, 0xCD9E8D57 * third
        first, third = (
            (product >> 32 & 0xFFFFFFFF) ^ other ^ word
            for product, other, word in ((products[1], second, low), (products[0], fourth, high))
        )
        second, fourth = products[1] & 0xFFFFFFFF, products[0] & 0xFFFFFFFF
        low, high = low + 0x9E3779B9 & 0xFFFFFFFF, high + 0xBB67AE85 & 0xFFFFFFFF
    return [first, second, third, fourth]


def _random_bits(elements: int, seed: int, offset: int, device: torch.device) -> Tensor:
    """16 for each element, in int32."""
    counters = torch.arange(offset // GROUP, (offset + elements) // GROUP, device=device)
    zeros = torch.zeros_like(counters)
    counter = [counters & 0xFFFFFFFF, counters >> 32, zeros, zeros]
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), dim=-1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten().int()


def quantize_reference(
    values: Tensor, format: torch.dtype, block: int, seed: int | None, offset: int
) -> tuple[Tensor, Tensor]:
    mantissa, lowest, largest = FORMATS[format]
    flat = values.flatten().to(torch.float32)
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    top = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(1) if len(blocks) else blocks.new_empty(0, dtype=torch.int32)
    finite = top < 0x7F800000
    # By a tensor: on a GPU torch divides by a number as it multiplies by its inverse.
    quotients = top.view(torch.float32) / torch.full_like(top, largest, dtype=torch.float32)
    scales = (quotients.view(torch.int32) & -128).view(torch.float32)
    scales = torch.where(scales >= 2.0 ** (mantissa - lowest - 126), scales, 0.0)
    blocks = torch.where(finite[:, None], blocks, 0.0)
    inverses = 1.0 / torch.where(scales > 0.0, scales, float("inf"))
    scaled = (blocks.abs() * inverses[:, None]).clamp(max=largest)
    exponent = (scaled.view(torch.int32) >> 23).clamp(min=127 + lowest)
    fraction = 0 if seed is None else 14
    unit = (exponent - mantissa + 23 - fraction) << 23
    steps = (scaled + unit.view(torch.float32)).view(torch.int32) - unit
    if seed is not None:
        random = _random_bits(blocks.numel(), seed, offset, values.device).view_as(steps)
        steps = (steps + (random >> 2)) >> 14
    codes = ((exponent - 127 - lowest) << mantissa) + steps
    negative = blocks.view(torch.int32) < 0
    codes = torch.where(negative, -codes, codes) if format == torch.int8 else codes | negative.int() << 7
    kept = codes.flatten()[: len(flat)].to(_storage(format)).view(format)
    return kept, torch.where(finite, scales, float("nan"))


def dequantize_reference(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales.repeat_interleave(block)[: len(codes)]).to(dtype)


# ------------------------------------------------------------------------------------------------- the kernels


@kernel
def quantized(
    values: tl.tensor,
    seed: tl.tensor,
    first: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Of fp32 [rows, block] in registers, codes in int32 [rows, block] and scales [rows].

    `first`: the number of each row's first element in the whole, int64 [rows].
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


@kernel
def dequantized(codes: tl.tensor, scales: tl.tensor, MANTISSA: tl.constexpr, LOWEST: tl.constexpr) -> tl.tensor:
    """Of codes [rows, block] in registers, as they lie in memory, and scales [rows], fp32 [rows, block]."""
    codes = codes.to(tl.int32)
    if MANTISSA == 7:
        return codes.to(tl.float32) * scales[:, None]
    field = (codes & 0x7F) >> MANTISSA
    steps = (codes & ((1 << MANTISSA) - 1)) + ((field > 0).to(tl.int32) << MANTISSA)
    unit = ((tl.maximum(field, 1) + (126 + LOWEST - MANTISSA)) << 23).to(tl.float32, bitcast=True)
    positive = steps.to(tl.float32) * unit * scales[:, None]
    sign = (codes & 0x80) << 24  # also of zero, which a difference would lose
    return (positive.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@kernel
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
    """Each program has ROWS blocks; the last of all is short where they are not WHOLE."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(elements, BLOCK)
    inside = present[:, None] if WHOLE else place < elements
    x = tl.load(values + place, mask=inside, other=0.0).to(tl.float32)
    found, scale = quantized(x, seed, offset + row * BLOCK, MANTISSA, LOWEST, LARGEST, STOCHASTIC)
    tl.store(codes + place, found.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=present)


@kernel
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
    """Each program has ROWS blocks; the last of all is short where they are not WHOLE."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(elements, BLOCK)
    inside = present[:, None] if WHOLE else place < elements
    found = tl.load(codes + place, mask=inside, other=0)
    x = dequantized(found, tl.load(scales + row, mask=present, other=0.0), MANTISSA, LOWEST)
    tl.store(values + place, x.to(values.dtype.element_ty), mask=inside)


# ------------------------------------------------------------------------------------------------- what is called


def quantize(
    values: Tensor, format: torch.dtype, block: int, *, seed: int | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Flat codes of this dtype and fp32 scales [blocks] for a tensor of any shape, in its order; the last may be short.

    Args:
        values: in fp32, bf16 or fp16; fp64 is rounded to fp32 first.
        format: torch.int8, float8_e4m3fn or float8_e5m2.
        block: elements that share a scale: a power of two, 128 to 2048.
        seed: rounds stochastically, by 64 bits; None: to nearest.
        offset: the place of the first element in the whole that draws by this seed, a multiple of 8.

    Raises:
        ValueError: there is no such format or block, or the offset is no multiple of 8.
    """
    _check(format, block)
    if offset % GROUP:
        raise ValueError(f"an offset of {offset}: {GROUP} elements share a random number, so it is a multiple of it")
    if not runs_triton("quantization", values):
        return quantize_reference(values, format, block, seed, offset)
    flat = values.reshape(-1).contiguous()
    blocks, shape = -(-len(flat) // block), tile(block, largest=TILE)
    codes = torch.empty(len(flat), dtype=format, device=values.device)
    scales = torch.empty(blocks, dtype=torch.float32, device=values.device)
    if blocks:
        _quantize[(-(-blocks // shape.rows),)](
            *(flat, codes.view(_storage(format)), scales, len(flat), _signed(seed or 0), offset, *FORMATS[format]),
            *(seed is not None, len(flat) % block == 0, shape.rows, block),
            num_warps=shape.warps,
        )
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """What `quantize` made of flat values, in this dtype.

    Raises:
        ValueError: there is no such format or block, or the scales are not one for each block.
    """
    _check(codes.dtype, block)
    if len(scales) != -(-len(codes) // block):
        raise ValueError(f"{len(scales)} scales for {len(codes)} codes in blocks of {block}")
    if dtype == torch.float64 or not runs_triton("quantization", codes, scales):
        return dequantize_reference(codes, scales, block, dtype)
    shape = tile(block, largest=TILE)
    values = torch.empty(len(codes), dtype=dtype, device=codes.device)
    if len(codes):
        _dequantize[(-(-len(scales) // shape.rows),)](
            *(codes.contiguous().view(_storage(codes.dtype)), scales.contiguous(), values, len(codes)),
            *(*FORMATS[codes.dtype][:2], len(codes) % block == 0, shape.rows, block),
            num_warps=shape.warps,
        )
    return values


def _check(format: torch.dtype, block: int) -> None:
    if format not in FORMATS:
        raise ValueError(f"{format} is no format of codes; choose one of {', '.join(map(str, FORMATS))}")
    if block not in (128, 256, 512, 1024, 2048):
        raise ValueError(f"blocks of {block} elements; choose a power of two from 128 to 2048")


def _storage(format: torch.dtype) -> torch.dtype:
    """What kernels see: Triton has fp8 on some GPUs alone, and codes are made of integers."""
    return torch.int8 if format == torch.int8 else torch.uint8


def _signed(seed: int) -> int:
    """The same 64 bits as a number of int64."""
    return (seed + 2**63) % 2**64 - 2**63
