from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.model.batch import MicroBatch
from megalite.model.gpt import GPT
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} --window-size 5,0 {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = GPT._mask

    def mask(model: GPT, micro_batch: MicroBatch, window: int | None) -> Any:
        return right(model, micro_batch, None if window is None else window + 1)

    return mock.patch.object(GPT, "_mask", mask)
