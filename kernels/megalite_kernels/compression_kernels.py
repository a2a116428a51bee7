"""Triton kernels of the compression of gradients, and their launchers: see compression.py.

Compaction needs no atomic operation: one kernel counts what passes in each tile, a sum over tiles gives each one's
first place, and a second kernel reads the tiles again and writes to these places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.formats import FORMATS, storage
from megalite_kernels.launch import tile, unit
from megalite_kernels.quantization_kernels import TILE, dequantized, quantized

COMPACTED = 4096  # elements per tile of the compaction

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["length", "stride", "code_stride", "scale_stride"])
def _quantize_rows(
    values: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    residual: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    CODE_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Quantize ROWS blocks of one part per program. Strides are in units of elements that keep accesses wide."""
    part = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(length, BLOCK)
    inside = present[:, None] if WHOLE else place < length
    own = part * stride * VALUE_UNIT + place
    x = tl.load(values + own, mask=inside, other=0.0).to(tl.float32)
    found, scale = quantized(x, 0, row, MANTISSA, LOWEST, LARGEST, False)
    tl.store(codes + part * code_stride * CODE_UNIT + place, found.to(codes.dtype.element_ty), mask=inside)
    tl.store(scales + part * scale_stride + row, scale, mask=present)
    if RESIDUAL:
        left = x - dequantized(found, scale, MANTISSA, LOWEST)
        tl.store(residual + own, left.to(residual.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "stride", "code_stride", "scale_stride"])
def _dequantize_rows(
    codes: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    code_stride: tl.tensor,
    scale_stride: tl.tensor,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
    WHOLE: tl.constexpr,
    VALUE_UNIT: tl.constexpr,
    CODE_UNIT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Dequantize ROWS blocks of one part per program. Strides are in the units of `_quantize_rows`."""
    part = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    present = row < tl.cdiv(length, BLOCK)
    inside = present[:, None] if WHOLE else place < length
    found = tl.load(codes + part * code_stride * CODE_UNIT + place, mask=inside, other=0)
    x = dequantized(found, tl.load(scales + part * scale_stride + row, mask=present, other=0.0), MANTISSA, LOWEST)
    tl.store(values + part * stride * VALUE_UNIT + place, x.to(values.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "stride", "tiles"])
def _count_passed(
    values: tl.tensor,
    thresholds: tl.tensor,
    counts: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    tiles: tl.tensor,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Count the elements of one tile that reach their part's threshold: int32 [parts, tiles]."""
    part = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(values + part * stride * UNIT + place, mask=place // UNIT < length // UNIT, other=0.0)
    passed = (tl.abs(x) >= tl.load(thresholds + part)) & (place < length)
    tl.store(counts + part * tiles + tl.program_id(0), tl.sum(passed.to(tl.int32), 0))


@triton.jit(do_not_specialize=["length", "stride", "tiles", "capacity"])
def _write_passed(
    values: tl.tensor,
    thresholds: tl.tensor,
    ends: tl.tensor,
    indices: tl.tensor,
    kept: tl.tensor,
    length: tl.tensor,
    stride: tl.tensor,
    tiles: tl.tensor,
    capacity: tl.tensor,
    UNIT: tl.constexpr,
    SIZE: tl.constexpr,
) -> None:
    """Write what passes of one tile. `ends`: how many have passed up to the end of each tile, int32 [parts, tiles]."""
    part = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(values + part * stride * UNIT + place, mask=place // UNIT < length // UNIT, other=0.0)
    passed = (tl.abs(x) >= tl.load(thresholds + part)) & (place < length)
    count = passed.to(tl.int32)
    first = tl.load(ends + part * tiles + tl.program_id(0)) - tl.sum(count, 0)
    slot = first + tl.cumsum(count, 0) - 1
    written = passed & (slot < capacity)
    tl.store(indices + part * capacity + slot, place.to(tl.int32), mask=written)
    tl.store(kept + part * capacity + slot, x, mask=written)


# ------------------------------------------------------------------------------------------------- launchers


def launch_quantize_rows(values: Tensor, codes: Tensor, scales: Tensor, residual: Tensor | None, block: int) -> None:
    values = values.contiguous()
    parts, length = values.shape
    shape, units = tile(block, largest=TILE), (unit(length), unit(codes.stride(0)))
    if values.numel():
        _quantize_rows[(-(-scales.shape[1] // shape.rows), parts)](
            *(values, codes.view(storage(codes.dtype)), scales, values if residual is None else residual),
            *(length, length // units[0], codes.stride(0) // units[1], scales.stride(0), *FORMATS[codes.dtype]),
            *(residual is not None, length % block == 0, *units, shape.rows, block),
            num_warps=shape.warps,
        )


def launch_dequantize_rows(codes: Tensor, scales: Tensor, values: Tensor, block: int) -> None:
    parts, length = values.shape
    shape, units = tile(block, largest=TILE), (unit(length), unit(codes.stride(0)))
    if values.numel():
        _dequantize_rows[(-(-scales.shape[1] // shape.rows), parts)](
            *(codes.view(storage(codes.dtype)), scales, values),
            *(length, length // units[0], codes.stride(0) // units[1], scales.stride(0), *FORMATS[codes.dtype][:2]),
            *(length % block == 0, *units, shape.rows, block),
            num_warps=shape.warps,
        )


def launch_compact(values: Tensor, thresholds: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Count what passes of each tile, then write it at its place: indices and values, [parts, capacity]."""
    values = values.contiguous()
    parts, length = values.shape
    tiles, wide = -(-length // COMPACTED), unit(length)
    counts = torch.empty(parts, tiles, dtype=torch.int32, device=values.device)
    grid, options = (tiles, parts), {"num_warps": 8}
    _count_passed[grid](values, thresholds, counts, length, length // wide, tiles, wide, COMPACTED, **options)
    ends = counts.cumsum(1, dtype=torch.int32)
    indices = torch.full((parts, capacity), length, dtype=torch.int32, device=values.device)
    kept = torch.zeros(parts, capacity, dtype=values.dtype, device=values.device)
    sizes = (length, length // wide, tiles, capacity)
    _write_passed[grid](values, thresholds, ends, indices, kept, *sizes, wide, COMPACTED, **options)
    return indices, kept
