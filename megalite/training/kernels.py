"""Choice of a run's kernels before its first operation, and compilation of layers with torch.compile.

The code between matrix products and attention is compiled. All layers share the compiled code. Not traced are:

- parallel linear layers: they communicate, and pass weight gradients to the gradient buffers in backward;
- attention, which is already one kernel;
- dropout, which would be recompiled for the sample numbers of each micro-batch;
- the wait for the gather of a parameter before its first use.
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

from megalite.config import RunConfig
from megalite.config.kernels import KernelsConfig
from megalite.config.layer_specs import kinds_without_attention
from megalite.config.model import ModelConfig
from megalite.errors import ConfigurationError
from megalite.model.attention_core import LocalCore
from megalite.model.context_parallel import ContextParallelCore
from megalite.model.gpt import GPT
from megalite.model.heads_norm import HeadsNorm
from megalite.model.latent_attention import LatentAttention
from megalite.model.moe import MoE
from megalite.model.recurrent import Convolution, RecurrentCore
from megalite.model.sequence_parts import FeedForwardInParts
from megalite.model.sparse_attention import SparseAttention
from megalite.optim.buckets import Bucket
from megalite.parallel.adapter import Adaptable
from megalite.parallel.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from megalite.parallel.products import PLAIN
from megalite.parallel.randomness import RandomKey
from megalite_kernels.attention import draws_its_own
from megalite_kernels.implementation import Kernels, on_gpu, use
from megalite_kernels.recipes import recipe
from megalite_kernels.scaled_products import UNIT, refusal

_UNTRACED: tuple[tuple[type, str], ...] = (
    (ColumnParallelLinear, "forward"),
    (RowParallelLinear, "forward"),
    (LocalCore, "__call__"),
    (ContextParallelCore, "__call__"),
    (RecurrentCore, "run"),  # loops over the chunks of a sample, and messages
    (Convolution, "begin"),
    (Convolution, "convolve"),
    (HeadsNorm, "forward"),
    (LatentAttention, "share"),  # a message
    (LatentAttention, "attend"),
    (SparseAttention, "attend_to_chosen"),
    (ReplicatedLinear, "forward"),
    (FeedForwardInParts, "__call__"),  # compiles the function of a part by itself
    (MoE, "forward"),  # the numbers of rows differ in each step
    (RandomKey, "drop"),
    (Bucket, "finish_parameter_gather"),
)


def choose_kernels(config: KernelsConfig) -> None:
    """Choose the implementation of operations, and import the kernels: a broken Triton then fails here, not in a step.

    Raises ConfigurationError if the choice needs a library or a device that this machine lacks.
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
    except Exception as error:  # any type: it comes from a library that does not fit this machine
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        raise ConfigurationError(
            f"--kernels {config.kernels}: Triton is installed but cannot be imported ({reason}): install it again, or "
            "run without it by --kernels reference, which is slower"
        ) from error
    use(kernels)


def drops_by_rank(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Tell whether a fused operator of such devices draws dropout masks of its own, which differ between layouts."""
    fused = model.softmax_type == "vanilla" and draws_its_own(device, dtype, model.attn_logit_softcapping)
    # With dropout, sparse attention is in blocks, whose masks are drawn by position.
    with_operator = not model.kinds - {"sparse_attention"} <= kinds_without_attention()
    return fused and with_operator and model.attention_dropout > 0.0


def require_equal_dropout(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigurationError if context-parallel ranks would drop other probabilities than one rank does."""
    model, parallel = config.model, config.parallel
    dtype = getattr(torch, config.training.dtype)
    if parallel.context_parallel_size > 1 and drops_by_rank(model, device, dtype):
        raise ConfigurationError(
            f"--attention-dropout {model.attention_dropout} with --context-parallel-size "
            f"{parallel.context_parallel_size}: the fused operator of this GPU draws its own mask, which depends on "
            "the ranks: give --attention-dropout 0"
        )


def require_recipe(config: RunConfig, device: torch.device) -> None:
    """Raise ConfigurationError if a GPU is to multiply, not to emulate, in few bits that it does not have."""
    chosen = config.low_precision
    if chosen.recipe is None or not on_gpu(device) or config.kernels.kernels == "reference":
        return
    if config.training.fp64:
        raise ConfigurationError(
            f"{chosen.flag} with --fp64 on a GPU, which has no such products: run it on a CPU, or emulate it by "
            "--kernels reference"
        )
    if problem := refusal(recipe(chosen.recipe, chosen.fp8_format or "e4m3"), device):
        raise ConfigurationError(f"{chosen.flag}: {problem}: leave the flag out, or emulate it by --kernels reference")


def require_whole_units(config: RunConfig, chunks: Iterable[GPT], device: torch.device) -> None:
    """Raise ConfigurationError if a GPU's products with one scale for a tensor do not take a weight's widths."""
    if config.low_precision.recipe != "tensorwise" or not on_gpu(device) or config.kernels.kernels == "reference":
        return
    for module in (module for chunk in chunks for module in chunk.modules()):
        if not isinstance(module, Adaptable) or not getattr(module, "products", PLAIN).rounds:
            continue
        for weight in module.weights_to_adapt():
            if any(width % UNIT for width in weight.shape):
                raise ConfigurationError(
                    f"{config.low_precision.flag}: a rank has {weight.shape[0]} x {weight.shape[1]} of "
                    f"{weight.sharding.name}, and a GPU multiplies multiples of {UNIT}: change these widths, or leave "
                    "the flag out"
                )


def require_compiler() -> None:
    """Raise ConfigurationError if the compiler that torch.compile needs is missing."""
    if torch.cuda.is_available():
        if importlib.util.find_spec("triton") is None:
            raise ConfigurationError("--compile needs Triton on a GPU, which is not installed: pip install triton")
    elif shutil.which(compiler := os.environ.get("CXX", "g++")) is None:
        raise ConfigurationError(f"--compile needs a C++ compiler on a CPU: no {compiler} found (set CXX to another)")


def compile_layers(chunks: Iterable[GPT], backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer when it first runs. Call `choose_kernels` before."""
    _leave_untraced()
    for chunk in chunks:
        for _, layer in chunk.numbered_layers():
            if (in_parts := layer.in_parts) is not None:
                in_parts.transform = torch.compile(in_parts.transform, backend=backend, dynamic=False)
            vars(layer)["forward"] = torch.compile(layer.forward, backend=backend, dynamic=False)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether a module is a layer that `compile_layers` has compiled."""
    return "forward" in vars(module)


@functools.cache
def _leave_untraced() -> None:
    """Exclude methods from tracing. A decorator at their definitions would always import the compiler (one second)."""
    for owner, name in _UNTRACED:
        setattr(owner, name, torch.compiler.disable(getattr(owner, name)))
