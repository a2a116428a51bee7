from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES, TP

FLAGS = f"{SIZES} {LLAMA} {TP} --global-batch-size 4"
RANKS = 2


@contextlib.contextmanager
def wrong() -> Iterator[None]:
    """Build the model with an option that no flag gives."""
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def gathering(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named | {"parallel_output": False})

    with mock.patch.object(GPTModel, "__init__", gathering):
        yield
