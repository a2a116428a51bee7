"""Training with rounded operands learns as without, and a run may begin to round, and stop."""

from __future__ import annotations

import functools

import pytest
import torch

from megalite.parallel.products import UNROUNDED, Rounding, Roundings
from megalite_kernels.recipes import recipe
from tests.end_to_end.golden import LLAMA, losses

WAYS = {
    "tensorwise": ("tensorwise", "e4m3", False),
    "tensorwise, hybrid, weight gradients": ("tensorwise", "hybrid", True),
    "blockwise": ("blockwise", "e4m3", False),
    "blockwise, weight gradients": ("blockwise", "e4m3", True),
    "mxfp8": ("mxfp8", "e4m3", True),
    "nvfp4": ("nvfp4", "e4m3", False),
}


@functools.cache
def last_losses(way: str) -> float:
    """Return the mean loss of the last ten of fifty steps."""
    roundings = UNROUNDED
    if way in WAYS:
        name, format, weight_gradients = WAYS[way]
        each = Rounding(recipe(name, format), weight_gradients)
        roundings = Roundings((each,) * LLAMA.num_layers)
    return sum(losses(LLAMA, torch.bfloat16, roundings)[-10:]) / 10


@pytest.mark.wide
@pytest.mark.parametrize("way", WAYS)
def test_fifty_steps_learn_as_without_rounding(way: str) -> None:
    plain = last_losses("bf16")
    assert last_losses(way) != plain
    assert abs(last_losses(way) - plain) < 0.01 * plain
