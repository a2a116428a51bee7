from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.layout import BucketShardSpec
from museum.own_flags import LATENT, MADE_UP, TRAINING

FLAGS = f"{LATENT} {MADE_UP} {TRAINING}"
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(BucketShardSpec, "counted_here", property(lambda spec: True))
