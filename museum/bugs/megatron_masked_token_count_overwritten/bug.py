from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES, SP

FLAGS = (
    f"{SIZES} {EXPERTS} {SP} --global-batch-size 4 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-1 "
    "--calculate-per-token-loss"
)
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    """Give the model a mask of padding, of which there is none."""
    import torch
    from megatron.core.models.gpt import GPTModel

    forward = GPTModel.forward

    def masked(self: Any, tokens: Any, *arguments: Any, **named: Any) -> Any:
        return forward(self, tokens, *arguments, **named, padding_mask=torch.zeros_like(tokens, dtype=torch.bool))

    with mock.patch.object(GPTModel, "forward", masked):
        yield


@contextlib.contextmanager
def right() -> Iterator[None]:
    from megatron.core.transformer.moe import moe_utils

    reduce = moe_utils.reduce_from_tensor_model_parallel_region
    copied = lambda counts, group: reduce(counts.clone(), group)  # noqa: E731
    with wrong(), mock.patch.object(moe_utils, "reduce_from_tensor_model_parallel_region", copied):
        yield
