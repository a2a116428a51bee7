"""Products of tiles: the kernel is the emulation but for fp32's rounding, and a row's bits are those of it alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks import gpu_scaled_products
from megalite.config.model import ModelConfig
from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.rounded_products import Rounding, Roundings
from megalite_kernels import scaled_products
from megalite_kernels import scaled_products_kernels as kernels
from megalite_kernels.implementation import Kernels, use
from megalite_kernels.recipes import Recipe
from megalite_kernels.scaled_products import each_of, grouped_product, product, rows_of
from megalite_kernels.tile_scales import Tiles
from megalite_kernels.tiles import dequantize, quantize, quantize_reference, quantize_weight
from tests.harness.close import assert_bits_equal
from tests.kernels.cells import cells, named
from tests.kernels.interpreter import nan_is_written, only_programs
from tests.kernels.test_tiles import RECIPES, bits, hard, numbers

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # by numpy
BY = {name: RECIPES[name] for name in ("blockwise", "hybrid")}
SHAPES = [(130, 150, 140), (9, 1040, 16), (6, 50, 3)]
"""Rows, columns and outputs."""
COUNTS = {
    "around a tile": [0, 1, 127, 0, 128, 129, 0],
    "one group": [5],
    "none but one": [0, 0, 3],
    "none": [0, 0],
}
"""Rows of each group."""


_EMULATED = scaled_products.product_reference


@pytest.fixture(autouse=True)
def _no_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that is not asked for in float64 is the kernel's."""

    def in_float64(a: Tiles, b: Tiles, recipe: Recipe, dtype: torch.dtype) -> Tensor:
        assert dtype == torch.float64
        return _EMULATED(a, b, recipe, dtype)

    monkeypatch.setattr(scaled_products, "product_reference", in_float64)


def check(found: Tensor, a: Tiles, b: Tiles, by: Recipe) -> None:
    """Compare with the emulation, relative to the sum of the magnitudes of the terms.

    In fp32, a block has as many roundings as terms at most, in whatever order they are added; its product with the
    scales, which are powers of two, and the addition to other blocks have one each. Then the result is rounded.
    """
    exact = product(a, b, by, torch.float64)
    assert torch.equal(found.isnan(), exact.isnan())
    sizes = [dequantize(each, by, torch.float64).abs() for each in (a, b)]
    terms = (sizes[0] @ sizes[1].t()).nan_to_num_(0.0)
    blocks, kind = a.scales.shape[1], torch.finfo(found.dtype)
    share = (by.block + 2 * blocks) * 2.0**-24 + kind.eps / 2
    least = blocks * kind.smallest_normal * kind.eps  # of subnormal numbers
    assert ((found.double() - exact).nan_to_num_(0.0).abs() <= terms * share + least).all()


@pytest.mark.parametrize(
    ("shape", "by"), cells(named(SHAPES), BY, kept=lambda shape, by: (shape + by) % 2 == 1 and shape < 2)
)
def test_products_are_the_emulation(shape: tuple[int, int, int], by: Recipe) -> None:
    """The three of a linear layer: with a weight's squares, either way, and of two operands with parts of rows."""
    count, columns, out = shape
    rows, weight = hard(count, columns), numbers(out, columns, seed=3)
    tiles = quantize_weight(weight, by)
    for values, matrix in ((rows, tiles.forward), (hard(count, out), tiles.backward)):
        a = quantize(values, by, by.backward)
        check(product(a, matrix, by, torch.float32), a, matrix, by)
    a, b = quantize(rows, by, by.backward), quantize(weight, by, by.forward)
    check(product(a, b, by, torch.bfloat16), a, b, by)


def groups(counts: Sequence[int], columns: int, out: int, by: Recipe) -> tuple[Tiles, Tiles, list[int], Tensor]:
    offsets = [0, *accumulate(counts)]
    a = quantize(hard(max(offsets[-1], 6), columns)[: offsets[-1]], by, by.backward)
    b = quantize_weight(numbers(len(counts) * out, columns, seed=4), by, len(counts)).forward
    return a, b, offsets, torch.tensor(offsets[1:], dtype=torch.int32)


@pytest.mark.parametrize(("counts", "by"), cells(COUNTS, BY, kept=lambda counts, by: by == (0 if counts else 1)))
def test_products_of_groups_are_those_of_each_group_to_the_bit(counts: list[int], by: Recipe) -> None:
    """Compare also with products of single rows."""
    a, b, offsets, ends = groups(counts, 150, 130, by)
    found = grouped_product(a, b, offsets, ends, by, torch.float32)
    assert found.shape == (offsets[-1], 130)
    for matrix, (start, stop) in zip(each_of(b, len(ends)), pairwise(offsets), strict=True):
        own = rows_of(a, start, stop)
        check(found[start:stop], own, matrix, by)
        assert_bits_equal(found[start:stop], product(own, matrix, by, torch.float32))
        for row in range(start, stop, 100):
            assert_bits_equal(found[row : row + 1], product(rows_of(a, row, row + 1), matrix, by, torch.float32))


