from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES, SP

FLAGS = (
    f"{SIZES} {EXPERTS} {SP} --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--moe-router-load-balancing-type none --global-batch-size 4"
)
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core import tensor_parallel

    counts = tensor_parallel.param_is_not_tensor_parallel_duplicate

    def by_dense_ranks(parameter: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
        if not getattr(parameter, "allreduce", True):
            return bool(tp_group.rank() == 0)
        return bool(counts(parameter, tp_group, expert_tp_group))

    with mock.patch.object(tensor_parallel, "param_is_not_tensor_parallel_duplicate", by_dense_ranks):
        yield
