"""Sketches of megalite_trace.py: how well they estimate distances, and that they depend on the values alone."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import megalite_trace
from megalite_trace import project, samples, sketch

MASK = 2**64 - 1
ROWS, QUARTERS = 512, 4


def test_the_file_needs_nothing_but_torch() -> None:
    """It is copied into the code of others."""
    tree = ast.parse(Path(megalite_trace.__file__).read_text())
    names = {
        alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    names |= {
        node.module.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    assert names - set(sys.stdlib_module_names) == {"torch"}


def hashed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ value >> shift) * factor & MASK
    return value ^ value >> 31


def signs(count: int, seed: int) -> list[int]:
    begin = hashed(seed + 1 & MASK)
    values = (hashed((index * 0x9E3779B97F4A7C15 + begin) & MASK) for index in range(1, count + 1))
    return [1 - 2 * (value >> 7 & 1) for value in values]


def projected(values: list[float], seed: int, width: int) -> list[float]:
    """Return the projections of a tensor, element by element."""
    few = (QUARTERS - 1) * ROWS
    table = signs(few + (2 * ROWS + QUARTERS) * width, seed)
    of_rows, of_elements = [1] * ROWS + table[:few], table[few:]
    total, size = [0.0] * width, QUARTERS * ROWS * width
    for number in range(-(-len(values) // size)):
        block = values[number * size : (number + 1) * size]
        place = hashed(seed * MASK + number & MASK)
        offset = (place >> 8) % (ROWS - 1) * width + number % width
        rows = len(block) // (QUARTERS * width) if len(block) >= ROWS * width else 0
        for index, value in enumerate(block):
            quarter, at = divmod(index, rows * width) if index < QUARTERS * rows * width else (0, 0)
            if index >= QUARTERS * rows * width:
                at = index - (QUARTERS - 1) * rows * width
            sign = of_rows[quarter * ROWS + at // width] if index < QUARTERS * rows * width else 1
            total[at % width] += value * sign * of_elements[offset + at] * (1 - 2 * (place >> 4 & 1))
    return [each * width**0.5 for each in total]


@pytest.mark.parametrize(
    ("shape", "width"),
    [((), 257), ((0,), 257), ((5,), 257), ((300, 7), 257), ((140_000,), 257), ((530_000,), 257), ((3, 514), 251)],
)
def test_projections_are_those_of_the_format(shape: tuple[int, ...], width: int) -> None:
    """A trace of today must mean the same in any later version: this is the definition, written out."""
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.tensor(projected(values.reshape(-1).tolist(), 3, width), dtype=torch.float64)
    torch.testing.assert_close(project(values, 3), expected, rtol=0, atol=1e-10)


Difference = Callable[[Tensor, int], object]


def random_(difference: Tensor, seed: int) -> object:
    return difference.normal_(generator=torch.Generator().manual_seed(seed))


DIFFERENCES: dict[str, Difference] = {
    "everywhere": random_,
    "a constant": lambda difference, seed: difference.fill_(1.0),
    "a row": lambda difference, seed: random_(difference[seed], seed),
    "a constant row": lambda difference, seed: difference[seed].fill_(1.0),
    "a column": lambda difference, seed: random_(difference[:, seed], seed),
    "a constant column": lambda difference, seed: difference[:, seed].fill_(1.0),
    "a head": lambda difference, seed: random_(difference[:, 64 * (seed % 4) :][:, :64], seed),
    "a bias": lambda difference, seed: difference.copy_(random_(torch.empty(difference.shape[1]), seed)),
    "a factor of a row": lambda difference, seed: difference.copy_(random_(torch.empty(len(difference), 1), seed)),
    "every second row": lambda difference, seed: random_(difference[::2], seed),
}


@pytest.mark.parametrize("width", [1024, 1028])  # 1028 = 4 * 257
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_distance_is_estimated_without_bias(difference: str, width: int) -> None:
    ratios = []
    for seed in range(60):
        values = torch.zeros(512, width)
        DIFFERENCES[difference](values, seed)
        ratios.append(float(project(values, seed).square().mean() / values.double().square().sum()))
    spread, mean = torch.std_mean(torch.tensor(ratios))
    assert abs(mean - 1) < 0.06  # four standard deviations of a mean of 60
    assert spread < 0.15  # 0.12, whose estimate from 60 has a standard deviation of 9 %
    assert 0.55 < min(ratios) < max(ratios) < 1.5


Error = Callable[[Tensor], Tensor]


def rows_exchanged(values: Tensor) -> Tensor:
    wrong = values.clone()
    wrong[[3, 400]] = wrong[[400, 3]]
    return wrong


ERRORS: dict[str, Error] = {
    "two rows exchanged": rows_exchanged,
    "tokens shifted by one": lambda values: values.roll(1, 0),
    "shards of rows exchanged": lambda values: values.roll(len(values) // 2, 0),
    "halves of features exchanged": lambda values: values.roll(values.shape[1] // 2, 1),
    "interleaved features": lambda values: values.unflatten(1, (2, -1)).transpose(1, 2).flatten(1),
    "neighbouring heads exchanged": lambda values: values.unflatten(1, (-1, 2, 64)).flip(2).flatten(1),
    "one shard in all places": lambda values: values[:, :256].repeat(1, 4),
    "a factor": lambda values: values * 1.01,
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_with_a_structure_is_seen_at_its_size(error: str) -> None:
    """The values have a structure, too: rows and columns of other sizes, a constant, and noise."""
    generator = torch.Generator().manual_seed(1)
    row, column = (torch.randn(shape, generator=generator).exp() for shape in ((512, 1), (1, 1024)))
    values = (row * column + torch.randn(512, 1024, generator=generator) + 3.0).double()
    difference = values - ERRORS[error](values)
    for seed in range(10):
        estimate = float((project(values, seed) - project(values - difference, seed)).square().mean().sqrt())
        # Four standard deviations, of 5.7 %: a few large rows and columns make it more than 4.5.
        assert estimate == pytest.approx(float(difference.norm()), rel=0.23)


def test_one_wrong_element_is_exact() -> None:
    values = torch.zeros(600, 1000)
    values[123, 456] = -3.0
    assert float(project(values).square().mean().sqrt()) == pytest.approx(3.0, rel=1e-12)


def test_projections_are_linear() -> None:
    one, other = torch.randn(2, 600, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(project(2 * one - other), 2 * project(one) - project(other), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        (torch.float32, (512, 1024), 6e-8),
        (torch.float32, (100, 1000), 1e-14),
        (torch.float64, (512, 1024), 1e-14),
        (torch.bfloat16, (512, 1024), 1e-8),
        (torch.float16, (512, 1024), 1e-8),
    ],
)
def test_rounding_is_small(dtype: torch.dtype, shape: tuple[int, int], error: float) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    difference = project(values) - project(values.double())
    assert float(difference.square().mean().sqrt()) <= error * float(values.double().norm())


@pytest.mark.parametrize("precision", ["high", "medium"])
def test_the_precision_of_products_does_not_matter(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(512, 1024, generator=torch.Generator().manual_seed(1))
    before, found = torch.get_float32_matmul_precision(), project(values)
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(project(values), found)
    finally:
        torch.set_float32_matmul_precision(before)


def test_values_alone_matter_and_not_how_they_lie() -> None:
    values = torch.randn(300, 700, generator=torch.Generator().manual_seed(1))
    spread = torch.zeros(600, 1400)
    spread[::2, ::2] = values
    for other in (values.t().contiguous().t(), spread[::2, ::2], values.clone().requires_grad_()):
        assert torch.equal(project(other), project(values))
        assert torch.equal(samples(other), samples(values))
    one = torch.ones(1, 1).expand(300, 700)
    assert torch.equal(project(one), project(one.contiguous()))


def test_whole_numbers_have_sketches() -> None:
    values = torch.arange(-50, 50)
    assert torch.equal(project(values), project(values.double()))


def test_samples_are_elements_at_the_same_places() -> None:
    values = torch.arange(5000.0)
    found = samples(values.view(50, 100))
    assert len(found) == 64
    assert torch.equal(samples(values * 2), found * 2)
    assert not torch.equal(samples(values, seed=1), found)
    assert torch.equal(samples(values[:9]), values[:9].double())
    assert len(set(found.tolist())) > 55
    # As an earlier version has recorded them.
    assert samples(torch.arange(1_000_000.0))[:4].tolist() == [692379.0, 341735.0, 417744.0, 218535.0]


def test_a_sketch_tells_what_is_not_finite() -> None:
    values = torch.randn(700, 900)
    assert sketch(values)["finite"]
    assert sketch(values)["norm"] == pytest.approx(float(values.norm()), rel=0.2)
    for wrong in (float("nan"), float("inf")):
        values[3, 4] = wrong
        assert not sketch(values)["finite"]


def test_nothing_is_drawn() -> None:
    before = torch.get_rng_state()
    sketch(torch.ones(1000))
    assert torch.equal(torch.get_rng_state(), before)
