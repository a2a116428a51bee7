from __future__ import annotations

from torch import Tensor

from museum.plain.optimizer import State, adam_update
from museum.plain.settings import Settings

SETTINGS = {"dp": 2, "zero": True}


def with_penalty(state: State, gradient: Tensor, settings: Settings, step: int, rate: float, decay: float) -> None:
    adam_update(state, gradient + decay * state.master, settings, step, rate, 0.0)


PATCHES = {"adam_update": with_penalty}
