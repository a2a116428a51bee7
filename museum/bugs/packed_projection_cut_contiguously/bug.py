from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from megalite.parallel import initialization
from megalite.parallel.initialization import initial_values
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Box
from museum.own_flags import GATED_DELTA, MADE_UP, TRAINING

FLAGS = f"{GATED_DELTA} {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = initialization.set_initial_values

    @torch.no_grad()
    def cut(parameter: Parameter, seed: int) -> None:
        right(parameter, seed)
        parts = [piece.tensor for piece in parameter.sharding.pieces]
        if any(part.name.endswith(".beta") for part in parts):
            whole = [initial_values(part, Box((0,) * len(part.shape), part.shape), seed) for part in parts]
            fused = torch.cat([each.flatten(0, -2) for each in whole])
            parameter.copy_(fused.chunk(RANKS)[int(os.environ["RANK"])])

    return mock.patch.object(initialization, "set_initial_values", cut)
