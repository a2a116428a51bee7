"""RMSNorm and LayerNorm over the last dimension.

RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm (arXiv:1607.06450):
(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias. Statistics are in fp32 or wider.

Input and output are [..., hidden], weight and bias [hidden]. Let n = (x - mean) * r and r = 1 / sqrt(... + epsilon),
without the mean in RMSNorm, and let g be the incoming gradient. The gradients of weight and bias are the sums over
tokens of g * n and of g. The gradient of the input is
r * (g * weight - n * mean(g * weight * n) - mean(g * weight)), with the last term only in LayerNorm.

With a residual, the norm is of input + residual, rounded to their dtype, and this sum is a second output. Input and
residual have the same gradient: the gradient above plus the incoming gradient of the sum. The bits are the same with
and without the fusion of the addition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.products import changed, rounded
from megalite_kernels.torch_internals import layer_norm_gradients

# ------------------------------------------------------------------------------------------------- the reference


class _RMSNormReference(torch.autograd.Function):
    """RMSNorm that saves only the input and one number per token."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        mean_square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(input.shape[-1])
        inverse = mean_square.add_(epsilon).rsqrt_()
        ctx.save_for_backward(input, weight, inverse)
        return rounded(changed(wide * inverse, "mul", weight), input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight, inverse = ctx.saved_tensors
        gradient, scale = gradients[0].to(inverse.dtype), weight.to(inverse.dtype)
        normed = input * inverse
        products = gradient * normed
        weight_gradient = products.flatten(0, -2).sum(dim=0)
        # The sign is here, because the compiler rounds an addcmul with another factor than 1 differently.
        shared = (products @ scale).unsqueeze(-1).div_(-input.shape[-1])
        input_gradient = (gradient * scale).addcmul_(normed, shared).mul_(inverse)
        return input_gradient.to(input.dtype), weight_gradient.to(weight.dtype), None


class _LayerNormReference(torch.autograd.Function):
    """LayerNorm that saves only the input and two numbers per token.

    torch's own LayerNorm rounds intermediate values of low-precision inputs.
    """

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide = torch.promote_types(input.dtype, torch.float32)
        output, mean, inverse = torch.native_layer_norm(
            input.to(wide), weight.shape, weight.to(wide), bias.to(wide), epsilon
        )
        ctx.save_for_backward(input, weight, bias, mean, inverse)
        return rounded(output, input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        input, weight, bias, mean, inverse = ctx.saved_tensors
        wide, shape = mean.dtype, weight.shape
        of_input, of_weight, of_bias = layer_norm_gradients(
            gradients[0].to(wide), input.to(wide), shape, mean, inverse, weight.to(wide), bias.to(wide)
        )
        return of_input.to(input.dtype), of_weight.to(weight.dtype), of_bias.to(bias.dtype), None


# ------------------------------------------------------------------------------------------------- public functions


def norm(input: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Compute RMSNorm, or LayerNorm if there is a bias, of [..., hidden].

    The output has the shape and dtype of the input. Weight and bias may be wider.
    """
    output: Tensor
    if current().runs_triton("norm", input, weight, bias):
        from megalite_kernels.norm_kernels import Norm

        output = Norm.apply(input, None, weight, bias, epsilon)
    elif bias is None:
        output = _RMSNormReference.apply(input, weight, epsilon)
    else:
        output = _LayerNormReference.apply(input, weight, bias, epsilon)
    return output


def residual_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the norm of input + residual, and this sum. Both arguments are [..., hidden] with the same dtype.

    The sum is rounded to this dtype before the norm.
    """
    tensors = (input, residual, weight, bias)
    if not (current().runs_triton("norm", *tensors) and current().runs_triton("residual_norm", *tensors)):
        total = residual + input
        return norm(total, weight, bias, epsilon), total
    from megalite_kernels.norm_kernels import Norm

    outputs: tuple[Tensor, Tensor] = Norm.apply(input, residual, weight, bias, epsilon)
    return outputs
