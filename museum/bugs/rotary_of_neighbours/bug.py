from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.model import layer_kinds
from megalite.model.attention import AttentionSizes
from museum.own_flags import DENSE, MADE_UP, TRAINING

HUGGINGFACE = DENSE
FLAGS = f"--use-checkpoint-args {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def sizes(**given: Any) -> AttentionSizes:
    return AttentionSizes(**given | {"rotary_interleaved": True})


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(layer_kinds, "AttentionSizes", sizes)
