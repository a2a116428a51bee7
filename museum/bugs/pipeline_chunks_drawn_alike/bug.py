from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

from torch import Tensor

from megalite.parallel import initialization
from megalite.parallel.sharding import Box, LogicalTensor
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING}".replace("--num-layers 2", "--num-layers 4")
LAYOUT = "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1"
RANKS = 2


def wrong() -> AbstractContextManager[Any]:
    right = initialization.initial_values

    def alike(tensor: LogicalTensor, box: Box, seed: int) -> Tensor:
        first_chunk = {"2": "0", "3": "1"}
        name = re.sub(r"(?<=^layers\.)[23]", lambda found: first_chunk[found[0]], tensor.name)
        return right(replace(tensor, name=name), box, seed)

    return mock.patch.object(initialization, "initial_values", alike)
