from __future__ import annotations

from museum.plain.network import name_in_files
from museum.plain.ranks import Ranks
from museum.plain.tensor_parallel import Weight

SETTINGS = {"tp": 2}


def on_each_rank(name: str, parameter: Weight, ranks: Ranks) -> bool:
    return name_in_files(name, ranks.settings) == name and ranks.data.index == 0


PATCHES = {"counts_in_norm": on_each_rank}
