from __future__ import annotations

from museum.plain.gradients import reduce_gradients
from museum.plain.network import Stage
from museum.plain.ranks import Ranks

SETTINGS = {"cp": 2}


def with_replicas_alone(stage: Stage, ranks: Ranks) -> None:
    if ranks.dp.size > 1:
        reduce_gradients(stage, ranks)


PATCHES = {"reduce_gradients": with_replicas_alone}
