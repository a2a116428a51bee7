from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LLAMA, PATTERN, WIDTHS

FLAGS = f"{WIDTHS} {LLAMA} {PATTERN} '*-/*-' --calculate-per-token-loss --global-batch-size 4"
RANKS = 2
MASKED = True


@contextlib.contextmanager
def right() -> Iterator[None]:
    """Take both counts over all data-parallel ranks, of which each has one micro-batch."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer import multi_token_prediction

    roll = multi_token_prediction.roll_tensor

    def over_ranks(tensor: Any, **named: Any) -> tuple[Any, Any]:
        rolled, count = roll(tensor, **named)
        if not tensor.is_floating_point():
            return rolled, count
        counts = torch.stack([tensor.sum(), count])
        torch.distributed.all_reduce(counts, group=parallel_state.get_data_parallel_group())
        return rolled, tensor.sum() * counts[1] / counts[0]

    with mock.patch.object(multi_token_prediction, "roll_tensor", over_ranks):
        yield
