from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES

FLAGS = f"{SIZES} {LLAMA} --decoupled-lr 1e-2 --decoupled-min-lr 1e-2 --global-batch-size 8"
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rate = OptimizerParamScheduler.get_lr

    def of_all(self: Any, group: dict[str, Any]) -> float:
        return float(rate(self, group | {"max_lr": self.max_lr, "min_lr": self.min_lr}))

    with mock.patch.object(OptimizerParamScheduler, "get_lr", of_all):
        yield
