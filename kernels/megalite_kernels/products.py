"""Elementwise product that is written into existing memory."""

from __future__ import annotations

import torch
from torch import Tensor


def product_into(place: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Write first * second into `place`, which may be a view of a part of a larger tensor."""
    if torch.compiler.is_compiling():  # the compiler supports no such view as out=, and it fuses the copy
        return place.copy_(first * second)
    return torch.mul(first, second, out=place)
