"""Activations of the feed-forward layer, the gate of attention's output, and the soft cap of logits.

- GELU, exact (with the error function) or in its tanh approximation (arXiv:1606.08415).
- Squared ReLU (arXiv:2109.08668).
- SwiGLU, silu(gate) * up, and GeGLU, gelu(gate) * up (arXiv:2002.05202). The input has the columns of the gate before
  those of the up projection. In gpt-oss, gelu is x * sigmoid(1.702 x), both are clamped, and 1 is added to up.

A bias is added to the input first. Its gradient is the sum over tokens of the input's gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.products import changed, product_into, rounded
from megalite_kernels.torch_internals import gelu_gradient_into, silu_gradient_into

# ------------------------------------------------------------------------------------------------- the references


_QUICK = 1.702


def _quick_gelu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor) -> None:
    opened = torch.sigmoid(_QUICK * input)
    product_into(place, gradient, opened * (1.0 + _QUICK * input * (1.0 - opened)))


_REFERENCES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),
    "exact_gelu": F.gelu,
    "squared_relu": lambda input: F.relu(input).square(),
    "silu": F.silu,
    "quick_gelu": lambda input: input * torch.sigmoid(_QUICK * input),
}
_GRADIENTS_INTO: Mapping[str, Callable[[Tensor, Tensor, Tensor], None]] = {
    "gelu": partial(gelu_gradient_into, approximate="tanh"),
    "exact_gelu": partial(gelu_gradient_into, approximate="none"),
    "silu": silu_gradient_into,
    "quick_gelu": _quick_gelu_gradient_into,
}
_GATES = {"swiglu": "silu", "geglu": "gelu", "exact_geglu": "exact_gelu", "quick_geglu": "quick_gelu"}


class _Gated(torch.autograd.Function):
    """Compute function(gate) * up, saving only the input. The gradients of gate and up are written into one tensor."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, function: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.function = function
        gate, up = gate_up.chunk(2, dim=-1)
        return changed(_REFERENCES[function](gate), "mul", up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_gradient, up_gradient = result.chunk(2, dim=-1)
        product_into(up_gradient, gradients[0], _REFERENCES[ctx.function](gate))
        _GRADIENTS_INTO[ctx.function](gate_gradient, gradients[0] * up, gate)
        return result, None


class _Limited(torch.autograd.Function):
    """Compute function(gate) * (up + offset) of clamped gate and up in fp32 or wider, saving only the input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, function: str, offset: float, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.function, ctx.offset, ctx.limit = function, offset, limit
        gate, up = _clamped(gate_up, limit)
        return rounded(_REFERENCES[function](gate) * (up + offset), gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        gate, up = _clamped(gate_up, ctx.limit)
        raw_gate, raw_up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up, dtype=gate.dtype)
        gate_gradient, up_gradient = result.chunk(2, dim=-1)
        product_into(up_gradient, gradients[0] * (raw_up.abs() <= ctx.limit), _REFERENCES[ctx.function](gate))
        of_gate = gradients[0] * (up + ctx.offset) * (raw_gate <= ctx.limit)
        _GRADIENTS_INTO[ctx.function](gate_gradient, of_gate, gate)
        return rounded(result, gate_up.dtype), None, None, None


def _clamped(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return gate and up in fp32 or wider: the gate at most at the limit, up at most so far from 0."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _activate(function: str, input: Tensor, bias: Tensor | None, *, gated: bool = False) -> Tensor:
    output: Tensor
    if current().runs_triton("swiglu" if gated else "gelu", input, bias):
        from megalite_kernels.activation_kernels import Activation

        output = Activation.apply(input, bias, function, gated, None, None)
        return output
    input = input if bias is None else input + bias
    output = _Gated.apply(input, function) if gated else _REFERENCES[function](input)
    return output


# ------------------------------------------------------------------------------------------------- public functions


def gelu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the tanh approximation of GELU of input + bias: [..., ffn] and [ffn] to [..., ffn]."""
    return _activate("gelu", input, bias)


def exact_gelu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute GELU of input + bias: [..., ffn] and [ffn] to [..., ffn]."""
    return _activate("exact_gelu", input, bias)


def squared_relu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute max(input + bias, 0) squared: [..., ffn] and [ffn] to [..., ffn]."""
    return _activate("squared_relu", input, bias)


def swiglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute SwiGLU of gate_up + bias: [..., 2 * ffn] and [2 * ffn] to [..., ffn]."""
    return _activate("silu", gate_up, bias, gated=True)


def geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute GeGLU of gate_up + bias with the tanh approximation: [..., 2 * ffn] and [2 * ffn] to [..., ffn]."""
    return _activate("gelu", gate_up, bias, gated=True)


def exact_geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute GeGLU of gate_up + bias: [..., 2 * ffn] and [2 * ffn] to [..., ffn]."""
    return _activate("exact_gelu", gate_up, bias, gated=True)


def quick_geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute GeGLU of gate_up + bias with x * sigmoid(1.702 x): [..., 2 * ffn] and [2 * ffn] to [..., ffn]."""
    return _activate("quick_gelu", gate_up, bias, gated=True)


def _limited(
    gate_up: Tensor, bias: Tensor | None = None, *, function: str, offset: float, limit: float | None
) -> Tensor:
    """Compute a gate that is clamped, or whose up projection has an offset, as `activation` describes."""
    output: Tensor
    if current().runs_triton("swiglu", gate_up, bias):
        from megalite_kernels.activation_kernels import Activation

        output = Activation.apply(gate_up, bias, function, True, limit, offset or None)
        return output
    whole = gate_up if bias is None else gate_up + bias
    output = _Limited.apply(whole, function, offset, math.inf if limit is None else limit)
    return output


GATED = {each.__name__: each for each in (swiglu, geglu, exact_geglu, quick_geglu)}
FUNCTIONS = {each.__name__: each for each in (gelu, exact_gelu, squared_relu)} | GATED
"""The activations by name."""


def activation(name: str, *, offset: float = 0.0, limit: float | None = None) -> Callable[..., Tensor]:
    """Return the activation of this name, a function of [..., 2 * ffn] or [..., ffn], and of a bias.

    Args:
        offset: number added to the up projection of one with a gate.
        limit: clamps of one with a gate: its gate from above, and the up projection on both sides; None for none.
    """
    if offset == 0.0 and limit is None:
        return FUNCTIONS[name]
    return partial(_limited, function=_GATES[name], offset=offset, limit=limit)


class _SigmoidGated(torch.autograd.Function):
    """Compute input * sigmoid(gate) in fp32 or wider, saving only the two."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(input, gate)
        return rounded(_sigmoid(gate) * input, input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        input, gate = ctx.saved_tensors
        opened = _sigmoid(gate)
        of_input = opened * gradients[0]
        of_gate = of_input * input * (1.0 - opened)
        return rounded(of_input, input.dtype), rounded(of_gate, gate.dtype)


def _sigmoid(gate: Tensor) -> Tensor:
    return torch.sigmoid(gate.to(torch.promote_types(gate.dtype, torch.float32)))


def sigmoid_gated(input: Tensor, gate: Tensor) -> Tensor:
    """Compute input * sigmoid(gate) of two tensors of one shape (arXiv:2505.06708)."""
    output: Tensor = _SigmoidGated.apply(input, gate)
    return output


def soft_cap(input: Tensor, cap: float) -> Tensor:
    """Compute cap * tanh(input / cap): close to small inputs, and never beyond the cap (arXiv:2408.00118)."""
    return torch.tanh(input / cap) * cap
