from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite_kernels.activation import FUNCTIONS, exact_gelu
from museum.own_flags import BIASED, MADE_UP, TRAINING

FLAGS = f"{BIASED} --init-method-std 0.2 {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.dict(FUNCTIONS, {"gelu": exact_gelu})
