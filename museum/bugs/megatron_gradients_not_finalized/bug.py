from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES

FLAGS = f"{SIZES} {LLAMA} --global-batch-size 8"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch("megatron.training.training.finalize_model_grads")
