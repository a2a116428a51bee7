from __future__ import annotations

from museum.plain.network import Stage
from museum.plain.ranks import Ranks

SETTINGS = {"tp": 2, "qk_norm": True}


def leave(stage: Stage, ranks: Ranks) -> None:
    pass


PATCHES = {"sum_head_norm_gradients": leave}
