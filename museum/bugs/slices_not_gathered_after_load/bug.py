from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.training.trainer import Trainer
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}"
LAYOUT = "--use-distributed-optimizer"
RANKS = 2
STEPS_BEFORE = 2


def wrong() -> AbstractContextManager[Any]:
    right = Trainer.load

    def load(trainer: Trainer, *given: Any) -> None:
        buckets = trainer.optimizer.buckets
        drawn = [bucket.parameters.clone() for bucket in buckets]
        right(trainer, *given)
        for bucket, before in zip(buckets, drawn, strict=True):
            low, high = bucket.owned_range
            bucket.parameters[:low] = before[:low]
            bucket.parameters[high:] = before[high:]

    return mock.patch.object(Trainer, "load", load)
