from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch.nn.functional as F
from torch import Tensor

from megalite.model.mamba import Mamba
from museum.own_flags import MADE_UP, MAMBA, TRAINING

FLAGS = f"{MAMBA} {MADE_UP} {TRAINING}"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = Mamba._normed

    def normed(layer: Mamba, y: Tensor, gate: Tensor) -> Tensor:
        gated = y * F.silu(gate)
        of_one_group = F.rms_norm(gated, gated.shape[-1:], eps=1e-5) * layer.norm_weight
        return right(layer, y, gate).detach() + of_one_group - of_one_group.detach()

    return mock.patch.object(Mamba, "_normed", normed)
