from __future__ import annotations

from torch import Tensor

from museum.plain.optimizer import State, adam_update
from museum.plain.settings import Settings

SETTINGS: dict[str, object] = {}


def counted_before(state: State, gradient: Tensor, settings: Settings, step: int, rate: float, decay: float) -> None:
    adam_update(state, gradient, settings, step + 1, rate, decay)


PATCHES = {"adam_update": counted_before}
