from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import CP, EXPERTS, SIZES

FLAGS = (
    f"{SIZES} {EXPERTS} {CP} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 --global-batch-size 4"
)
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    scale = MoEAuxLossAutoScaler.set_loss_scale

    def of_each_rank(factor: Any) -> None:
        scale(factor / parallel_state.get_context_parallel_world_size())

    with mock.patch.object(MoEAuxLossAutoScaler, "set_loss_scale", staticmethod(of_each_rank)):
        yield
