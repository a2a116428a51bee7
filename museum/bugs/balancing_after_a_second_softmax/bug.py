from __future__ import annotations

from torch import Tensor

from museum.plain.mlp import auxiliary_loss
from museum.plain.ranks import Ranks

SETTINGS = {"dp": 2, "ep": 2, "experts": 4, "auxiliary": 0.1}


def of_probabilities(probabilities: Tensor, chosen: Tensor, ranks: Ranks) -> Tensor:
    return auxiliary_loss(probabilities.softmax(-1), chosen, ranks)


PATCHES = {"auxiliary_loss": of_probabilities}
