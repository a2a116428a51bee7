from __future__ import annotations

from museum.plain.network import Stage
from museum.plain.ranks import Ranks, all_sum

SETTINGS = {"experts": 4, "ep": 2, "dp": 4, "average": True}


def averaged_over_copies(stage: Stage, ranks: Ranks) -> None:
    for _, parameter in stage.weights():
        if parameter.part.is_expert:
            parameter.main_grad = all_sum(parameter.main_grad, ranks.edp) / ranks.edp.size


PATCHES = {"reduce_expert_gradients": averaged_over_copies}
