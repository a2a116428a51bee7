from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from museum.plain.settings import Settings
from museum.plain.weights import initial_weight

SETTINGS = {"layers": 4, "pp": 2}


def of_first_stage(name: str, weights: Mapping[str, Tensor], settings: Settings) -> Tensor:
    each = settings.layers // settings.pp
    name = re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) % each), name)
    return initial_weight(name, weights, settings)


PATCHES = {"initial_weight": of_first_stage}
