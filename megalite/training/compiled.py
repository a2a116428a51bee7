"""Layers under torch.compile: what is between their matrix products and attention.

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

from megalite.errors import ConfigurationError
from megalite.model.attention_core import LocalCore
from megalite.model.gpt import GPT
from megalite.optim.buckets import Bucket
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalite.parallel.randomness import RandomKey

_UNTRACED: tuple[tuple[type, str], ...] = (
    (ColumnParallelLinear, "forward"),
    (RowParallelLinear, "forward"),
    (LocalCore, "__call__"),
    (RandomKey, "drop"),
    (Bucket, "finish_parameter_gather"),
)


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
