from __future__ import annotations

from museum.plain.network import Stage
from museum.plain.ranks import Ranks

SETTINGS = {"experts": 4, "tp": 2, "sp": True}


def leave(stage: Stage, ranks: Ranks) -> None:
    pass


PATCHES = {"sum_router_gradients": leave}
