"""Moments of gradients in 8 bits: codes in blocks of 256 elements, with one scale per block (`quantization`).

An average of squares is stored as its square root, which spans half as many orders of magnitude. A root above zero is
never rounded to zero, because the update divides by it. Updates round stochastically: most steps change an average by
less than half the distance between two codes, and rounding to nearest would always lose such a change.

Values that are read and written back, rounded to nearest, keep every code and scale. This needs the root of the fp32
square of a root to be exact, so blocks whose smallest root has a subnormal square are set to zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite_kernels import launch
from megalite_kernels.formats import FORMATS
from megalite_kernels.quantization import dequantize, quantize

BLOCK = 256  # elements that share a scale


@dataclass(frozen=True)
class Quantized:
    """A moment in 8 bits, flat.

    Attributes:
        codes: [elements].
        scales: one per block; the last block may be short.
        root: True for an average of squares, which is stored as its square root.
    """

    codes: Tensor
    scales: Tensor
    root: bool

    @staticmethod
    def zeros(like: Tensor, format: torch.dtype, *, root: bool) -> Quantized:
        codes = torch.zeros_like(like, dtype=torch.int8).view(format)
        return Quantized(codes, like.new_zeros(-(-len(like) // BLOCK), dtype=torch.float32), root)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, part: slice) -> Quantized:
        """Return a view of elements, the first of which begins a block."""
        start, stop, _ = part.indices(len(self))
        if start % BLOCK:
            raise ValueError(f"element {start} does not begin a block of {BLOCK}")
        return Quantized(self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)], self.root)

    @property
    def bytes(self) -> Tensor:
        """The codes as integers, because Triton supports fp8 only on some GPUs."""
        return self.codes if self.codes.dtype == torch.int8 else self.codes.view(torch.uint8)

    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.codes, self.scales

    def read(self, start: int, stop: int) -> Tensor:
        """Return the elements [start, stop) in fp32."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        codes = self.codes[first * BLOCK : stop]
        values = dequantize(codes, self.scales[first:last], BLOCK, torch.float32)[start - first * BLOCK :]
        return values.square_() if self.root else values

    def write(self, values: Tensor) -> None:
        """Set all elements from fp32 values on any device, rounded to nearest."""
        size = launch.chunk_elements(self.codes.device)
        for start in range(0, len(self), size):
            self.set(values[start : start + size].to(self.codes.device), start)

    def set(self, values: Tensor, start: int, *, seed: int | None = None, offset: int = 0) -> None:
        """Quantize fp32 values into the elements from `start` on, a multiple of BLOCK.

        Args:
            seed: seed of stochastic rounding; None rounds to nearest.
            offset: as in `quantize`.
        """
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
    """Return the smallest scale for which the square of the smallest code is a normal fp32 number."""
    mantissa, lowest, _ = FORMATS[format]
    return 2.0 ** (mantissa - lowest - 63)
