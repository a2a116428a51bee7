"""Configuration of a run: one frozen dataclass per concern, from which flags and YAML are derived."""

from __future__ import annotations

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.kernels import KernelsConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.parse import parse_arguments
from megalite.config.run import RunConfig
from megalite.config.training import TrainingConfig
from megalite.config.validate import resolve, validate
from megalite.config.yaml_file import dump, load_yaml

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "KernelsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RunConfig",
    "TrainingConfig",
    "dump",
    "load_yaml",
    "parse_arguments",
    "resolve",
    "validate",
]
