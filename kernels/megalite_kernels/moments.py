"""Moments of gradients in 8 bits: codes in blocks of 256 elements with a scale each (`quantization`).

An average of squares is kept by its root, which has half as many orders of magnitude, and none that is above zero is
rounded down to it: divided by a root that was lost, an update would have no bound. Rounding is stochastic, since what a
step adds to an average is mostly less than half the distance of two codes and would be lost each time. Values that are
read and written again, to nearest, keep each code and scale: a root is exact, and so is the root of its fp32 square, as
blocks whose least root has no normal square are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.quantization import FORMATS, dequantize, quantize

BLOCK = 256  # elements that share a scale


@dataclass(frozen=True)
class Quantized:
    """A moment of flat [elements]."""

    codes: Tensor
    scales: Tensor
    """One for each block; the last may be short."""
    root: bool
    """True for an average of squares, which is kept as its root."""

    @staticmethod
    def zeros(elements: int, format: torch.dtype, device: torch.device, *, root: bool) -> Quantized:
        codes = torch.zeros(elements, dtype=torch.int8, device=device).view(format)
        return Quantized(codes, torch.zeros(-(-elements // BLOCK), device=device), root)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def bytes(self) -> Tensor:
        """The codes as kernels see them: Triton has fp8 on some GPUs alone."""
        return self.codes if self.codes.dtype == torch.int8 else self.codes.view(torch.uint8)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop), in fp32."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        codes = self.codes[first * BLOCK : stop]
        values = dequantize(codes, self.scales[first:last], BLOCK, torch.float32)[start - first * BLOCK :]
        return values.square_() if self.root else values

    def write(self, values: Tensor) -> None:
        """Set all elements, to nearest, from fp32 on any device."""
        size = launch.chunk_elements(self.codes.device)
        for start in range(0, len(self), size):
            self.set(values[start : start + size].to(self.codes.device), start)

    def set(self, values: Tensor, start: int, *, seed: int | None = None, offset: int = 0) -> None:
        """Round fp32 values into the elements from `start` on, a multiple of BLOCK: to nearest, or by a seed."""
        blocks = slice(start // BLOCK, -(-(start + len(values)) // BLOCK))
        wide = values.sqrt() if self.root else values
        codes, scales = quantize(wide, self.codes.dtype, BLOCK, seed=seed, offset=offset)
        if self.root:
            scales.masked_fill_(scales < least_scale(self.codes.dtype), 0.0)
            each, bits = scales.repeat_interleave(BLOCK)[: len(values)], codes.view(torch.int8)
            bits.masked_fill_(each == 0.0, 0).masked_fill_((bits == 0) & (wide > 0.0) & (each > 0.0), 1)
        self.codes[start : start + len(values)].view(torch.int8).copy_(codes.view(torch.int8))
        self.scales[blocks].copy_(scales)


def least_scale(format: torch.dtype) -> float:
    """At which the square of the least code is a normal number of fp32."""
    mantissa, lowest, _ = FORMATS[format]
    return 2.0 ** (mantissa - lowest - 63)
