from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite_kernels.loss_options import Columns
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --make-vocab-size-divisible-by 32"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def of_rank(rank: int, width: int, vocab_size: int) -> Columns:
    return Columns(rank * width, width, vocab_size)


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(Columns, "of_rank", of_rank)
