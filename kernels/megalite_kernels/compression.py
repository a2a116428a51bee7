"""Compression of gradients: int8 and fp8 codes with what they leave out, and the elements above a threshold.

Both work on [parts, length], each part by itself, and wait for nothing on the host. Codes and scales are those of
`quantization` in blocks of BLOCK elements; a part's last block may be short. Code * scale is exact in fp32, and so is
the residual, value - code * scale: a value is at least half as large as its code's, or the code is zero.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from megalite_kernels.formats import FORMATS
from megalite_kernels.implementation import current, on_gpu
from megalite_kernels.quantization import block_scales, inverses

BLOCK = 256
PIECE = 1 << 16  # elements that the references process at once on a CPU, so that they stay in the cache

# ------------------------------------------------------------------------------------------------- the reference


def quantize_rows_reference(values: Tensor, codes: Tensor, scales: Tensor, residual: Tensor | None) -> None:
    """Write the codes, scales and residual of `quantize_rows`, a few blocks at a time."""
    largest = FORMATS[codes.dtype].largest
    for first, last in _pieces(values):
        width = min(BLOCK, last - first)
        blocks = values[:, first:last].unflatten(1, (-1, width))
        narrow = blocks.to(torch.float32)
        found = block_scales(narrow, codes.dtype)
        scaled = (narrow * inverses(found)[..., None]).nan_to_num_(0.0).clamp_(-largest, largest)
        written = codes[:, first:last].unflatten(1, (-1, width))
        written.copy_(scaled.round_() if codes.dtype == torch.int8 else scaled)
        scales[:, first // BLOCK : -(-last // BLOCK)].copy_(found)
        if residual is not None:
            restored = scaled.copy_(written).mul_(found[..., None])
            torch.sub(blocks, restored, out=residual[:, first:last].unflatten(1, (-1, width)))


def dequantize_rows_reference(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    for first, last in _pieces(codes):
        width = min(BLOCK, last - first)
        wide = codes[:, first:last].to(torch.float32).unflatten(1, (-1, width))
        wide.mul_(scales[:, first // BLOCK : -(-last // BLOCK), None])
        values[:, first:last].unflatten(1, (-1, width)).copy_(wide)


def _pieces(values: Tensor) -> list[tuple[int, int]]:
    """Return ranges of columns: whole blocks that fit in the cache together, then the short block."""
    parts, length = values.shape
    whole = length - length % BLOCK
    size = max(whole, BLOCK) if on_gpu(values) else max(PIECE // max(parts, 1) // BLOCK * BLOCK, BLOCK)
    edges = [*range(0, whole, size), whole, *([length] if whole < length else [])]
    return [(first, last) for first, last in itertools.pairwise(edges) if first < last]


def compact_reference(values: Tensor, thresholds: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    length = values.shape[1]
    passed = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    for first, last in _pieces(values):
        torch.ge(values[:, first:last].abs(), thresholds[:, None], out=passed[:, first:last])
    found = [torch.nonzero_static(row, size=capacity, fill_value=length)[:, 0] for row in passed]
    indices = torch.stack(found)
    kept = values.gather(1, indices.clamp(max=length - 1))
    return indices.to(torch.int32), torch.where(indices < length, kept, 0.0)


# ------------------------------------------------------------------------------------------------- public functions


def quantize_rows(values: Tensor, codes: Tensor, scales: Tensor, residual: Tensor | None = None) -> None:
    """Quantize into `codes` and `scales`, rounded to nearest, and write what is left out into `residual`.

    A block with an infinity or a NaN has the scale NaN and the residual NaN.

    Args:
        values: [parts, length], with contiguous rows; fp64 is rounded to fp32 first.
        codes: [parts, length], int8 or fp8, rows of any stride.
        scales: fp32 [parts, blocks], rows of any stride.
        residual: [parts, length], contiguous, of the values' dtype.
    """
    if not current().runs_triton("compression", values):
        return quantize_rows_reference(values, codes, scales, residual)
    from megalite_kernels.compression_kernels import launch_quantize_rows

    return launch_quantize_rows(values, codes, scales, residual, BLOCK)


def dequantize_rows(codes: Tensor, scales: Tensor, values: Tensor) -> None:
    """Write code * scale into `values`, contiguous [parts, length] of any dtype, from `quantize_rows`' results."""
    if not current().runs_triton("compression", values):
        return dequantize_rows_reference(codes, scales, values)
    from megalite_kernels.compression_kernels import launch_dequantize_rows

    return launch_dequantize_rows(codes, scales, values, BLOCK)


def compact(values: Tensor, thresholds: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Find the first `capacity` elements of each part with a magnitude of at least its threshold.

    Args:
        values: contiguous [parts, length], length at least 1.
        thresholds: [parts], of the values' dtype. NaN lets nothing pass.

    Returns:
        Indices in int32 and values, [parts, capacity], in the order of indices. What is not filled has the index
        `length` and the value 0.
    """
    if not current().runs_triton("compression", values):
        return compact_reference(values, thresholds, capacity)
    from megalite_kernels.compression_kernels import launch_compact

    return launch_compact(values, thresholds, capacity)
