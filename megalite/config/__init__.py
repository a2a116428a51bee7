"""What a run is: one frozen dataclass a concern; flags and YAML are made from them."""

from __future__ import annotations

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainingConfig",
]
