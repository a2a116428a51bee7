"""Weights of averages of checkpoints, and their rounding."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from megalite.extras.averages.averages import exponential, of_decay, rounded, uniform
from megalite.optim.learning_rate import SHAPES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_are_rounded_once(dtype: torch.dtype) -> None:
    """Try values beside a tie, nearer to it than fp32 can tell: half of them would become the wrong neighbour."""
    grid = torch.tensor([1.0, -1.5, 3.25, 2.0**-20, 2.0**-126, 0.0], dtype=dtype).double()
    up = torch.nextafter(grid.to(dtype), torch.full((), torch.inf, dtype=dtype)).double()
    ties = (grid + up) / 2
    values = torch.cat([ties, ties + (up - grid) * 2.0**-40, ties - (up - grid) * 2.0**-40, grid, up])
    for value, found in zip(values.tolist(), rounded(values, dtype).double().tolist(), strict=True):
        low, high = max(x for x in grid.tolist() if x <= value), 0.0
        high = up[grid.tolist().index(low)].item()
        distances = [abs(Fraction(value) - Fraction(end)) for end in (low, high)]
        if distances[0] != distances[1]:
            assert found == (low if distances[0] < distances[1] else high), value
        else:
            assert found in (low, high), value
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e300, -0.0], dtype=torch.float64)
    assert torch.equal(rounded(special, dtype).isfinite(), torch.tensor([False, False, False, False, True]))
    random = torch.randn(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(rounded(random.float().double(), dtype), random.float().to(dtype)), "of fp32 as torch rounds"
    assert torch.equal(rounded(random, torch.float32), random.float())


def test_weights_of_each_method_are_one_together() -> None:
    for count in (2, 3, 7):
        for weights in (uniform(count), exponential(count, 0.9), *(of_decay(count, style) for style in SHAPES)):
            assert len(weights) == count
            assert math.fsum(weights) == pytest.approx(1.0, abs=1e-15)
        assert of_decay(count, "linear") == pytest.approx(uniform(count), abs=1e-15), "a linear decay is the mean"
    assert exponential(3, 0.9) == pytest.approx([0.81, 0.09, 0.1], abs=1e-15)


def test_the_average_of_wsm_is_the_decayed_course() -> None:
    """Compare it with where steps would have led that are as high as the decay is, one between two checkpoints."""
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randn(5, dtype=torch.float64, generator=generator) for _ in range(4)]
    places = [torch.zeros(5, dtype=torch.float64)]
    for each in steps:
        places.append(places[-1] + each)
    for style, height in SHAPES.items():
        average = sum(weight * place for weight, place in zip(of_decay(5, style), places, strict=True))
        decayed = sum(height(number / 5) * each for number, each in enumerate(steps, start=1))
        assert torch.allclose(average, decayed, rtol=0, atol=1e-14), style
