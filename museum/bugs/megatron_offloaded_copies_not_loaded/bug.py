from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES

REFERENCE = f"{SIZES} {LLAMA} --bf16 --use-distributed-optimizer --lr 1e-2 --min-lr 1e-2 --global-batch-size 8"
FLAGS = f"{REFERENCE} --optimizer-cpu-offload --use-precision-aware-optimizer"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch("megatron.core.optimizer.cpu_offloading.HybridDeviceOptimizer.update_fp32_param_by_new_param")
