"""bf16 and fp8 in numpy, which has neither, as a GPU converts them."""

from __future__ import annotations

import numpy as np
import torch


def rounded(values: np.ndarray) -> np.ndarray:
    """The bf16 numbers nearest to fp32 ones, ties to even, as fp32."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(values), values, nearest.view(np.float32)).astype(np.float32).reshape(np.shape(values))


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def to_bf16(values: np.ndarray) -> np.ndarray:
    return (rounded(values).view(np.uint32) >> 16).astype(np.uint16)


def from_fp8(bits: np.ndarray, format: torch.dtype) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(format).float().numpy().reshape(np.shape(bits))


def to_fp8(values: np.ndarray, format: torch.dtype) -> np.ndarray:
    """To nearest, ties to even; what is beyond the largest number, infinities among it, becomes that.

    So NVIDIA's GPUs convert (PTX: cvt.rn.satfinite); torch makes NaN of e4m3fn and infinities of e5m2 there.
    """
    largest = torch.finfo(format).max
    wide = torch.from_numpy(np.ascontiguousarray(values, np.float32)).clamp(-largest, largest)
    return wide.to(format).view(torch.uint8).numpy().reshape(np.shape(values))
