from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.parallel.randomness import RandomKey, Site
from megalite.parallel.sequence import Runs
from megalite_kernels.dropout_mask import DropoutMask
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}".replace("--hidden-dropout 0 ", "--hidden-dropout 0.1 ")
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel"
RANKS = 2
STEPS_BEFORE = 1


def wrong() -> AbstractContextManager[Any]:
    right = RandomKey.dropout_mask

    def of_first_rank(key: RandomKey, probability: float, site: Site, rows: Runs) -> DropoutMask:
        begin = rows[0].start
        return right(key, probability, site, tuple(range(run.start - begin, run.stop - begin) for run in rows))

    return mock.patch.object(RandomKey, "dropout_mask", of_first_rank)
