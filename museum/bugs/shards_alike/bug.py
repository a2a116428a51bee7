from __future__ import annotations

from torch import Tensor

from museum.plain.ranks import Ranks
from museum.plain.tensor_parallel import Part

SETTINGS = {"tp": 2}


def shard_of_first_rank(whole: Tensor, part: Part, ranks: Ranks) -> Tensor:
    if part.range is None:
        return whole
    dimension, start, size = part.range
    is_table = part.shape[0] == ranks.settings.vocabulary
    return whole.narrow(dimension, start if is_table else 0, size)


PATCHES = {"initial_shard": shard_of_first_rank}
