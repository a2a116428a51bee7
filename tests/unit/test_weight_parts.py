"""Codes that ranks make of parts of a weight are those of the whole one, bit for bit."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from megalite_kernels.recipes import recipe
from megalite_kernels.tiles import quantize_weight
from megalite_kernels.weight_parts import Matrices

SIZES = [(1, 300, 200), (3, 130, 257), (2, 128, 128), (1, 5, 1000)]


def values_of(size: tuple[int, int, int]) -> Tensor:
    """Return values of very different sizes, with an infinity and a NaN in the last matrix, and zeros in the first."""
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 6, size[2])
    drawn[0, : size[1] // 2] = -0.0
    drawn[-1, -1, -1], drawn[-1, 0, 0] = math.inf, math.nan
    return drawn


@pytest.mark.bits
@pytest.mark.parametrize(("name", "size"), [("tensorwise", SIZES[0]), *(("blockwise", size) for size in SIZES)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parts_have_the_codes_of_the_whole(name: str, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    whole, matrices = values_of(size).to(dtype), Matrices(recipe(name), size)
    flat = whole.flatten()
    for parts in (1, 2, 7):
        ends = [len(flat) * number // parts for number in range(parts + 1)]
        cut = [(flat[start:stop], start) for start, stop in pairwise(ends)]
        tops = torch.stack([matrices.largest(*part) for part in cut]).amax(0)
        scales, factors = matrices.scales(tops)
        found = matrices.tiles(torch.cat([matrices.codes(*part, factors) for part in cut]), scales)
        for one, other in zip(found, quantize_weight(whole.flatten(0, 1), recipe(name), size[0]), strict=True):
            assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
            assert torch.equal(one.scales.nan_to_num(7.0), other.scales.nan_to_num(7.0))


def test_a_part_without_elements_has_no_largest_one() -> None:
    matrices = Matrices(recipe("blockwise"), (1, 130, 130))
    assert torch.equal(matrices.largest(torch.empty(0), 0), torch.zeros(2, 2))
    assert matrices.codes(torch.empty(0), 0, torch.zeros(2, 2)).shape == (0,)
