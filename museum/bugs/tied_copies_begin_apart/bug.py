from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from museum.plain.network import EMBEDDING, HEAD
from museum.plain.settings import Settings
from museum.plain.weights import initial_weight

SETTINGS = {"tied": True, "pp": 2}


def drawn_twice(name: str, weights: Mapping[str, Tensor], settings: Settings) -> Tensor:
    # the same numbers in another order: as large, and unlike the embedding
    return weights[EMBEDDING].flip(0) if name == HEAD else initial_weight(name, weights, settings)


PATCHES = {"initial_weight": drawn_twice}
