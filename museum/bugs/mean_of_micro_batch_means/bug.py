from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.pipeline import engine
from megalite.pipeline.schedules import Action
from museum.own_flags import DENSE, FROM_FILES, TRAINING, write_documents

FLAGS = f"{DENSE} {FROM_FILES} {TRAINING} --eod-mask-loss"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2
DATA = write_documents


def wrong() -> AbstractContextManager[Any]:
    right = engine._Step._backward

    def backward(step: engine._Step[Any], action: Action) -> None:
        counts = [float(each.loss_mask.sum()) for each in step.micro_batches]
        factor, multipliers = sum(counts) / len(counts) / counts[action.micro_batch], step.loss_multipliers
        step.loss_multipliers = {name: value * factor for name, value in multipliers.items()}
        right(step, action)
        step.loss_multipliers = multipliers

    return mock.patch.object(engine._Step, "_backward", backward)
