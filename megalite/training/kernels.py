"""How a run computes, decided before its first operation."""

from __future__ import annotations

from megalite.config.kernels import KernelsConfig
from megalite.errors import ConfigurationError
from megalite_kernels import implementation


def choose_kernels(config: KernelsConfig) -> None:
    """Raises ConfigurationError where the chosen kernels need what is not installed."""
    try:
        implementation.choose(config.kernels, to_reference=config.to_reference)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--kernels {config.kernels}: {error}") from error
