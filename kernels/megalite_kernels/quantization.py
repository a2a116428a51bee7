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

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current

GROUP = 8  # elements that share a counter


class Format(NamedTuple):
    """Layout of a code: a number's exponent, above the lowest, and the bits of its mantissa."""

    mantissa: int
    lowest: int
    largest: float


FORMATS = {
    torch.int8: Format(7, 7, 127.0),
    torch.float8_e4m3fn: Format(3, -6, 448.0),
    torch.float8_e5m2: Format(2, -14, 57344.0),
}


def storage(format: torch.dtype) -> torch.dtype:
    """Return the dtype that kernels see: Triton has fp8 on some GPUs alone, and codes are made of integers."""
    return torch.int8 if format == torch.int8 else torch.uint8


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
    kept = codes.flatten()[: len(flat)].to(storage(format)).view(format)
    return kept, torch.where(finite, scales, float("nan"))


def dequantize_reference(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales.repeat_interleave(block)[: len(codes)]).to(dtype)


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
    if not current().runs_triton("quantization", values):
        return quantize_reference(values, format, block, seed, offset)
    from megalite_kernels.quantization_kernels import launch_quantize

    return launch_quantize(values, format, block, seed, offset)


def dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return the flat values that `quantize` encoded, in this dtype.

    Raises:
        ValueError: there is no such format or block, or the scales are not one for each block.
    """
    _check(codes.dtype, block)
    if len(scales) != -(-len(codes) // block):
        raise ValueError(f"{len(scales)} scales for {len(codes)} codes in blocks of {block}")
    if dtype == torch.float64 or not current().runs_triton("quantization", codes, scales):
        return dequantize_reference(codes, scales, block, dtype)
    from megalite_kernels.quantization_kernels import launch_dequantize

    return launch_dequantize(codes, scales, block, dtype)


def _check(format: torch.dtype, block: int) -> None:
    if format not in FORMATS:
        raise ValueError(f"{format} is no format of codes; choose one of {', '.join(map(str, FORMATS))}")
    if block not in (128, 256, 512, 1024, 2048):
        raise ValueError(f"blocks of {block} elements; choose a power of two from 128 to 2048")
