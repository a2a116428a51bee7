from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --decoupled-lr 0.03 --decoupled-min-lr 0.003"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2
STEPS_BEFORE = 1


def of(rates: Rates, group: ParameterGroup) -> tuple[float, float]:
    return rates.learning_rate, rates.weight_decay if group.weight_decay else 0.0


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(Rates, "of", of)
