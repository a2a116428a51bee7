"""The sums of squares against float64's, at sizes and magnitudes where fp32 squares would overflow or vanish."""

from __future__ import annotations

import math

import pytest
import torch

from megalite_kernels.exact_sum import sums_of_squares
from megalite_kernels.implementation import Kernels, use
from tests.kernels.interpreter import nan_is_written, only_programs

PROGRAM = 4096  # elements that a program of the kernel adds up
SIZES = [0, 1, 15, 16, 1000, PROGRAM, 3 * PROGRAM + 17]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(elements)).to(dtype)


def exact(values: torch.Tensor) -> torch.Tensor:
    blocks = [block.double().square().sum() for block in values.split(64) if len(block)]
    return torch.stack(blocks) if blocks else torch.zeros(0, dtype=torch.float64)


def assert_sums(values: torch.Tensor, relative: float = 5e-7) -> None:  # a tree of fp32 additions, each to nearest
    found = sums_of_squares(values)
    torch.testing.assert_close(found, exact(values), rtol=relative, atol=0.0)
    assert torch.equal(sums_of_squares(values), found)


@pytest.mark.parametrize("elements", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_each_block_of_64_has_its_sum(dtype: torch.dtype, elements: int) -> None:
    assert_sums(drawn(elements, dtype))
    use(Kernels("reference"))
    assert_sums(drawn(elements, dtype), relative=1e-14)


@pytest.mark.parametrize("choice", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=lambda dtype: str(dtype)[6:])
def test_a_block_has_the_same_bits_wherever_it_stands(dtype: torch.dtype, choice: str) -> None:
    use(Kernels(choice))
    values = drawn(3 * PROGRAM, dtype) * torch.logspace(-8, 4, 3 * PROGRAM).to(dtype)
    whole = sums_of_squares(values)
    for begin, end in ((0, 1), (1, 2), (7, 30), (63, 65), (100, 192), (5, 191)):
        assert torch.equal(sums_of_squares(values[64 * begin : 64 * end]), whole[begin:end])


@pytest.mark.parametrize("magnitude", [1e-40, 1e-30, 1e-20, 1e-12, 1.0, 1e12, 1e20, 1e37])
def test_no_square_overflows_or_vanishes(magnitude: float) -> None:
    values = drawn(2 * PROGRAM).mul_(magnitude)
    values[PROGRAM - 64 :] *= 1e-5  # each block chooses for itself
    assert_sums(values)


@pytest.mark.parametrize("place", [0, 37, PROGRAM, PROGRAM + 15])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_shows_anywhere(bad: float, place: int) -> None:
    values = drawn(PROGRAM + 16)
    values[place] = bad
    with nan_is_written():
        assert sums_of_squares(values).isfinite().logical_not().nonzero().tolist() == [[place // 64]]


def test_a_slice_has_its_own_sums_and_what_is_not_flat_is_refused() -> None:
    values = drawn(1000)
    assert_sums(values[3:700])
    with pytest.raises(ValueError, match="must be contiguous"):
        sums_of_squares(values[::2])


@pytest.mark.wide
def test_elements_lie_beyond_2_to_the_31() -> None:
    """Memory is taken only where it is touched."""
    torch.use_deterministic_algorithms(False)  # fresh memory is left alone
    elements = 2**31 + 2 * PROGRAM
    values = torch.empty(elements, dtype=torch.bfloat16)
    values[-PROGRAM:] = 3.0
    buffers = iter([torch.zeros(elements // 64), torch.ones(elements // 64)])
    with pytest.MonkeyPatch.context() as patch, only_programs(-1):
        patch.setattr(torch, "empty", lambda *_, **__: next(buffers))  # what other programs would write
        sums = sums_of_squares(values)
    assert sums[-64:].tolist() == [9.0 * 64] * 64
    assert sums[:-64].count_nonzero() == 0
