"""Tiles of 8 and 4 bits: codes and scales are those of a search in tables, and emulated products those of fractions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels import scaled_products
from megalite_kernels.implementation import Kernels, current, use
from megalite_kernels.launch import recorded_launches
from megalite_kernels.recipes import Recipe, recipe
from megalite_kernels.scaled_products import grouped_product, product, product_reference, refusal, rows_of
from megalite_kernels.tile_scales import Squares, Tiles
from megalite_kernels.tiles import dequantize, largest, quantize, quantize_weight, values_of
from tests.harness.low_bits import E2M1, E4M3, E5M2, Part, Table, quantized, row_scale

FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, torch.float4_e2m1fn_x2: E2M1}
RECIPES = {name: recipe(name) for name in ("tensorwise", "blockwise", "mxfp8", "nvfp4")}
RECIPES |= {"hybrid": recipe("blockwise", "hybrid"), "quotients": replace(recipe("blockwise"), scaling="quotient")}
ALL = pytest.mark.parametrize("by", RECIPES.values(), ids=RECIPES)
SOME = pytest.mark.parametrize(
    "by", [RECIPES[name] for name in ("blockwise", "mxfp8", "nvfp4")], ids=lambda by: by.name
)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(*shape: int, seed: int = 1) -> Tensor:
    """Numbers of many sizes."""
    return torch.ldexp(
        numbers(*shape, seed=seed), torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(2))
    )


def ties(table: Table, columns: int) -> Tensor:
    """Rows whose first number is the largest code, with every code and every tie of two, and their neighbours."""
    known, between = table.values, torch.tensor([*table.values, *table.ties()])
    between = torch.cat([between, *(between.nextafter(torch.tensor(to)) for to in (0.0, math.inf))]).clamp(
        max=known[-1]
    )
    between = torch.cat([between, -between])
    rows = torch.cat([between, between.new_zeros(-len(between) % (columns - 1))]).view(-1, columns - 1)
    return torch.cat([torch.full((len(rows), 1), known[-1]), rows], 1)


def hard(columns: int) -> Tensor:
    """Rows of zeros of both signs, of subnormal numbers, of the smallest, of the largest, of a large among small."""
    rows = numbers(7, columns, seed=3)
    rows[0] = torch.tensor([0.0, -0.0]).repeat(columns)[:columns]
    rows[1] *= 1e-40
    rows[2] = 2.0**-149
    rows[3] *= 1e-37
    rows[4] *= 8e37
    rows[5, 1:] *= 1e-5
    rows[6, columns // 2] = 3e38
    return rows


def expected(values: Tensor, by: Recipe, format: torch.dtype) -> list[Part]:
    """Return the tiles, row by row."""
    if not by.block:
        flat = values.flatten().tolist()
        return [quantized(flat, by.scaling, FORMATS[format], _top(flat))]
    found = []
    for row in values.tolist():
        whole = _top(row)
        parts = [row[start : start + by.block] for start in range(0, len(row), by.block)]
        if by.scaling != "two levels":
            found += [quantized(part, by.scaling, FORMATS[format], _top(part)) for part in parts]
        elif math.isfinite(whole):
            found += [quantized(part, "inner", E2M1, _top(part), row_scale(whole)) for part in parts]
        else:
            found += [quantized(part, "inner", E2M1, whole) for part in parts]
    return found


def _top(values: list[float]) -> float:
    return max(abs(value) if not math.isnan(value) else math.inf for value in values)


def check(values: Tensor, by: Recipe, format: torch.dtype) -> Tiles:
    found = quantize(values, by, format)
    parts = expected(values, by, format)
    assert found.codes.view(torch.uint8).flatten().tolist() == [code for part in parts for code in part.codes]
    scales = found.scales.double().flatten().tolist()
    assert [None if math.isnan(scale) else scale for scale in scales] == [part.scale for part in parts]
    if found.outer is not None:
        tops = [_top(row) for row in values.tolist()]
        assert found.outer.nan_to_num(-1.0).tolist() == [row_scale(top) if math.isfinite(top) else -1.0 for top in tops]
    return found


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: str(format)[6:])
def test_codes_stand_for_what_the_definition_says(format: torch.dtype) -> None:
    table = FORMATS[format]
    codes = torch.arange(2 * table.sign, dtype=torch.uint8)
    values = values_of(codes if format == torch.float4_e2m1fn_x2 else codes.view(format), torch.float64).tolist()
    for code, value in enumerate(values):
        if code & (table.sign - 1) < len(table.values):
            assert value == table.value(code)
            assert (math.copysign(1.0, value) < 0) == bool(code & table.sign)
        else:
            assert not math.isfinite(value)


@ALL
def test_codes_and_scales_are_those_of_a_search(by: Recipe) -> None:
    """Ties, numbers of all sizes, and a short last tile."""
    columns = max(by.block, 16)
    for format in {by.forward, by.backward}:
        check(ties(FORMATS[format], columns)[:: 1 if columns > 16 else 3], by, format)
        check(spread(2, 3 * columns // 2), by, format)
        if by.block:
            check(hard(columns + 5), by, format)


@ALL
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_tile_nan_and_nothing_saturates(by: Recipe, bad: float) -> None:
    columns = 2 * max(by.block, 16)
    values = numbers(3, columns)
    values[1, columns - 1] = bad
    back = dequantize(check(values, by, by.forward), by, torch.float32)
    wide = [columns, columns, columns] if not by.block else [0, columns if by.name == "nvfp4" else by.block, 0]
    assert back.isnan().sum(1).tolist() == wide
    other = quantize(numbers(5, columns, seed=2), by, by.forward)
    result = product(quantize(values, by, by.forward), other, by, torch.bfloat16)
    assert result.isnan().any(1).tolist() == [count > 0 for count in wide]
    assert product(other, quantize(values, by, by.forward), by, torch.bfloat16).isnan().any(0).tolist() == [
        count > 0 for count in wide
    ]


@ALL
def test_what_was_quantized_keeps_its_codes_and_scales(by: Recipe) -> None:
    """The largest magnitude is the same, where it is given. (448.1 becomes 224 * 2, and then 448 * 1.)"""
    values = spread(4, 256) if by.scaling == "quotient" else torch.cat([spread(4, 256), hard(256)[:6]])
    for format in {by.forward, by.backward}:
        top = largest(values, by)
        found = quantize(values, by, format, top)
        back = dequantize(found, by, torch.float32)
        again = quantize(back, by, format, top)
        if by.in_squares:
            rounding = 0.0 if by.scaling == "ceiling" else 2.0**-22
            assert torch.allclose(dequantize(again, by, torch.float32), back, rtol=rounding, atol=0.0)
        else:
            assert torch.equal(again.codes.view(torch.uint8), found.codes.view(torch.uint8))
            assert torch.equal(again.scales.double(), found.scales.double())


def test_a_part_of_a_row_has_the_tiles_of_the_whole() -> None:
    """So ranks that split a width at tiles have the same codes; the other scales are those of a maximum over ranks."""
    for name in ("tensorwise", "blockwise", "mxfp8", "nvfp4"):
        by, values = RECIPES[name], spread(4, 512)
        whole, top = quantize(values, by, by.forward), largest(values, by)
        for start in (0, 256):
            part = quantize(values[:, start : start + 256], by, by.forward, top)
            assert torch.equal(part.codes.view(torch.uint8), whole.codes[:, start : start + 256].view(torch.uint8))
        halves = [largest(half, by) for half in values.split(256, 1)]
        if top is not None:
            assert torch.equal(torch.maximum(*halves), top)
    assert largest(torch.tensor([[1.0, math.nan], [-3.0, 2.0]]), RECIPES["nvfp4"]).tolist() == [math.inf, 3.0]
    assert largest(torch.tensor([[1.0, math.nan]]), RECIPES["tensorwise"]).item() == math.inf


def test_a_weight_has_one_scale_for_a_square_and_the_same_codes_both_ways() -> None:
    by, values = RECIPES["blockwise"], spread(200, 300)
    values[130, 270] = math.inf
    found = quantize_weight(values, by)
    assert found.forward.scales.shape == (2, 3)
    back = dequantize(found.forward, by, torch.float32)
    assert torch.equal(dequantize(found.backward, by, torch.float32).isnan(), back.t().isnan())
    assert torch.equal(dequantize(found.backward, by, torch.float32).nan_to_num(), back.t().nan_to_num())
    assert back.isnan().nonzero().amin(0).tolist() == [128, 256]
    assert back.isnan().sum() == 72 * 44
    for row, column in ((0, 0), (0, 1), (1, 0)):
        square = values[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
        flat = quantized(square.flatten().tolist(), "ceiling", E4M3, square.abs().max().item())
        codes = found.forward.codes.view(torch.uint8)[128 * row : 128 * row + 128, 128 * column : 128 * column + 128]
        assert codes.flatten().tolist() == flat.codes
        assert found.forward.scales[row, column].item() == flat.scale


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_other_weights_have_tiles_of_their_own_each_way(name: str) -> None:
    by, values = RECIPES[name], spread(48, 80)
    found = quantize_weight(values, by)
    for tiles, each in ((found.forward, values), (found.backward, values.t().contiguous())):
        alone = quantize(each, by, by.forward)
        assert all(torch.equal(a.double(), b.double()) for a, b in zip(tiles, alone, strict=True) if a is not None)


def exact(a: Tiles, b: Tiles, by: Recipe) -> list[list[float]]:
    """The product by the rule, in fractions: sums of blocks are exact, and each further step is rounded to float64."""
    return [[_dot(rows_of(a, i, i + 1), _row(b, j, by), by) for j in range(len(b.codes))] for i in range(len(a.codes))]


def _row(tiles: Tiles, row: int, by: Recipe) -> Tiles:
    if isinstance(tiles, Squares):
        return Tiles(tiles.codes[row : row + 1], tiles.scales[row // by.block, None])
    return rows_of(tiles, row, row + 1)


def _dot(a: Tiles, b: Tiles, by: Recipe) -> float:
    sides = [[Fraction(v) for v in values_of(each.codes, torch.float64).flatten().tolist()] for each in (a, b)]
    scales = [each.scales.double().flatten().tolist() for each in (a, b)]
    block, total = by.block or len(sides[0]), 0.0
    if by.scaling == "two levels":
        assert a.outer is not None
        assert b.outer is not None
        sums = sum(
            x * y * Fraction(scales[0][k // block]) * Fraction(scales[1][k // block])
            for k, (x, y) in enumerate(zip(*sides, strict=True))
        )
        return float(sums) * a.outer.double().item() * b.outer.double().item()
    for part, start in enumerate(range(0, len(sides[0]), block)):
        pairs = zip(*(side[start : start + block] for side in sides), strict=True)
        total += float(sum(x * y for x, y in pairs)) * scales[0][part] * scales[1][part]
    return total


@pytest.mark.bits
@ALL
def test_products_are_those_of_fractions(by: Recipe) -> None:
    a, b = quantize(spread(3, 300), by, by.backward), quantize_weight(spread(5, 300, seed=5), by).forward
    found = product(a, b, by, torch.float64)
    if by.backward == torch.float8_e5m2:
        assert torch.allclose(found, torch.tensor(exact(a, b, by), dtype=torch.float64), rtol=1e-14, atol=1e-12)
    else:
        assert found.tolist() == exact(a, b, by)
    assert torch.equal(product(a, b, by, torch.bfloat16), found.float().bfloat16())


@pytest.mark.bits
@SOME
def test_a_row_has_the_same_product_whatever_stands_beside_it(by: Recipe) -> None:
    """Also with other numbers of rows, for which BLAS has other kernels, and in the groups of experts."""
    values, weights = spread(40, 256), [spread(128, 256, seed=seed) for seed in (5, 6)]
    a, b = quantize(values, by, by.forward), [quantize_weight(weight, by).forward for weight in weights]
    both, ends = quantize_weight(torch.cat(weights), by, 2).forward, torch.tensor([13, 13 + 27], dtype=torch.int32)
    whole = product(a, b[0], by, torch.float64)
    for start, stop in ((0, 1), (3, 5), (7, 40)):
        assert torch.equal(product(rows_of(a, start, stop), b[0], by, torch.float64), whole[start:stop])
    backwards = torch.arange(39, -1, -1)
    turned = Tiles(*(None if part is None else part[backwards] for part in a))  # type: ignore[arg-type]
    assert torch.equal(product(turned, b[0], by, torch.float64), whole[backwards])
    grouped = grouped_product(a, both, [0, 13, 13 + 27], ends, by, torch.float64)
    assert torch.equal(grouped[:13], whole[:13])
    assert torch.equal(grouped[13:], product(rows_of(a, 13, 40), b[1], by, torch.float64))


def test_products_of_nothing() -> None:
    for by in RECIPES.values():
        tiles = [quantize(torch.zeros(rows, columns), by, by.forward) for rows, columns in ((0, 32), (3, 32), (0, 0))]
        assert product(tiles[0], tiles[1], by, torch.float32).shape == (0, 3)
        assert product(tiles[1], tiles[0], by, torch.float32).shape == (3, 0)
        assert (product(tiles[1], tiles[1], by, torch.float32) == 0).all()


def test_float64_is_rounded_to_fp32_first() -> None:
    values = spread(3, 128).double() * (1 + 2.0**-26)
    for by in RECIPES.values():
        assert torch.equal(
            quantize(values, by, by.forward).codes.double(), quantize(values.float(), by, by.forward).codes.double()
        )


def test_names_and_devices_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="no recipe 'delayed'; choose one of tensorwise, blockwise, mxfp8, nvfp4"):
        recipe("delayed")
    with pytest.raises(ValueError, match="no format 'e5m2'; choose one of e4m3, hybrid"):
        recipe("blockwise", "e5m2")
    with pytest.raises(ValueError, match="mxfp8 has no hybrid format"):
        recipe("mxfp8", "hybrid")
    assert refusal(RECIPES["nvfp4"], torch.device("cpu")) is None
    assert "no GPU" in str(refusal(RECIPES["nvfp4"], torch.device("cuda")))


def test_what_a_plan_lacks_follows_the_device_that_it_is_of() -> None:
    before, found = current(), []
    for is_gpu in (False, True, False):
        use(Kernels("auto", meta_is_gpu=is_gpu))
        found.append(refusal(RECIPES["nvfp4"], torch.device("meta")) is not None)
    use(before)
    assert found == [False, True, False]


@pytest.fixture
def _planned_gpu() -> Iterator[None]:
    """The meta device stands for a GPU, and torch checks shapes, dtypes and strides there as it does on one."""
    before = current()
    use(Kernels("auto", meta_is_gpu=True))
    yield
    use(before)


@pytest.mark.usefixtures("_planned_gpu")
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "hybrid"])
def test_a_gpu_is_given_what_its_products_take(name: str) -> None:
    """Both products of a weight, whose blocks are not a multiple of four in one of them, and those of groups.

    Triton's kernel multiplies groups, two operands with parts of rows, widths that are no multiples of blocks, and rows
    that are none of four. One launch quantizes the matrices of all groups, and one multiplies.
    """
    by, launched = RECIPES[name], list[str]()
    weight = (
        _on_meta(quantize_weight(numbers(256, 1152), by).forward),
        _on_meta(quantize_weight(numbers(1152, 256), by).backward),
    )
    for tiles in weight:
        rows = _on_meta(quantize(numbers(48, tiles.codes.shape[1]), by, by.backward))
        assert product(rows, tiles, by, torch.bfloat16).shape == (48, tiles.codes.shape[0])
        assert product(rows_of(rows, 0, 0), tiles, by, torch.bfloat16).shape == (0, tiles.codes.shape[0])
    odd = _on_meta(quantize(numbers(16, 200), by, by.forward))
    if name == "tensorwise":
        assert product(odd, odd, by, torch.bfloat16).shape == (16, 16)
        with pytest.raises(ValueError, match="a tensorwise product has 15 outputs: a GPU's have multiples of 16"):
            product(odd, rows_of(odd, 0, 15), by, torch.bfloat16)
        return
    with recorded_launches(lambda kernel, tensors: launched.append(kernel)):
        ends, half = torch.tensor([0, 48], dtype=torch.int32, device="meta"), weight[0].codes.shape[0] // 2
        both = quantize_weight(torch.empty(256, 1152, device="meta"), by, 2)
        assert (both.backward.codes.shape, both.backward.scales.shape) == ((2304, 128), (18, 1))
        rows = _on_meta(quantize(numbers(48, 1152), by, by.forward))
        assert grouped_product(rows, both.forward, [0, 0, 48], ends, by, torch.bfloat16).shape == (48, half)
        assert product(odd, odd, by, torch.float32).shape == (16, 16)
        short = _on_meta(quantize_weight(numbers(200, 1152), by).forward)
        assert product(rows, short, by, torch.float32).shape == (48, 200)
        for count in (1, 2, 47):  # whose columns of scales are not whole accesses of 16 bytes
            assert product(rows_of(rows, 0, count), weight[0], by, torch.float32).shape == (count, 256)
        assert product(rows, rows, by, torch.float32).shape == (48, 48)
    assert launched == ["_quantize_squares", *["multiply_codes"] * 7]


@pytest.mark.parametrize("tokens", [32, 37])
def test_any_number_of_tokens_is_multiplied_for_weight_gradients(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is given columns that are filled with zeros, whose product is that of the emulation."""
    by, given = RECIPES["tensorwise"], list[Tensor]()

    def multiply(a: Tensor, b: Tensor, a_scale: Tensor, _a: Any, b_scale: Tensor, _b: Any, **_options: Any) -> Tensor:
        given.extend((a, b))
        return product_reference(Tiles(a, a_scale), Tiles(b.t(), b_scale), by, torch.float32)

    monkeypatch.setattr(F, "scaled_mm", multiply)
    monkeypatch.setattr(scaled_products, "_is_emulated", lambda *_: False)
    a, b = (quantize(numbers(rows, tokens), by, by.forward) for rows in (5, 16))
    assert torch.equal(product(a, b, by, torch.float32), product_reference(a, b, by, torch.float32))
    assert [each.shape for each in given] == [(5, -(-tokens // 16) * 16), (-(-tokens // 16) * 16, 16)]
    assert given[1].t().is_contiguous()


@pytest.mark.usefixtures("_planned_gpu")
def test_recipes_that_no_gpu_has_run_are_refused_there() -> None:
    by = RECIPES["mxfp8"]
    tiles = _on_meta(quantize(numbers(128, 128), by, by.forward))
    with pytest.raises(
        ValueError, match="mxfp8 runs on CPUs alone, emulated: no GPU that multiplies in it has run it yet"
    ):
        product(tiles, tiles, by, torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "capability", "cuda", "refused"),
    [
        ("tensorwise", (8, 0), "12.8", "tensorwise needs a GPU with fp8 (compute capability 8.9), not 8.0"),
        ("tensorwise", (8, 9), "12.8", None),
        ("blockwise", (8, 0), "12.8", "blockwise needs a GPU with fp8 (compute capability 8.9), not 8.0"),
        ("blockwise", (8, 9), "12.8", None),
        ("blockwise", (9, 0), "13.0", None),
        ("blockwise", (10, 0), "13.0", None),
        ("blockwise", (9, 4), None, "blockwise runs on NVIDIA's GPUs and, emulated, on CPUs"),
        ("tensorwise", (9, 4), None, "tensorwise runs on NVIDIA's GPUs and, emulated, on CPUs"),
    ],
)
def test_what_a_gpu_lacks_is_refused(
    name: str, capability: tuple[int, int], cuda: str | None, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA, torch is built for AMD's GPUs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", None if cuda else "7.0")
    found = refusal(RECIPES[name], torch.device("cuda", 0))
    assert found == refused


def test_blocks_need_triton_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(scaled_products, "is_installed", lambda: False)
    found = [refusal(RECIPES[name], torch.device("cuda", 0)) for name in ("tensorwise", "blockwise")]
    assert found == [None, "blockwise needs Triton on a GPU, which is not installed: pip install triton"]


@pytest.mark.parametrize(
    ("capability", "cuda", "takes"), [((9, 0), "12.9", 1), ((9, 0), "12.8", 0), ((10, 0), "13", 0)]
)
def test_torch_multiplies_blocks_on_hopper(
    capability: tuple[int, int], cuda: str, takes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    scaled_products.torch_multiplies_blocks.cache_clear()
    assert scaled_products.torch_multiplies_blocks(torch.device("cuda", 0)) == bool(takes)
    scaled_products.torch_multiplies_blocks.cache_clear()


def _on_meta(tiles: Tiles) -> Tiles:
    return type(tiles)(*(None if part is None else part.to("meta") for part in tiles))  # type: ignore[arg-type]
