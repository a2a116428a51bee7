from __future__ import annotations

import torch
from torch import Tensor

from museum.plain.settings import ROTARY_BASE

SETTINGS: dict[str, object] = {}


def neighbours(heads: Tensor, positions: Tensor) -> Tensor:
    size = heads.shape[-1]
    frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2) / size)
    angles = (positions[:, None] * frequencies)[:, None]
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads[..., 0::2], heads[..., 1::2]
    return torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)


PATCHES = {"rotary": neighbours}
