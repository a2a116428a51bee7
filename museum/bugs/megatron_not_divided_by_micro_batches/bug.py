from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES

FLAGS = f"{SIZES} {LLAMA} --global-batch-size 12"
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    from megatron.core.pipeline_parallel import schedules

    divided = schedules.forward_step_calc_loss

    def whole(*arguments: Any) -> Any:
        return divided(*arguments[:6], 1, *arguments[7:])

    with mock.patch.object(schedules, "forward_step_calc_loss", whole):
        yield
