from __future__ import annotations

import torch
from torch import Tensor

SETTINGS = {"documents": True}


def all_keys(queries: Tensor, keys: Tensor) -> Tensor:
    return torch.ones(*queries.shape, keys.shape[1], dtype=torch.bool)


PATCHES = {"document_mask": all_keys}
