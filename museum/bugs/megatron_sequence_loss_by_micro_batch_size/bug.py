from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import EXPERTS, SIZES

FLAGS = (
    f"{SIZES} {EXPERTS} --global-batch-size 8 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-1 "
    "--calculate-per-token-loss"
)
RANKS = 2
SAMPLES = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core.transformer.moe.router import TopKRouter

    attach = TopKRouter.attach_and_log_load_balancing_loss

    def of_one_sample(self: Any, *arguments: Any, valid_token_count: float, **named: Any) -> Any:
        return attach(self, *arguments, **named, valid_token_count=valid_token_count / SAMPLES)

    with mock.patch.object(TopKRouter, "attach_and_log_load_balancing_loss", of_one_sample):
        yield
