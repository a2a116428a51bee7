"""A product that is written where it belongs."""

from __future__ import annotations

import torch
from torch import Tensor


def product_into(place: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """first * second in the memory of `place`, which may be a part of a larger tensor."""
    if torch.compiler.is_compiling():  # which takes no such part for out=, and fuses the copy
        return place.copy_(first * second)
    return torch.mul(first, second, out=place)
