"""RMSNorm and LayerNorm over the last dimension.

RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm (arXiv:1607.06450):
(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias. Statistics in fp32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _RMSNorm(torch.autograd.Function):
    """With n = x * r, r = 1 / sqrt(mean(x^2) + epsilon) and g the incoming gradient:

    weight gradient = sum over tokens of g * n; input gradient = r * (g * weight - n * mean(g * n * weight)).
    Keeps the input and one number a token.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(input.shape[-1])
        inverse = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(input, weight, inverse)
        return (wide * inverse).mul_(weight).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        gradient, scale = gradients[0].to(inverse.dtype), weight.to(inverse.dtype)
        normed = input * inverse
        products = gradient * normed
        weight_gradient = products.flatten(0, -2).sum(dim=0)
        shared = (products @ scale).unsqueeze(-1).div_(input.shape[-1])
        input_gradient = (gradient * scale).addcmul_(normed, shared, value=-1.0).mul_(inverse)
        return input_gradient.to(input.dtype), weight_gradient.to(weight.dtype), None


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    output: Tensor = _RMSNorm.apply(input, weight, epsilon)
    return output


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    wide = input.to(weight.dtype)
    return F.layer_norm(wide, weight.shape, weight, bias.to(weight.dtype), epsilon).to(input.dtype)
