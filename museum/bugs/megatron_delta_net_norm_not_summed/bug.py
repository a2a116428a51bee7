from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import DELTA_NETS, TP, WIDTHS

FLAGS = f"{WIDTHS} {DELTA_NETS} {TP} --global-batch-size 4"
RANKS = 2


@contextlib.contextmanager
def right() -> Iterator[None]:
    import torch
    from megatron.core import parallel_state
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    build = GatedDeltaNet.__init__

    def with_sum(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        group = parallel_state.get_tensor_model_parallel_group()

        def summed(gradient: Any) -> Any:
            total = gradient.clone()
            torch.distributed.all_reduce(total, group=group)
            return total

        self.out_norm.weight.register_hook(summed)

    with mock.patch.object(GatedDeltaNet, "__init__", with_sum):
        yield
