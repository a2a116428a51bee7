"""Compression of gradients: the kernels give the reference's bits, at strides and lengths of packed buffers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megalite_kernels.compression import (
    BLOCK,
    compact,
    compact_reference,
    dequantize_rows,
    dequantize_rows_reference,
    quantize_rows,
    quantize_rows_reference,
)
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.quantization import quantize_reference
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written, only_programs

FORMATS = pytest.mark.parametrize("format", [torch.int8, torch.float8_e4m3fn], ids=str)
LENGTHS = (1, 16, 255, 256, 1000, 5 * BLOCK, 5 * BLOCK + 16)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed_fields(parts: int, length: int, format: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scales in longer rows, as in a packed buffer. Two: the interpreter wants one dtype in each."""
    wide, blocks = -(-length // 16) * 16, -(-length // BLOCK)
    codes, scales = (torch.zeros(parts, wide + 16 * blocks, dtype=kind) for kind in (torch.uint8, torch.float32))
    return codes[:, :length].view(format), scales[:, wide : wide + blocks]


def quantized(values: Tensor, format: torch.dtype, *, kernel: bool) -> tuple[Tensor, Tensor, Tensor]:
    codes, scales = packed_fields(*values.shape, format)
    residual = torch.zeros_like(values)
    (quantize_rows if kernel else quantize_rows_reference)(values, codes, scales, residual)
    alone = packed_fields(*values.shape, format)
    (quantize_rows if kernel else quantize_rows_reference)(values, *alone, None)
    assert torch.equal(alone[0].view(torch.int8), codes.view(torch.int8))
    return codes, scales, residual


def check(values: Tensor, format: torch.dtype) -> None:
    found, expected = (quantized(values, format, kernel=kernel) for kernel in (True, False))
    for ours, reference in zip(found, expected, strict=True):
        assert torch.equal(ours.float().nan_to_num(-7.0), reference.float().nan_to_num(-7.0))
    for dtype in (torch.float32, torch.bfloat16):
        restored, again = torch.zeros(values.shape, dtype=dtype), torch.zeros(values.shape, dtype=dtype)
        dequantize_rows(*found[:2], restored)
        dequantize_rows_reference(*expected[:2], again)
        assert torch.equal(restored.nan_to_num(-7.0), again.nan_to_num(-7.0))
    restored = torch.zeros(values.shape)
    dequantize_rows(*found[:2], restored)
    assert torch.equal((restored + found[2]).nan_to_num(-7.0), torch.where(restored.isnan(), -7.0, values))


@pytest.mark.parametrize(
    ("length", "format"),
    cells(
        named(LENGTHS),
        named([torch.int8, torch.float8_e4m3fn]),
        kept=lambda length, format: length % 2 == format,
    ),
)
def test_kernels_are_the_reference(format: torch.dtype, length: int) -> None:
    check(numbers(3, length) * torch.tensor([[1.0], [1e-30], [1e30]]), format)


@FORMATS
def test_each_row_has_the_codes_of_quantization(format: torch.dtype) -> None:
    values = numbers(2, 700) * torch.logspace(-40, 30, 700)
    for kernel in (True, False):
        codes, scales, _ = quantized(values, format, kernel=kernel)
        for row in range(2):
            expected, of_blocks = quantize_reference(values[row], format, BLOCK, None, 0)
            assert torch.equal(codes[row].view(torch.int8), expected.view(torch.int8))
            assert torch.equal(scales[row], of_blocks)


@FORMATS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_becomes_nan(format: torch.dtype, bad: float) -> None:
    values = numbers(2, 3 * BLOCK + 5)
    values[1, BLOCK + 3] = bad
    with nan_is_written():
        check(values, format)
        codes, scales, _ = quantized(values, format, kernel=True)
        restored = torch.zeros_like(values)
        dequantize_rows(codes, scales, restored)
    assert restored[1].isnan().nonzero().flatten().tolist() == list(range(BLOCK, 2 * BLOCK))
    assert restored[0].isfinite().all()


def test_no_offset_overflows() -> None:
    """The last program of a part whose elements do not fit in 31 bits: the rows of one part in memory stand for all."""
    values = numbers(1, BLOCK).expand(3, -1).contiguous()
    with only_programs(-1):
        codes, scales = packed_fields(3, BLOCK, torch.int8)
        quantize_rows(values, codes, scales)
    assert codes[2].any()
    assert not codes[:2].any()


@pytest.mark.parametrize("length", [1, 15, 16, 4096, 9000])
@pytest.mark.parametrize("capacity", [1, 7, 5000])
def test_compaction_is_the_reference(length: int, capacity: int) -> None:
    values, thresholds = numbers(3, length), torch.tensor([0.0, 1.0, 9.0])
    found, expected = compact(values, thresholds, capacity), compact_reference(values, thresholds, capacity)
    for ours, reference in zip(found, expected, strict=True):
        assert ours.dtype == reference.dtype
        assert torch.equal(ours, reference)


@pytest.mark.parametrize("choice", ["triton", "reference"])
def test_compaction_takes_the_first_above_the_threshold(choice: str) -> None:
    use(Kernels(choice))
    values, thresholds, capacity = numbers(4, 5000), torch.tensor([0.0, 0.5, 2.5, 9.0]), 200
    indices, kept = compact(values, thresholds, capacity)
    for row, threshold, where, what in zip(values, thresholds, indices, kept, strict=True):
        passed = (row.abs() >= threshold).nonzero().flatten()[:capacity]
        assert where.tolist() == [*passed.tolist(), *[5000] * (capacity - len(passed))]
        assert what.tolist() == [*row[passed].tolist(), *[0.0] * (capacity - len(passed))]


@pytest.mark.parametrize("choice", ["triton", "reference"])
def test_nan_passes_no_threshold_and_infinity_does(choice: str) -> None:
    use(Kernels(choice))
    values = torch.tensor([[math.nan, 1.0, math.inf, -math.inf]]).expand(2, -1).contiguous()
    with nan_is_written():
        indices, _ = compact(values, torch.tensor([2.0, math.nan]), 3)
    assert indices.tolist() == [[2, 3, 4], [4, 4, 4]]
