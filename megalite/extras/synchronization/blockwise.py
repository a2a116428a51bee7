"""Narrower numbers: casts, codes in blocks, and signs.

Each method but the last restores a value to its nearest number, or to zero. The difference from that is exact in the
value's own dtype (Sterbenz), so value = restored + residual holds bit for bit. Values in float64 are rounded to float32
first; those beyond its range become infinities.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalite.extras.synchronization.compressor import Compressor, Field
from megalite_kernels.compression import BLOCK, dequantize_rows, quantize_rows

SIGN_BLOCK = 2048  # elements that share a magnitude: 1.6 % more bytes than signs alone


class BFloat16(Compressor):
    """Values as bf16. Above 3.39e38 they become infinities."""

    def fields(self, length: int) -> list[Field]:
        return [(length, torch.bfloat16)]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (narrow,) = self.allocate(values)
        narrow.copy_(values)
        return packed

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        (narrow,) = self.views(packed, length)
        return narrow.to(dtype)


class Float16(Compressor):
    """Values as fp16 times a power of two per block, so that the largest is between 2^14 and 2^15."""

    def fields(self, length: int) -> list[Field]:
        return [(length, torch.float16), (-(-length // BLOCK), torch.float32)]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (narrow, scales) = self.allocate(values)
        wide = in_blocks(values.to(torch.float32), BLOCK)
        exponents = ((wide.view(torch.int32) & 0x7FFFFFFF).amax(2) >> 23).sub_(14).clamp_(min=1)
        scales.copy_((exponents << 23).view(torch.float32))
        inverses = (254 - exponents << 23).view(torch.float32)
        narrow.copy_((wide * inverses[..., None]).flatten(1)[:, : values.shape[1]])
        return packed

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        narrow, scales = self.views(packed, length)
        wide = in_blocks(narrow.to(torch.float32), BLOCK) * scales[..., None]
        return wide.flatten(1)[:, :length].to(dtype).contiguous()


@dataclass(frozen=True)
class Blockwise(Compressor):
    """Codes of 8 bits with a scale per block (arXiv:2110.02861).

    Attributes:
        format: torch.int8 or torch.float8_e4m3fn.
    """

    format: torch.dtype

    def fields(self, length: int) -> list[Field]:
        return [(length, self.format), (-(-length // BLOCK), torch.float32)]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (codes, scales) = self.allocate(values)
        quantize_rows(values, codes, scales)
        return packed

    def pack_with_residual(self, values: Tensor, key: int) -> tuple[Tensor, Tensor]:
        packed, (codes, scales) = self.allocate(values)
        residual = torch.empty_like(values)
        quantize_rows(values, codes, scales, residual)
        return packed, residual

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        codes, scales = self.views(packed, length)
        values = torch.empty(codes.shape, dtype=dtype, device=packed.device)
        dequantize_rows(codes, scales, values)
        return values


class Sign(Compressor):
    """Signs, one bit each, times the mean magnitude of their block (arXiv:1802.04434, scaled as arXiv:1901.09847)."""

    def fields(self, length: int) -> list[Field]:
        return [(-(-length // 8), torch.uint8), (-(-length // SIGN_BLOCK), torch.float32)]

    def pack(self, values: Tensor, key: int) -> Tensor:
        packed, (signs, scales) = self.allocate(values)
        length, weights = values.shape[1], _bit_weights(values.device)
        sizes = torch.ones(scales.shape[1], dtype=values.dtype, device=values.device)
        sizes[-1] = (length - SIGN_BLOCK * (scales.shape[1] - 1)) / SIGN_BLOCK
        # Divided before they are added, so that the sum of large values does not overflow.
        scales.copy_((in_blocks(values.abs(), SIGN_BLOCK) / SIGN_BLOCK).sum(2) / sizes)
        negative = in_blocks((values < 0).to(torch.uint8), 8)
        signs.copy_((negative << weights).sum(2, dtype=torch.uint8))
        return packed

    def restore(self, packed: Tensor, length: int, dtype: torch.dtype, key: int) -> Tensor:
        signs, scales = self.views(packed, length)
        negative = (signs[..., None] >> _bit_weights(packed.device) & 1).flatten(1).to(dtype)
        wide = in_blocks(1.0 - 2.0 * negative, SIGN_BLOCK) * scales[..., None].to(dtype)
        return wide.flatten(1)[:, :length].contiguous()


def in_blocks(values: Tensor, size: int) -> Tensor:
    """View [parts, length] as [parts, blocks, size], with zeros at the end of the last block."""
    short = -values.shape[1] % size
    return (pad(values, (0, short)) if short else values).unflatten(1, (-1, size))


def _bit_weights(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
