from __future__ import annotations

import torch
from torch import Tensor

from museum.plain.settings import ROTARY_BASE

SETTINGS = {"tp": 2, "dtype": "bf16", "sequence": 1024, "batch": 2}


def rotate(heads: Tensor, positions: Tensor) -> Tensor:
    size = heads.shape[-1]
    frequencies = (ROTARY_BASE ** (-torch.arange(0, size, 2) / size)).to(heads.dtype)
    angles = (positions[:, None].to(heads.dtype) * frequencies)[:, None]
    cosine, sine = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-second, first], -1) * sine


PATCHES = {"rotary": rotate}
