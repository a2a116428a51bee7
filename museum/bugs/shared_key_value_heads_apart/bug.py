from __future__ import annotations

from museum.plain.network import Stage
from museum.plain.ranks import Ranks

SETTINGS = {"tp": 4}


def leave(stage: Stage, ranks: Ranks) -> None:
    pass


PATCHES = {"sum_shared_key_value_gradients": leave}
