from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim import optimizer
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --clip-grad 0.3 --optimizer sgd"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(optimizer, "clipping", return_value=1.0)
