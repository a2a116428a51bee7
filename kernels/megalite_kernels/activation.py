"""Activations of the feed-forward layer, and the soft cap of logits.

GELU, by the error function or in its tanh form (arXiv:1606.08415), squared ReLU (arXiv:2109.08668), and SwiGLU and
GeGLU, silu(gate) * up and gelu(gate) * up (arXiv:2002.05202), over the fused layout in which the gate's columns stand
before the up projection's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.products import product_into


def gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def exact_gelu(input: Tensor) -> Tensor:
    return F.gelu(input)


def squared_relu(input: Tensor) -> Tensor:
    return F.relu(input).square()


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
        torch.ops.aten.silu_backward.grad_input(gradients[0] * up, gate, grad_input=gate_gradient)
        return result


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 * ffn] to [..., ffn]."""
    output: Tensor = _SwiGLU.apply(gate_up)
    return output


class _GeGLU(torch.autograd.Function):
    """As _SwiGLU; `approximate` is torch's name of GELU's form."""

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
        torch.ops.aten.gelu_backward.grad_input(
            gradients[0] * up, gate, approximate=ctx.approximate, grad_input=gate_gradient
        )
        return result, None


def geglu(gate_up: Tensor) -> Tensor:
    """[..., 2 * ffn] to [..., ffn], with GELU in its tanh form."""
    output: Tensor = _GeGLU.apply(gate_up, "tanh")
    return output


def exact_geglu(gate_up: Tensor) -> Tensor:
    """[..., 2 * ffn] to [..., ffn]."""
    output: Tensor = _GeGLU.apply(gate_up, "none")
    return output


def soft_cap(input: Tensor, cap: float) -> Tensor:
    """cap * tanh(input / cap): nearly the input where that is small, and never beyond the cap (arXiv:2408.00118)."""
    return torch.tanh(input / cap) * cap
