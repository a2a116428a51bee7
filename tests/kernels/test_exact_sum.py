"""Exact sums by the kernel: the same bits as the reference's and as Python's fractions, for any order and any split."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from megalite_kernels import exact_sum_kernels
from megalite_kernels.exact_sum import exact_digits, exact_digits_reference, rounded

TILE = exact_sum_kernels.TILE
TINY, HUGE = math.ulp(0.0), math.nextafter(math.inf, 0.0)


def drawn(elements: int) -> Tensor:
    """Numbers of all sizes, a tenth of them subnormal or zero."""
    generator = torch.Generator().manual_seed(elements)
    exponents = torch.randint(-1080, 1000, (elements,), generator=generator)
    numbers = torch.ldexp(torch.rand(elements, generator=generator, dtype=torch.float64), exponents)
    return numbers.masked_fill_(torch.rand(elements, generator=generator) < 0.05, 0.0)


def close(elements: int) -> Tensor:
    """Numbers as sums of squares of a gradient have them."""
    generator = torch.Generator().manual_seed(elements)
    return torch.randn(elements, generator=generator, dtype=torch.float64).square_().mul_(1e-9)


def sums(*numbers: Tensor) -> list[float]:
    found = [rounded(row) for row in exact_digits(numbers).tolist()]
    expected = [rounded(row) for row in exact_digits_reference(numbers).tolist()]
    assert found == expected or all(map(math.isnan, found + expected))
    return found


@pytest.mark.parametrize("elements", [0, 1, 15, TILE, 2 * TILE + 17])
def test_a_sum_is_rounded_once(elements: int) -> None:
    numbers = drawn(elements)
    assert sums(numbers) == [float(sum(map(Fraction, numbers.tolist()), Fraction()))]


@pytest.mark.wide
def test_each_tensor_has_its_sum_whatever_the_number_of_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = close(5 * TILE), close(100), torch.zeros(0, dtype=torch.float64), drawn(30)
    whole = sums(*numbers)
    monkeypatch.setattr(exact_sum_kernels, "PROGRAMS", 1)
    assert sums(*numbers) == whole
    order = torch.randperm(5 * TILE, generator=torch.Generator().manual_seed(0))
    assert sums(numbers[0][order], *numbers[1:]) == whole


def test_digits_of_parts_can_be_added() -> None:
    numbers = close(5 * TILE)
    together = exact_digits([numbers[:700]]) + exact_digits([numbers[700:]])
    assert [rounded(row) for row in together.tolist()] == sums(numbers)


def test_the_smallest_and_the_largest_numbers_count() -> None:
    lists = [TINY] * 3, [HUGE], [HUGE, HUGE], [HUGE / 2, HUGE / 2], [1.0, TINY], [2.0**-1022, TINY]
    expected = [3 * TINY, HUGE, math.inf, HUGE, 1.0, 2.0**-1022 + TINY]
    assert sums(*(torch.tensor(each, dtype=torch.float64) for each in lists)) == expected


def test_carries_overflow_nothing() -> None:
    """All digits of a mantissa are as large as they can be, in each program."""
    numbers = torch.full((4 * TILE,), math.nextafter(2.0, 0.0), dtype=torch.float64)
    assert sums(numbers) == [math.ldexp(math.nextafter(2.0, 0.0), 12)]


@pytest.mark.parametrize(("bad", "expected"), [([math.inf], math.inf), ([math.nan], math.nan)])
def test_what_is_not_finite_shows(bad: list[float], expected: float) -> None:
    (found,) = sums(torch.tensor([1.0, *bad, 2.0], dtype=torch.float64))
    assert found == expected or math.isnan(found) == math.isnan(expected) is True
    (both,) = sums(torch.tensor([math.inf, math.nan], dtype=torch.float64))
    assert math.isnan(both)
    digits = exact_digits([torch.tensor([math.inf, math.inf, math.nan, 1.0], dtype=torch.float64)])
    assert digits[0, :2].tolist() == [2, 1]
