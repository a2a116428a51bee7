"""Reports of the run: screen, metrics file, TensorBoard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoggingConfig:
    """Options: where and how often numbers are reported."""

    log_interval: int = 100
    """Steps between lines on the screen."""
    metrics_path: str | None = None
    """File that gets one JSON object a step; unset: metrics.jsonl in the run directory."""
    log_params_norm: bool = False
    """Record in every step the norm of all parameters, and of each group of parameters that and the gradient's."""
    log_num_zeros_in_grad: bool = False
    """Record in every step how many elements of the gradient are zero."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard events."""
    tensorboard_log_interval: int = 1
    """Steps between those that TensorBoard gets."""
    log_loss_scale_to_tensorboard: bool = True
    """TensorBoard gets the loss scale, too."""
    log_validation_ppl_to_tensorboard: bool = False
    """Record the perplexity of evaluations, too."""
    log_world_size_to_tensorboard: bool = False
    """Record the number of ranks in every step."""
