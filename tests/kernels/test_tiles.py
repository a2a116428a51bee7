"""Quantization to tiles: the kernels give the reference's bits, which tests/unit/test_tiles.py checks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megalite_kernels.implementation import Kernels, use
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import (
    dequantize,
    dequantize_reference,
    largest,
    quantize,
    quantize_reference,
    quantize_squares_reference,
    quantize_weight,
)
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written, only_programs

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # by numpy
RECIPES = {name: recipe(name) for name in ("tensorwise", "blockwise", "mxfp8", "nvfp4")}
RECIPES |= {"hybrid": recipe("blockwise", "hybrid"), "quotients": replace(recipe("blockwise"), scaling="quotient")}
ALL = pytest.mark.parametrize("by", RECIPES.values(), ids=RECIPES)
SQUARES = pytest.mark.parametrize("by", [RECIPES["blockwise"], RECIPES["quotients"]], ids=["blockwise", "quotients"])


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hard(rows: int, columns: int) -> Tensor:
    """Numbers of all sizes: within a row, and rows of subnormal ones, of zeros, of ties and of the largest."""
    generator = torch.Generator().manual_seed(2)
    values = torch.ldexp(numbers(rows, columns), torch.randint(-12, 12, (rows, columns), generator=generator))
    values[0] *= 1e-41
    values[1] = torch.tensor([0.0, -0.0]).repeat(columns)[:columns]
    values[2] = torch.randint(-448, 449, (columns,), generator=generator) / 2
    values[3] = torch.randint(-96, 97, (columns,), generator=generator) / 16
    values[4] *= 2.0**100
    values[5] *= 2.0**-110
    return values


def bits(*tiles: Tensor | None) -> list[bytes]:
    found = [part.nan_to_num(-1.0) if part.dtype == torch.float32 else part for part in tiles if part is not None]
    return [bytes(part.contiguous().reshape(-1).view(torch.uint8).numpy()) for part in found]


def top_of(values: Tensor, by: Recipe) -> Tensor | None:
    top = largest(values, by)
    use(Kernels("reference"))
    expected = largest(values, by)
    use(Kernels("triton"))
    assert bits(top) == bits(expected)
    return top


def check(values: Tensor, by: Recipe, format: torch.dtype) -> None:
    top = top_of(values, by)
    found, expected = quantize(values, by, format, top), quantize_reference(values, by, format, top)
    for ours, reference in zip(found, expected, strict=True):
        assert (ours is None) == (reference is None)
        if ours is not None and reference is not None:
            assert (ours.dtype, ours.shape) == (reference.dtype, reference.shape)
    assert bits(*found) == bits(*expected)
    dtype = values.dtype
    ours, reference = dequantize(found, by, dtype), dequantize_reference(expected, by, dtype)
    assert (ours.dtype, bits(ours.float())) == (dtype, bits(reference.float()))


@pytest.mark.parametrize(
    ("by", "columns", "dtype"),
    cells(
        RECIPES,
        named([256, 200, 16, 1]),
        named([torch.float32, torch.bfloat16, torch.float16], str),
        kept=lambda by, columns, dtype: (by + columns) % 3 == dtype,
    ),
)
def test_kernels_are_the_reference(by: Recipe, columns: int, dtype: torch.dtype) -> None:
    for format in {by.forward, by.backward}:
        check(hard(9, columns).to(torch.float32).clamp(-6e4, 6e4).to(dtype), by, format)
        check(hard(9, columns).to(dtype if dtype != torch.float16 else torch.float32), by, format)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_the_references(by: Recipe, bad: float) -> None:
    values = numbers(4, 200)
    values[1, 70], values[2, 199] = bad, -bad
    with nan_is_written():
        check(values, by, by.forward)
        if by.in_squares:
            check_squares(values, by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_tensor_of_zeros_and_subnormal_numbers_has_the_references_scale(dtype: torch.dtype) -> None:
    by, least = RECIPES["tensorwise"], torch.finfo(dtype).smallest_normal
    for values in (torch.tensor([[0.0, -0.0]]), torch.tensor([[-0.0]]), numbers(3, 21) * least / 8):
        check(values.to(dtype), by, by.forward)


def check_squares(values: Tensor, by: Recipe) -> None:
    found, expected = quantize_weight(values, by), quantize_squares_reference(values, by)
    assert bits(*found.forward) == bits(*expected)
    assert bits(*found.backward) == bits(expected.codes.t(), expected.scales.t())


@SQUARES
@pytest.mark.parametrize("shape", [(256, 128), (144, 300), (7, 130)], ids=str)
def test_squares_are_the_reference(by: Recipe, shape: tuple[int, int]) -> None:
    check_squares(hard(*shape), by)
    check_squares(hard(*shape).bfloat16(), by)


@ALL
def test_strides_change_no_bit_and_nothing_is_nothing(by: Recipe) -> None:
    values = numbers(300, 40).t()
    assert bits(*quantize(values, by, by.forward)) == bits(*quantize(values.contiguous(), by, by.forward))
    nothing = quantize(values[:0], by, by.forward)
    assert nothing.codes.shape == (0, 300)
    assert by.block or nothing.scales.item() == 1.0
    if by.in_squares:
        assert bits(*quantize_weight(values, by).backward) == bits(*quantize_weight(values.contiguous(), by).backward)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "nvfp4"])
def test_elements_lie_beyond_2_to_the_31(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    by, rows = RECIPES[name], 2**20 + 1
    values = torch.empty(rows, 2048, dtype=torch.bfloat16)
    values[-1] = numbers(2048).bfloat16()
    top = None if name == "blockwise" else largest(values[-1:], by)
    with only_programs(-1):
        found = quantize(values, by, by.forward, top.expand(rows) if top is not None and by.block else top)
    last = quantize_reference(values[-1:], by, by.forward, top)
    assert bits(found.codes[-1:]) == bits(last.codes)
    if not by.block:
        monkeypatch.setattr(torch, "empty", torch.zeros)  # what other programs would write
        with only_programs(-1):
            assert bits(largest(values, by)) == bits(top)


def test_a_scale_of_a_tensor_must_be_given() -> None:
    with pytest.raises(ValueError, match="needs its largest magnitude: see `largest`"):
        quantize_reference(numbers(2, 16), RECIPES["nvfp4"], RECIPES["nvfp4"].forward, None)
    assert isinstance(quantize(numbers(2, 16), RECIPES["nvfp4"], RECIPES["nvfp4"].forward), Tiles)
