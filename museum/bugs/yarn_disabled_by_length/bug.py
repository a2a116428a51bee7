from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.model import layer_kinds, rotary
from museum.own_flags import LATENT, MADE_UP, TRAINING

FLAGS = f"""{LATENT} {MADE_UP} {TRAINING} --position-embedding-type yarn --rotary-scaling-factor 40
--yarn-original-max-position-embeddings 32 --mscale 1.0 --mscale-all-dim 1.0"""
LAYOUT = "--tensor-model-parallel-size 2"
RANKS = 2


def plain(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    return rotary.plain_frequencies(config.rotated_channels, config.rotary_base, dtype, device)


def wrong() -> AbstractContextManager[Any]:
    stack = ExitStack()
    stack.enter_context(mock.patch.object(rotary, "inverse_frequencies", plain))
    stack.enter_context(mock.patch.object(layer_kinds, "growth_of_scores", return_value=1.0))
    return stack
