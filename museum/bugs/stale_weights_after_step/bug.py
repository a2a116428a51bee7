from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.shard import Segment
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --bf16"
LAYOUT = "--use-distributed-optimizer"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(Segment, "round_parameters")
