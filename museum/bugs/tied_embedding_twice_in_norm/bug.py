from __future__ import annotations

from museum.plain.ranks import Ranks
from museum.plain.tensor_parallel import Weight

SETTINGS = {"tied": True, "pp": 2}


def on_each_stage(name: str, parameter: Weight, ranks: Ranks) -> bool:
    return True


PATCHES = {"counts_in_norm": on_each_stage}
