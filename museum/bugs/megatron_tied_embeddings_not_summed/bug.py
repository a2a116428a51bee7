from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from museum.networks import PP, ROTARY, SIZES

FLAGS = f"{SIZES} {ROTARY} {PP} --global-batch-size 4"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch("megatron.core.distributed.finalize_model_grads._allreduce_word_embedding_grads")
