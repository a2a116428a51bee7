"""Rivals of the fused operations: the same in plain PyTorch, compiled or not, and Liger-Kernel's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from benchmarks.errors import largest, relative
from megalite_kernels.cases import ROTARY_GROUPS, ROTARY_HEADS
from megalite_kernels.measure import Step, step_of

RIVALS = {"torch": "PyTorch", "compile": "torch.compile", "liger": "Liger-Kernel"}
Functions = Mapping[str, Callable[..., Any]]
"""Functions by a case's name or its first word; they take the case's inputs."""


def _half(tensor: Tensor) -> tuple[Tensor, Tensor]:
    first, second = tensor.chunk(2, dim=-1)
    return first, second


def _residual(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def run(input: Tensor, residual: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        total = input + residual
        return norm(total, *weights), total

    return run


def _rms_norm(input: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, 1e-5)


def _layer_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(input, weight.shape, weight, bias, 1e-5)


def _gated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def run(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
        gate, up = _half(gate_up if bias is None else gate_up + bias)
        return activation(gate) * up

    return run


def _activated(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda input, bias=None: activation(input if bias is None else input + bias)


def _rotated(projected: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    half, heads = cosine.shape[-1], ROTARY_HEADS + 2 * ROTARY_GROUPS
    width = projected.shape[-1] // heads

    def turned(heads: Tensor) -> Tensor:
        first, second, rest = heads.float().split([half, half, width - 2 * half], dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], dim=-1).to(heads.dtype)

    query, key_value = projected.split([ROTARY_HEADS * width, 2 * ROTARY_GROUPS * width], dim=-1)
    key, _ = key_value.unflatten(-1, (ROTARY_GROUPS, 2, width)).unbind(dim=-2)
    return turned(query.unflatten(-1, (ROTARY_HEADS, width))), turned(key)


def _fused_adamw(weights: Tensor, gradients: Tensor, average: Tensor, squares: Tensor) -> Tensor:
    """Update as torch.optim.AdamW(fused=True) does."""
    parts = [[tensor] for tensor in (weights, gradients, average, squares)]
    numbers = {"beta1": 0.9, "beta2": 0.95, "lr": 1e-2, "weight_decay": 0.1, "eps": 1e-8}
    steps = [torch.ones((), device=weights.device)]
    adamw(*parts, [], steps, fused=True, amsgrad=False, maximize=False, **numbers)
    return weights


def _written_adamw(weights: Tensor, gradients: Tensor, average: Tensor, squares: Tensor) -> Tensor:
    """The same, for a compiler."""
    average.lerp_(gradients, 0.1)
    squares.mul_(0.95).addcmul_(gradients, gradients, value=0.05)
    return weights.mul_(0.999).addcdiv_(average, squares.sqrt().mul_(4.5).add_(1e-8), value=-0.1)


def _with_parameters(update: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an update of masters, from which bf16 parameters are rounded."""
    return lambda *inputs: update(*inputs).bfloat16()


def _norm(values: Tensor) -> Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float32)


def _updates(update: Callable[..., Tensor]) -> Functions:
    """Return the updates of which all is in fp32 but the parameters."""
    return {"adamw float32": update, "adamw bfloat16/float32": _with_parameters(update)}


def _cut_quick_geglu(gate_up: Tensor, bias: Tensor) -> Tensor:
    gate, up = (gate_up + bias).chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


PLAIN: Functions = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "residual_rms_norm": _residual(_rms_norm),
    "residual_layer_norm": _residual(_layer_norm),
    "gelu": _activated(partial(F.gelu, approximate="tanh")),
    "exact_gelu": _activated(F.gelu),
    "squared_relu": _activated(lambda input: F.relu(input).square()),
    "swiglu": _gated(F.silu),
    "geglu": _gated(partial(F.gelu, approximate="tanh")),
    "exact_geglu": _gated(F.gelu),
    "quick_geglu": _cut_quick_geglu,
    "rotary_embedding": _rotated,
    "sums_of_squares": _norm,
    **_updates(_fused_adamw),
}
"""Operations as one writes them in PyTorch."""
COMPILED: Functions = _updates(_written_adamw)
"""Operations that torch.compile has instead: it cannot look into what is fused already."""


def liger() -> Functions:
    """Liger-Kernel's, by the same names; those with a gate take it and the up projection as two tensors. Raises
    ModuleNotFoundError where it is not installed.
    """
    functions = importlib.import_module("liger_kernel.transformers.functional")
    return {
        "rms_norm": lambda x, w: functions.liger_rms_norm(x, w, 1e-5),
        "layer_norm": lambda x, w, b: functions.liger_layer_norm(x, w, b, 1e-5),
        "residual_rms_norm": lambda x, r, w: functions.liger_fused_add_rms_norm(x, r, w, 1e-5),
        "squared_relu": functions.liger_relu_squared,
        "swiglu": functions.liger_swiglu,
        "geglu": functions.liger_geglu,
        "cross_entropy": functions.liger_cross_entropy,
    }


def available(rivals: Sequence[str], notes: list[str]) -> dict[str, Functions]:
    """The functions of each rival that is here, by name."""
    found: dict[str, Functions] = {}
    for rival in rivals:
        if rival != "liger":
            found[rival] = {**PLAIN, **COMPILED} if rival == "compile" else PLAIN
            continue
        try:
            found[rival] = liger()
        except ImportError as error:
            notes.append(f"Liger-Kernel is left out ({error}): pip install liger-kernel")
    return found


def function_for(name: str, functions: Functions) -> Callable[..., Any] | None:
    """Return the function for the case with this name, if a rival has one."""
    return functions.get(name) or functions.get(name.split()[0])


def own_inputs(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return copies, which a step may overwrite."""
    return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in inputs]


def difference(
    ours: Callable[[Sequence[Tensor]], Sequence[Tensor]], function: Callable[..., Any], inputs: Sequence[Tensor]
) -> float:
    """Return the largest norm of the difference of outputs and gradients to ours, relative to ours."""
    found = []
    theirs = (lambda both: function(*_halves(both))) if _takes_halves(function) else function
    for run in (ours, lambda inputs: _several(theirs(*inputs))):
        own = own_inputs(inputs)
        outputs = run(own)
        ends = [output for output in outputs if output.requires_grad]
        wanted = [tensor for tensor in own if tensor.requires_grad]
        generator = torch.Generator(own[0].device).manual_seed(0)
        arriving = [torch.randn(end.shape, generator=generator, device=end.device).to(end.dtype) for end in ends]
        gradients = torch.autograd.grad(ends, wanted, arriving) if ends else ()
        found.append([*outputs, *gradients])
    pairs = zip(*found, strict=False)  # ours may return more, such as moments
    return largest(relative(theirs, own) for own, theirs in pairs)


def _takes_halves(function: Callable[..., Any]) -> bool:
    return getattr(function, "__name__", "") in ("liger_swiglu", "liger_geglu")


def _halves(both: Tensor) -> list[Tensor]:
    return [half.contiguous() for half in both.chunk(2, dim=-1)]


def _several(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def rival_step(rival: str, function: Callable[..., Any], inputs: Sequence[Tensor]) -> Step:
    """Return the function to time, which may overwrite the inputs."""
    if rival == "compile":
        function = torch.compile(function, dynamic=False)
    if _takes_halves(function):
        inputs = [half.detach().requires_grad_() for half in _halves(inputs[0])]

    return step_of(lambda inputs: _several(function(*inputs)), inputs)
