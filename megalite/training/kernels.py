"""How a run computes, decided before its first operation."""

from __future__ import annotations

from megalite.config.kernels import KernelsConfig
from megalite.errors import ConfigurationError
from megalite.training.compiled import require_compiler
from megalite_kernels import implementation


def choose_kernels(config: KernelsConfig) -> None:
    """Raises ConfigurationError where what is chosen needs what is not installed."""
    if config.compile:
        require_compiler()
    try:
        implementation.choose(config.kernels, to_reference=config.to_reference)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--kernels {config.kernels}: {error}") from error
