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
    from megatron.core.transformer.moe.router import TopKRouter

    attach = TopKRouter.attach_and_log_load_balancing_loss

    def of_own_tokens(self: Any, *arguments: Any, valid_token_count: float, **named: Any) -> Any:
        count = valid_token_count / self.tp_cp_group.size()
        return attach(self, *arguments, **named, valid_token_count=count)

    with mock.patch.object(TopKRouter, "attach_and_log_load_balancing_loss", of_own_tokens):
        yield
