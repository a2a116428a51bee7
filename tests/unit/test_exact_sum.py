"""Sums without rounding, against Python's fractions; and norms, however parameters are dealt into buckets."""

from __future__ import annotations

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from megalite.optim.statistics import sums_over_ranks
from megalite.parallel.mesh import ParallelMesh

ANY = st.floats(min_value=0.0, allow_nan=False, allow_infinity=False)
CLOSE = st.floats(min_value=0.5, max_value=2.0)


def summed(*numbers: list[float]) -> list[float]:
    return sums_over_ranks([torch.tensor(each, dtype=torch.float64) for each in numbers], ParallelMesh().world())


@given(st.lists(ANY, max_size=40), st.lists(CLOSE, max_size=200))
def test_a_sum_is_rounded_once(wide: list[float], close: list[float]) -> None:
    for found, numbers in zip(summed(wide, close), (wide, close), strict=True):
        exact = sum(map(Fraction, numbers), Fraction())
        try:
            assert found == float(exact)
        except OverflowError:
            assert found == math.inf


def test_the_smallest_and_the_largest_numbers_count() -> None:
    tiny, huge = math.ulp(0.0), math.nextafter(math.inf, 0.0)
    assert summed([tiny] * 3, [huge], [huge, huge], [huge / 2, huge / 2], [1.0, tiny]) == [
        3 * tiny,
        huge,
        math.inf,
        huge,
        1.0,
    ]


def test_what_is_not_finite_shows() -> None:
    infinite, neither, zero = summed([1.0, math.inf], [math.inf, math.nan], [])
    assert (infinite, zero) == (math.inf, 0.0)
    assert math.isnan(neither)


def test_many_numbers_overflow_nothing_inside() -> None:
    numbers = torch.full((1 << 20,), math.nextafter(2.0, 0.0), dtype=torch.float64)
    assert sums_over_ranks([numbers], ParallelMesh().world()) == [math.ldexp(math.nextafter(2.0, 0.0), 20)]
