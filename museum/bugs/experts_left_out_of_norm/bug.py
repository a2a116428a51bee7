from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from megalite.optim.layout import BucketShardSpec
from museum.own_flags import EXPERTS, MADE_UP, TRAINING

FLAGS = f"{EXPERTS} {MADE_UP} {TRAINING}"
LAYOUT = """--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2
--expert-tensor-parallel-size 1"""
RANKS = 2


def counted_here(spec: BucketShardSpec) -> bool:
    is_expert = spec.layout.slots[0].parameter.sharding.expert
    return spec.replica == 0 and not (is_expert and os.environ["RANK"] != "0")


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(BucketShardSpec, "counted_here", property(counted_here))
