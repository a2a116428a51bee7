from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES, SP

FLAGS = (
    f"{SIZES} {EXPERTS} {SP} --expert-tensor-parallel-size 1 --moe-router-load-balancing-type none "
    "--global-batch-size 4"
)
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core.distributed import DistributedDataParallel

    build = DistributedDataParallel.__init__

    def unmarked(self: Any, config: Any, ddp_config: Any, module: Any, **named: Any) -> None:
        for parameter in module.parameters():
            parameter.allreduce = True
        build(self, config, ddp_config, module, **named)

    with mock.patch.object(DistributedDataParallel, "__init__", unmarked):
        yield
