from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES, TP

FLAGS = f"{SIZES} {LLAMA} --qk-layernorm {TP} --global-batch-size 4"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch("megatron.core.distributed.finalize_model_grads._allreduce_non_tensor_model_parallel_grads")
