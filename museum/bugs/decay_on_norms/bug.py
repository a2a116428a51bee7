from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.layout import ParameterGroup
from megalite.optim.learning_rate import Rates
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}"
LAYOUT = "--use-distributed-optimizer"
RANKS = 2


def of(rates: Rates, group: ParameterGroup) -> tuple[float, float]:
    return rates.learning_rate, rates.weight_decay


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(Rates, "of", of)
