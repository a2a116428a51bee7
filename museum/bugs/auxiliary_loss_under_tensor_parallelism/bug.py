from __future__ import annotations

from torch import Tensor

from museum.plain.gradients import scale_auxiliary_loss
from museum.plain.ranks import Ranks

SETTINGS = {"experts": 4, "auxiliary": 0.1, "tp": 2, "sp": True}


def by_own_tokens(loss: Tensor, ranks: Ranks) -> Tensor:
    return scale_auxiliary_loss(loss, ranks) / ranks.tp.size


PATCHES = {"scale_auxiliary_loss": by_own_tokens}
