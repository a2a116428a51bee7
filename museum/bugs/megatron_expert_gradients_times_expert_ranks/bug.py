from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES

FLAGS = f"{SIZES} {EXPERTS} --expert-model-parallel-size 2 --moe-router-load-balancing-type none --global-batch-size 8"
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core.distributed import DistributedDataParallel

    build = DistributedDataParallel.__init__

    def averaged_over_replicas(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        for group in self.expert_parallel_bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0 / self.expt_dp_group.size()

    with mock.patch.object(DistributedDataParallel, "__init__", averaged_over_replicas):
        yield
