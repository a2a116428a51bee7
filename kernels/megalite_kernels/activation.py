"""Activations of the feed-forward layer, and the soft cap of logits.

GELU, by the error function or in its tanh form (arXiv:1606.08415), squared ReLU (arXiv:2109.08668), and SwiGLU and
GeGLU, silu(gate) * up and gelu(gate) * up (arXiv:2002.05202), over the fused layout in which the gate's columns stand
before the up projection's.

A bias is added to the input first. Its gradient is the sum over tokens of the input's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import Operation, current
from megalite_kernels.products import product_into
from megalite_kernels.torch_internals import gelu_gradient_into, silu_gradient_into

# ------------------------------------------------------------------------------------------------- the references


def _squared_relu(input: Tensor) -> Tensor:
    return F.relu(input).square()


def _gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone; the gradients of gate and up are written side by side, not concatenated."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_gradient, up_gradient = result.chunk(2, dim=-1)
        product_into(up_gradient, gradients[0], F.silu(gate))
        silu_gradient_into(gate_gradient, gradients[0] * up, gate)
        return result


class _GeGLU(torch.autograd.Function):
    """GELU counterpart of _SwiGLU; `approximate` is torch's name of GELU's form."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.approximate = approximate
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        result = torch.empty_like(gate_up)
        gate_gradient, up_gradient = result.chunk(2, dim=-1)
        product_into(up_gradient, gradients[0], F.gelu(gate, approximate=ctx.approximate))
        gelu_gradient_into(gate_gradient, gradients[0] * up, gate, ctx.approximate)
        return result, None


def _geglu(gate_up: Tensor) -> Tensor:
    output: Tensor = _GeGLU.apply(gate_up, "tanh")
    return output


def _exact_geglu(gate_up: Tensor) -> Tensor:
    output: Tensor = _GeGLU.apply(gate_up, "none")
    return output


def _activate(
    operation: Operation, function: str, reference: Callable[[Tensor], Tensor], input: Tensor, bias: Tensor | None
) -> Tensor:
    if not current().runs_triton(operation, input, *(() if bias is None else (bias,))):
        return reference(input if bias is None else input + bias)
    from megalite_kernels.activation_kernels import Activation

    output: Tensor = Activation.apply(input, bias, function, operation == "swiglu")
    return output


# ------------------------------------------------------------------------------------------------- what is called


def gelu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """The tanh form of GELU of input + bias; [..., ffn] to the same, the bias [ffn]."""
    return _activate("gelu", "gelu", _gelu, input, bias)


def exact_gelu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """GELU of input + bias; [..., ffn] to the same, the bias [ffn]."""
    return _activate("gelu", "exact_gelu", F.gelu, input, bias)


def squared_relu(input: Tensor, bias: Tensor | None = None) -> Tensor:
    """max(input + bias, 0) squared; [..., ffn] to the same, the bias [ffn]."""
    return _activate("gelu", "squared_relu", _squared_relu, input, bias)


def swiglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """SwiGLU of gate_up + bias; [..., 2 * ffn] to [..., ffn], the bias [2 * ffn]."""
    return _activate("swiglu", "silu", _SwiGLU.apply, gate_up, bias)


def geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """GeGLU of gate_up + bias, with GELU in its tanh form; [..., 2 * ffn] to [..., ffn], the bias [2 * ffn]."""
    return _activate("swiglu", "gelu", _geglu, gate_up, bias)


def exact_geglu(gate_up: Tensor, bias: Tensor | None = None) -> Tensor:
    """GeGLU of gate_up + bias; [..., 2 * ffn] to [..., ffn], the bias [2 * ffn]."""
    return _activate("swiglu", "exact_gelu", _exact_geglu, gate_up, bias)


FUNCTIONS = {each.__name__: each for each in (gelu, exact_gelu, squared_relu, swiglu, geglu, exact_geglu)}
"""The activations by name."""


def soft_cap(input: Tensor, cap: float) -> Tensor:
    """cap * tanh(input / cap): nearly the input where that is small, and never beyond the cap (arXiv:2408.00118)."""
    return torch.tanh(input / cap) * cap
