from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES

FLAGS = f"{SIZES} {LLAMA} --bf16 --use-distributed-optimizer --lr 1e-2 --min-lr 1e-2 --global-batch-size 8"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch(
        "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._copy_main_params_to_model_params"
    )
