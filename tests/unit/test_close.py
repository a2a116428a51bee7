"""The comparisons: values that they accept, and their messages."""

from __future__ import annotations

import math

import pytest
import torch

from tests.harness.close import (
    assert_bits_equal,
    assert_gradient_close,
    assert_number_close,
    assert_parameter_close,
)

ONES = torch.ones(2, 2, dtype=torch.float64)  # norm 2


def moved(distance: float) -> torch.Tensor:
    tensor = ONES.clone()
    tensor[1, 0] += distance
    return tensor


def test_gradient_is_measured_against_its_own_norm_or_a_thousandth_of_all() -> None:
    assert_gradient_close(moved(1.9e-10), ONES, global_norm=0.0)
    assert_gradient_close(moved(9e-10), ONES, global_norm=1e4)
    assert_gradient_close(torch.full_like(ONES, 1e-15), torch.zeros_like(ONES), global_norm=1.0)
    with pytest.raises(AssertionError, match=r"query: off by 1.05e-10 > 1e-10 of 2 .* 2 of 4: .*, expected 1.0"):
        assert_gradient_close(moved(2.1e-10), ONES, global_norm=1.0, name="query")
    with pytest.raises(AssertionError, match="expected zeros"):
        assert_gradient_close(ONES, torch.zeros_like(ONES), global_norm=0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite_is_not_close(bad: float) -> None:
    with pytest.raises(AssertionError):
        assert_gradient_close(moved(bad), ONES, global_norm=1.0)
    with pytest.raises(AssertionError):
        assert_gradient_close(moved(bad), moved(bad), global_norm=1.0)
    with pytest.raises(AssertionError):
        assert_number_close(bad, 1.0)


def test_shapes_and_dtypes_must_agree() -> None:
    with pytest.raises(AssertionError, match=r"w: shape \[4\], expected \[2, 2\]"):
        assert_gradient_close(ONES.reshape(4), ONES, global_norm=1.0, name="w")
    with pytest.raises(AssertionError, match=r"w: torch.float32, expected torch.float64"):
        assert_bits_equal(ONES.float(), ONES, "w")


def test_parameter_is_measured_against_its_norm_or_one_step() -> None:
    zeros = torch.zeros(100, dtype=torch.float64)
    assert_parameter_close(zeros + 0.9e-13, zeros, learning_rate=1e-3)
    with pytest.raises(AssertionError):
        assert_parameter_close(zeros + 1.1e-13, zeros, learning_rate=1e-3)


def test_numbers() -> None:
    assert_number_close(5.0 * (1 + 9e-11), 5.0)
    with pytest.raises(AssertionError, match=r"loss: .* is not 5\.0"):
        assert_number_close(5.0 * (1 + 2e-10), 5.0, "loss")


def test_bits_name_the_first_difference() -> None:
    assert_bits_equal(ONES, ONES.clone())
    with pytest.raises(AssertionError, match=r"w: 1 of 4 elements differ; the first at \(1, 0\): 1.5, expected 1.0"):
        assert_bits_equal(moved(0.5), ONES, "w")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_bits_are_compared_not_values(dtype: torch.dtype) -> None:
    zero, nan = torch.zeros((), dtype=dtype), torch.full((3,), math.nan, dtype=dtype)
    assert_bits_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"-0\.0, expected 0\.0"):
        assert_bits_equal(-zero, zero)
    assert_bits_equal(torch.arange(12, dtype=dtype).reshape(3, 4).T, torch.arange(12, dtype=dtype).reshape(3, 4).T)
