from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES

FLAGS = (
    f"{SIZES} {EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-1 "
    "--global-batch-size 4"
)
RANKS = 2


@contextlib.contextmanager
def right() -> Iterator[None]:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    attach = TopKRouter.attach_and_log_load_balancing_loss

    def undone(self: Any, activation: Any, coefficient: float, loss: Any, *others: Any, **named: Any) -> Any:
        """Undo the average over data-parallel ranks, of which each has its own tokens' part of the loss."""
        ranks = parallel_state.get_data_parallel_world_size()
        return attach(self, activation, coefficient, loss * ranks, *others, **named)

    with mock.patch.object(TopKRouter, "attach_and_log_load_balancing_loss", undone):
        yield
