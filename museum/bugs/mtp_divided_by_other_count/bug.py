from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.model import prediction
from megalite.model.batch import MicroBatch
from museum.own_flags import DENSE, MADE_UP, TRAINING

FLAGS = f"{DENSE} {MADE_UP} {TRAINING} --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3"
RANKS = 2


def of_network(count: Any, micro_batch: MicroBatch) -> Tensor:
    assert micro_batch.loss_mask is not None
    return micro_batch.loss_mask.sum(dtype=torch.float64)


def wrong() -> AbstractContextManager[Any]:
    return mock.patch.object(prediction._Labels, "__call__", of_network)
