"""Choice of a run's kernels, made before its first operation."""

from __future__ import annotations

import os

import torch

from megalite.config.kernels import KernelsConfig
from megalite.errors import ConfigurationError
from megalite.training.compiled import require_compiler
from megalite_kernels.implementation import Kernels, use


def choose_kernels(config: KernelsConfig) -> None:
    """Decide how operations are computed, and import the kernels: a broken Triton ends the run here, not in a step.

    Raises ConfigurationError where what is chosen needs what is not here.
    """
    if config.compile:
        require_compiler()
    try:
        kernels = Kernels(config.kernels, config.to_reference)
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"--kernels {config.kernels}: {error}") from error
    if config.kernels == "triton" and not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigurationError("--kernels triton needs a GPU, and torch finds none here: leave it at auto")
    try:
        kernels.import_triton(on_gpu=torch.cuda.is_available())
    except Exception as error:  # of whatever kind: it comes from a library that does not fit this machine
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ConfigurationError(
            f"--kernels {config.kernels}: Triton is installed but cannot be imported ({reason}): install it again, or "
            "run without it by --kernels reference, which is slower"
        ) from error
    use(kernels)
