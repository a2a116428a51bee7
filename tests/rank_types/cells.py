"""Networks of every family on layouts of every class, one rank of many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.config.model import ModelConfig
from megalite.config.pipeline_layout import StageLayers
from megalite.conversion.families import FAMILIES
from megalite.model.batch import MicroBatch
from megalite.model.gpt import HIDDEN_STATES, GPT
from megalite.optim.buckets import DataParallel, make_buckets
from megalite.parallel.context import AttentionWay
from megalite.parallel.initialization import initialize
from megalite.parallel.mesh import UnconnectedMesh
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import SequenceLayout, zigzag
from tests.harness.huggingface import as_written, make_config
from tests.rank_types.checker import Checked, set_type, type_of, require

WORLD = 16_384
SEQUENCE = 16
