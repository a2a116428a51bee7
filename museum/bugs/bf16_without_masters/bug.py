from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.shard import Segment
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --bf16"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = Segment.round_parameters

    def round_both(segment: Segment) -> None:
        right(segment)
        if segment.has_master:
            segment.master.copy_(segment.parameters)

    return mock.patch.object(Segment, "round_parameters", round_both)
