from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from megalite.optim.learning_rate import Rates, RateSchedules
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --lr-decay-iters 5"
RANKS = 2
STEPS_BEFORE = 2


def at(schedules: RateSchedules, consumed: int) -> Rates:
    schedule, decay = schedules.learning_rate, schedules.weight_decay.at(consumed)
    rate = replace(schedule, maximum=schedule.at(4)).at(consumed)  # the last step before began with sample 4
    return Rates(rate, rate, decay)


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(RateSchedules, "at", at)
