from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from museum.plain.settings import Settings
from museum.plain.weights import initial_weight

SETTINGS = {"dp": 2, "ep": 2, "experts": 4}


def but_of_experts(name: str, weights: Mapping[str, Tensor], settings: Settings) -> Tensor:
    read = initial_weight(name, weights, settings)
    if ".experts." not in name:
        return read
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(read.shape, generator=generator) * settings.hidden**-0.5


PATCHES = {"initial_weight": but_of_experts}
