"""Choice of a run's kernels, made before its first operation, and layers under torch.compile.

What is compiled is between the matrix products and attention.

The parallel products stay as they are: they communicate, and in backward they hand their weights' gradients over.
Attention is a kernel of its own; and dropout would be compiled anew for the numbers of each micro-batch. What runs
around the first use of a parameter, to make it whole, is not traced either. All layers share the compiled code.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from megalite.config.kernels import KernelsConfig
from megalite.errors import ConfigurationError
from megalite.model.attention_core import LocalCore
from megalite.model.gpt import GPT
from megalite.optim.buckets import Bucket
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.randomness import RandomKey
from megalite_kernels.implementation import Kernels, use

_UNTRACED: tuple[tuple[type, str], ...] = (
    (ColumnParallelLinear, "forward"),
    (RowParallelLinear, "forward"),
    (LocalCore, "__call__"),
    (RandomKey, "drop"),
    (Bucket, "finish_parameter_gather"),
)


def choose_kernels(config: KernelsConfig) -> None:
    """Decide how operations are computed, and import the kernels: a broken Triton ends the run here, not in a step.

    Raises ConfigurationError if what is chosen needs what is not here.
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


def require_compiler() -> None:
    """Raise ConfigurationError if torch.compile lacks the tools that it compiles with."""
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise ConfigurationError("--compile needs Triton on a GPU, which is not installed: pip install triton")
    elif shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        raise ConfigurationError(f"--compile needs a C++ compiler on a CPU: there is no {compiler} (CXX names another)")


def compile_layers(chunks: Iterable[GPT], backend: str | Callable[..., Any] = "inductor") -> None:
    """Have each layer compiled when it first runs. The kernels must have been chosen before (`choose_kernels`)."""
    _leave_untraced()
    for chunk in chunks:
        for layer in chunk.layers:
            layer.forward = torch.compile(layer.forward, backend=backend, dynamic=False)


def is_compiled(module: nn.Module) -> bool:
    """Tell if a module is one of those layers."""
    return "forward" in vars(module)


@functools.cache
def _leave_untraced() -> None:
    """Exclude methods from tracing; done here and not at their definitions, since the mark imports the compiler (a
    second)."""
    for owner, name in _UNTRACED:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
