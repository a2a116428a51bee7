from __future__ import annotations

from museum.plain.gradients import counts_in_norm
from museum.plain.ranks import Ranks
from museum.plain.tensor_parallel import Weight

SETTINGS = {"experts": 4, "tp": 2, "sp": True, "ep": 2, "dp": 2}


def as_if_copied(name: str, parameter: Weight, ranks: Ranks) -> bool:
    is_taken_for_copy = parameter.part.is_expert and ranks.tp.index > 0
    return counts_in_norm(name, parameter, ranks) and not is_taken_for_copy


PATCHES = {"counts_in_norm": as_if_copied}
