from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES, TP

FLAGS = f"{SIZES} {LLAMA} {TP} --global-batch-size 4"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch("megatron.core.tensor_parallel.param_is_not_tensor_parallel_duplicate", return_value=True)
