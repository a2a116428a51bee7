from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.config.model import ModelConfig
from megalite.model import block
from megalite.model.layer_kinds import make_norm
from megalite.model.norm import LayerNorm
from megalite.parallel.context import ParallelContext
from museum.own_flags import MADE_UP, MAMBA, TRAINING

FLAGS = f"{MAMBA} {MADE_UP} {TRAINING} --norm-epsilon 1e-6"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    def make_wrong(config: ModelConfig) -> Callable[..., LayerNorm]:
        def make(context: ParallelContext, name: str, width: int) -> LayerNorm:
            return make_norm(config)(context, name, width, **{"eps": 1e-5} if "mamba" in name else {})

        return make

    return mock.patch.object(block, "make_norm", make_wrong)
