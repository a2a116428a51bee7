from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.accumulator import Accumulator
from megalite.parallel.parameter import Gradient, Parameter
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}"
LAYOUT = "--pipeline-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = Accumulator.add

    def add(accumulator: Accumulator, parameter: Parameter, gradient: Gradient, use: int) -> None:
        accumulator.gradient(parameter, use).zero_()
        right(accumulator, parameter, gradient, use)

    return mock.patch.object(Accumulator, "add", add)
