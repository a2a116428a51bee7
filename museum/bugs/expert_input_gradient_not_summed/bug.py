from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks, both
from museum.plain.tensor_parallel import gather_sequence

SETTINGS = {"experts": 4, "tp": 2, "sp": True}


def without_sum(hidden: Tensor, ranks: Ranks) -> Tensor:
    group = ranks.tp
    return both(hidden, lambda x: gather_sequence(x, group), lambda x: x.chunk(group.size, 1)[group.index])


PATCHES = {"enter_experts": without_sum}
