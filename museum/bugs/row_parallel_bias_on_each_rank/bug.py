from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from megalite.parallel.linear import RowParallelLinear
from museum.own_flags import BIASED, MADE_UP, TRAINING

FLAGS = f"{BIASED} {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2
STEPS_BEFORE = 2  # biases begin at zero


def wrong() -> AbstractContextManager[Any]:
    right = RowParallelLinear.forward

    def forward(layer: RowParallelLinear, input: Tensor, *, unread: bool = False) -> Tensor:
        output = right(layer, input, unread=unread)
        return output if layer.bias is None else output + (layer.group.size - 1) * layer.bias

    return mock.patch.object(RowParallelLinear, "forward", forward)
