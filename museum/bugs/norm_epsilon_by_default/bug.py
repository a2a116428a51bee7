from __future__ import annotations

import torch
from torch import Tensor

SETTINGS: dict[str, object] = {}


def by_default(hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)


PATCHES = {"normalised": by_default}
