"""The sum of squares against float64's, at sizes and magnitudes where fp32 squares would overflow or vanish."""

from __future__ import annotations

import math

import pytest
import torch

from megalite_kernels.l2_norm import COLUMNS, sum_of_squares
from tests.kernels.interpreter import nan_is_written, only_programs

SIZES = [0, 1, 15, 16, 1000, COLUMNS, 3 * COLUMNS + 17]


def drawn(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_the_sum_is_that_of_float64(dtype: torch.dtype, elements: int) -> None:
    values = drawn(elements, dtype)
    found, exact = sum_of_squares(values), values.double().square().sum()
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(exact.item(), rel=5e-7)  # a tree of fp32 additions, each rounded to nearest
    assert torch.equal(sum_of_squares(values), found)


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e20, 1e37])
def test_no_square_overflows_or_vanishes(magnitude: float) -> None:
    values = drawn(2 * COLUMNS).mul_(magnitude)
    values[COLUMNS:] *= 1e-5  # each program chooses for itself
    assert sum_of_squares(values).item() == pytest.approx(values.double().square().sum().item(), rel=5e-7)


@pytest.mark.parametrize("place", [0, 37, COLUMNS, COLUMNS + 15])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_anywhere(bad: float, place: int) -> None:
    values = drawn(COLUMNS + 16)
    values[place] = bad
    with nan_is_written():
        assert not math.isfinite(sum_of_squares(values).item())


def test_a_slice_has_its_own_sum_and_what_is_not_flat_is_refused() -> None:
    values = drawn(1000)
    assert sum_of_squares(values[3:700]).item() == pytest.approx(values[3:700].double().square().sum().item(), rel=5e-7)
    with pytest.raises(ValueError, match="side by side"):
        sum_of_squares(values[::2])


def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    elements = 2**31 + 2 * COLUMNS
    values = torch.empty(elements, dtype=torch.bfloat16)
    values[-COLUMNS:] = 3.0
    buffers = iter([torch.zeros(elements // COLUMNS), torch.ones(elements // COLUMNS)])
    with pytest.MonkeyPatch.context() as patch, only_programs(-1):
        patch.setattr(torch, "empty", lambda *_, **__: next(buffers))  # what other programs would write
        assert sum_of_squares(values).item() == 9.0 * COLUMNS
