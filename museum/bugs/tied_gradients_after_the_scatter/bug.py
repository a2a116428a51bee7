from __future__ import annotations

from museum.plain.gradients import reduce_gradients
from museum.plain.network import EMBEDDING, HEAD, Stage
from museum.plain.ranks import Ranks, all_gather, all_sum

SETTINGS = {"tied": True, "pp": 2, "dp": 2, "zero": True}


def leave(stage: Stage, ranks: Ranks) -> None:
    pass


def scattered(stage: Stage, ranks: Ranks) -> None:
    before = {name: each.main_grad for name, each in stage.weights() if name in (EMBEDDING, HEAD)}
    reduce_gradients(stage, ranks)
    owner = 0 if ranks.is_first else ranks.data.size - 1
    for name, parameter in stage.weights():
        if name in before:
            has_sum = ranks.data.index == owner
            partial = parameter.main_grad if has_sum else before[name]
            parameter.main_grad = all_gather(all_sum(partial, ranks.tied), ranks.data)[owner]


PATCHES = {"tied_gradients": leave, "reduce_gradients": scattered}
