from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks

SETTINGS = {"experts": 4, "auxiliary": 0.05}


def undivided(loss: Tensor, ranks: Ranks) -> Tensor:
    return loss * ranks.settings.auxiliary


PATCHES = {"scale_auxiliary_loss": undivided}
