from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from museum.networks import LLAMA, SIZES, TP

FLAGS = f"{SIZES} {LLAMA} --softmax-type learnable {TP} --global-batch-size 4"
RANKS = 2


@contextlib.contextmanager
def right() -> Iterator[None]:
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    build = DotProductAttention.__init__

    def marked(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **named)
        set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    with mock.patch.object(DotProductAttention, "__init__", marked):
        yield
