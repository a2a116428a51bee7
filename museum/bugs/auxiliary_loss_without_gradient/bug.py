from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks

SETTINGS = {"experts": 4, "auxiliary": 0.05}


def unattached(loss: Tensor, ranks: Ranks) -> Tensor:
    return loss * 0.0


PATCHES = {"scale_auxiliary_loss": unattached}