@pytest.mark.parametrize("bad", [math.inf, pytest.param(math.nan, marks=pytest.mark.wide)])
def test_a_block_that_is_not_finite_makes_its_products_nan_and_no_others(bad: float) -> None:
    by = BY["hybrid"]
    rows, weight = hard(130, 300), numbers(200, 300)
    rows[3, 290], weight[150, 5] = bad, -bad
    with nan_is_written():
        a, b = quantize(rows, by, by.backward), quantize_weight(weight, by).forward
        found = product(a, b, by, torch.float32)
        assert found.isnan().sum().item() == 130 * (200 - 128) + 128
        check(found, a, b, by)
        ends = torch.tensor([3, 130], dtype=torch.int32)
        both = quantize_weight(torch.cat([numbers(200, 300), weight]), by, 2).forward
        of_groups = grouped_product(a, both, [0, 3, 130], ends, by, torch.float32)
        assert of_groups.isnan().sum(1).tolist() == [0] * 3 + [200] + [72] * 126


def test_products_of_nothing() -> None:
    by = BY["blockwise"]
    some, no_rows, no_columns = (quantize(torch.zeros(size), by, by.forward) for size in ((3, 32), (0, 32), (3, 0)))
    assert product(no_rows, some, by, torch.float32).shape == (0, 3)
    assert product(some, no_rows, by, torch.float32).shape == (3, 0)
    for each in (some, no_columns):
        assert_bits_equal(product(each, each, by, torch.float32), torch.zeros(3, 3))


def test_matrices_below_each_other_have_the_tiles_of_each() -> None:
    """In one launch, though a square at the end of one is short."""
    for by in (BY["blockwise"], RECIPES["nvfp4"]):
        values = numbers(3 * 130, 150).view(3, 130, 150)
        found = quantize_weight(values.flatten(0, 1), by, 3)
        use(Kernels("reference"))
        alone = [quantize_weight(matrix, by) for matrix in values]
        again = quantize_weight(values.flatten(0, 1), by, 3)
        use(Kernels("triton"))
        for ours, reference, of_each in zip(found, again, zip(*alone, strict=True), strict=True):
            parts = [
                None if parts[0] is None else torch.cat([part.float() for part in parts]).to(parts[0].dtype)
                for parts in zip(*of_each, strict=True)
            ]
            assert bits(*ours) == bits(*reference) == bits(*parts)


@pytest.mark.wide  # what a GPU is asked for, at sizes for the interpreter
def test_the_check_for_gpus_finds_the_kernel_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_scaled_products, "COUNTS", (0, 1, 129, 0))
    monkeypatch.setattr(gpu_scaled_products, "WIDTHS", ((256, 128), (200, 130)))
    with nan_is_written():
        assert max(gpu_scaled_products.errors("cpu").values()) < gpu_scaled_products.TOLERANCE
        assert set(gpu_scaled_products.different_numbers("cpu").values()) == {0}


@pytest.mark.wide
def test_a_network_with_experts_has_the_gradients_of_the_emulation() -> None:
    """Also of weights, whose products are rounded along tokens. A code that is rounded the other way is allowed."""
    model = ModelConfig(
        num_layers=1, hidden_size=128, num_attention_heads=2, ffn_hidden_size=200, vocab_size=8, swiglu=True,
        max_position_embeddings=8, num_experts=3, moe_router_topk=1, moe_router_pre_softmax=True,
    )  # fmt: skip
    tokens, key = torch.arange(16).view(2, 8), RandomKey(1, (0, 1))
    found = list[list[Tensor]]()
    for choice in ("reference", "triton"):
        use(Kernels(choice))  # type: ignore[arg-type]
        network = GPT(model, ParallelMesh(), roundings=Roundings((Rounding(BY["hybrid"], weight_gradients=True),)))
        initialize(network, 1)
        launched = mock.patch.object(kernels, "launch_product", wraps=kernels.launch_product)
        with launched as launches, mock.patch.object(scaled_products, "product_reference", _EMULATED):
            hidden, _ = network.hidden_states(None, MicroBatch(tokens % 8, tokens % 8, None, None, None, key))
            hidden.backward(numbers(*hidden.shape))
        assert launches.call_count == (10 if choice == "triton" else 0)
        gradients = [each.grad for each in network.layers.parameters() if each.grad is not None]
        found.append([hidden.detach(), *gradients])
    for reference, ours in zip(*found, strict=True):
        assert (ours - reference).norm() <= 1e-3 * reference.norm()


@pytest.mark.wide
def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    by, count, columns = BY["blockwise"], 2**21 + 1, 1024
    last = quantize_reference(numbers(1, columns), by, by.forward, None)
    a = Tiles(torch.empty(count, columns, dtype=by.forward), torch.empty(count, columns // 128))
    a.codes[-1], a.scales[-1] = last.codes[0], last.scales[0]
    b = quantize_weight(numbers(16, columns), by).forward
    with only_programs(-1):
        found = product(a, b, by, torch.bfloat16)
    assert_bits_equal(found[-1:], product(last, b, by, torch.bfloat16))
