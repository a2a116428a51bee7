"""Blockwise quantization: flat tensors as 8-bit codes, with one fp32 scale per block of consecutive elements.

An element is code * scale. The largest element of a block gets the largest code: 127 in int8, 448 in fp8 e4m3fn, 57344
in e5m2 (arXiv:2110.02861 and arXiv:2209.05433 show where this is precise enough). A scale has 17 significant bits, so
code * scale is exact in fp32, even if the compiler fuses it with other operations. Quantizing dequantized values again
gives the same codes and scales, under either rounding. The same algorithm serves int8 and fp8: an integer is treated as
a float that always has the lowest exponent.

Rounding is to nearest (ties to even) or stochastic. Stochastic rounding goes up with a probability equal to the
distance from the code below, in steps of 2^-14. Its random numbers are those of Philox-4x32-10 (Salmon et al., SC'11)
with the seed as the key. Element i of the full tensor uses the i-th 16 bits, in little-endian order, of the outputs for
the counters 0, 1, 2 and so on.

The relative root mean square error for normally distributed values in blocks of 256, to nearest and stochastic: 0.70 %
and 0.98 % in int8, 2.6 % and 3.7 % in e4m3fn, 5.2 % and 7.4 % in e5m2.

A block that contains an infinity or a NaN has the scale NaN and is dequantized to NaN. A block whose smallest steps
would be subnormal in fp32 is dequantized to zeros.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.formats import FORMATS, storage
from megalite_kernels.implementation import current

GROUP = 8  # elements that share a counter


# ------------------------------------------------------------------------------------------------- the reference


def philox(counter: list[Tensor], key: tuple[int, int]) -> list[Tensor]:
    """Compute Philox-4x32-10: four 32-bit words for each counter of four words, each word in an int64."""
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
    """Return 16 random bits per element, in int32."""
    counters = torch.arange(offset // GROUP, (offset + elements) // GROUP, device=device)
    zeros = torch.zeros_like(counters)
    counter = [counters & 0xFFFFFFFF, counters >> 32, zeros, zeros]
    words = torch.stack(philox(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)), dim=-1)
    return torch.stack((words & 0xFFFF, words >> 16), dim=-1).flatten().int()


def block_scales(blocks: Tensor, format: torch.dtype) -> Tensor:
    """Return the scales of fp32 blocks [..., block]: NaN with an infinity or a NaN, 0 with steps that are subnormal."""
    mantissa, lowest, largest = FORMATS[format]
    top = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(-1) if blocks.numel() else blocks.new_empty(0, dtype=torch.int32)
    # The divisor is a tensor: on a GPU, torch divides by a Python number by multiplying with its inverse, which rounds.
    quotients = top.view(torch.float32) / torch.full_like(top, largest, dtype=torch.float32)
    scales = (quotients.view(torch.int32) & -128).view(torch.float32)
    scales = torch.where(scales >= 2.0 ** (mantissa - lowest - 126), scales, 0.0)
    return torch.where(top < 0x7F800000, scales, float("nan"))


def inverses(scales: Tensor) -> Tensor:
    """Return the inverses of scales; 0 of 0 and of NaN."""
    return 1.0 / torch.where(scales > 0.0, scales, float("inf"))


def quantize_reference(
    values: Tensor, format: torch.dtype, block: int, seed: int | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Return the codes [elements] and scales [blocks] of `quantize`, computed on the bits of the numbers."""
    mantissa, lowest, largest = FORMATS[format]
    flat = values.flatten().to(torch.float32)
    blocks = F.pad(flat, (0, -len(flat) % block)).view(-1, block)
    scales = block_scales(blocks, format)
    blocks = torch.where(scales.isnan()[:, None], 0.0, blocks)
    scaled = (blocks.abs() * inverses(scales)[:, None]).clamp(max=largest)
    exponent = (scaled.view(torch.int32) >> 23).clamp(min=127 + lowest)
    fraction = 0 if seed is None else 14
    # Adding the float `unit` rounds to a whole number of steps (of 2^-14 steps if stochastic), found in the low bits.
    unit = (exponent - mantissa + 23 - fraction) << 23
    steps = (scaled + unit.view(torch.float32)).view(torch.int32) - unit
    if seed is not None:
        random = _random_bits(blocks.numel(), seed, offset, values.device).view_as(steps)
        steps = (steps + (random >> 2)) >> 14
    codes = ((exponent - 127 - lowest) << mantissa) + steps
    negative = blocks.view(torch.int32) < 0
    codes = torch.where(negative, -codes, codes) if format == torch.int8 else codes | negative.int() << 7
    kept = codes.flatten()[: len(flat)].to(storage(format)).view(format)
    return kept, scales


def dequantize_reference(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    return (codes.float() * scales.repeat_interleave(block)[: len(codes)]).to(dtype)


# ------------------------------------------------------------------------------------------------- public functions


def quantize(
    values: Tensor, format: torch.dtype, block: int, *, seed: int | None = None, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """Quantize a tensor of any shape, in row-major order. The last block may be short.

    Args:
        values: values in fp32, bf16 or fp16; fp64 is rounded to fp32 first.
        format: torch.int8, float8_e4m3fn or float8_e5m2.
        block: elements per scale: a power of two from 128 to 2048.
        seed: 64-bit seed of stochastic rounding; None rounds to nearest.
        offset: index of the first element in the full tensor that shares this seed, a multiple of 8.

    Returns:
        Flat codes of dtype `format`, and fp32 scales [blocks].

    Raises:
        ValueError: there is no such format or block size, or the offset is not a multiple of 8.
    """
    _check(format, block)
    if offset % GROUP:
        raise ValueError(f"an offset of {offset}: must be a multiple of {GROUP}, which share a random number")
    if not current().runs_triton("quantization", values):
        return quantize_reference(values, format, block, seed, offset)
    from megalite_kernels.quantization_kernels import launch_quantize

    return launch_quantize(values, format, block, seed, offset)


def dequantize(codes: Tensor, scales: Tensor, block: int, dtype: torch.dtype) -> Tensor:
    """Return the flat values of codes and scales from `quantize`, in this dtype.

    Raises:
        ValueError: there is no such format or block size, or there is not one scale per block.
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
        raise ValueError(f"{format} is not a format of codes; choose one of {', '.join(map(str, FORMATS))}")
    if block not in (128, 256, 512, 1024, 2048):
        raise ValueError(f"blocks of {block} elements; choose a power of two from 128 to 2048")
