"""A whole run: the seven concerns together."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.config.checkpoint import CheckpointConfig
from megalite.config.data import DataConfig
from megalite.config.logging import LoggingConfig
from megalite.config.model import ModelConfig
from megalite.config.optimizer import OptimizerConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.training import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Pre-train a GPT. Every flag of Megatron-LM is understood: what does not apply is refused with the reason."""

    model: ModelConfig
    """The network."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """The layout over ranks."""
    data: DataConfig
    """Samples and tokenizer."""
    optimizer: OptimizerConfig
    """The update rule and the learning rate."""
    training: TrainingConfig
    """Batches, length, evaluation, precision."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving and loading."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Screen, metrics, TensorBoard."""
