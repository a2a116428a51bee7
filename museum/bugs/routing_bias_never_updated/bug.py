from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from torch import Tensor

from megalite.model.router import Router
from museum.own_flags import EXPERTS, MADE_UP, TRAINING

FLAGS = f"""{EXPERTS} {MADE_UP} {TRAINING} --moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-bias-update-rate 0.01"""
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = Router._on_step

    def on_step(router: Router, totals: Tensor) -> None:
        assert router.expert_bias is not None  # as the flags say
        before = router.expert_bias.values.clone()
        right(router, totals)
        router.expert_bias.values.copy_(before)

    return mock.patch.object(Router, "_on_step", on_step)
