"""RMSNorm and LayerNorm over the last dimension.

RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm (arXiv:1607.06450):
(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias. Statistics in fp32 or wider.

Input and output [..., hidden], weight and bias [hidden]. With n = (x - mean) * r, r = 1 / sqrt(... + epsilon), no mean
in RMSNorm, and g the incoming gradient, those of weight and bias are the sums over tokens of g * n and of g, and the
input's is r * (g * weight - n * mean(g * weight * n) - mean(g * weight)), the last term in LayerNorm alone.

With a residual the norm is of input + residual, rounded to their dtype, and that sum is returned beside it. The two
share one gradient, the above and the sum's own: an addition that is fused gives the same bits as one that is not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite_kernels import norm_kernels
from megalite_kernels.implementation import runs_triton
from megalite_kernels.launch import as_rows, looping_programs, tile

FORWARD_COLUMNS = 16384  # a wider row is read again from the cache for each of its statistics
BACKWARD_COLUMNS = 8192  # likewise
# Backward's sums over rows stay in registers: a program of RMSNorm, or of LayerNorm, which has twice as many, takes
# those of so many columns at most, or some spill; of fp32, whose columns take more registers, BACKWARD_COLUMNS.
SUMMED_COLUMNS = {False: 16384, True: 12288}

# ------------------------------------------------------------------------------------------------- the reference


class _RMSNormReference(torch.autograd.Function):
    """Keeps the input and one number a token."""

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


def rms_norm_reference(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    output: Tensor = _RMSNormReference.apply(input, weight, epsilon)
    return output


class _LayerNormReference(torch.autograd.Function):
    """Keeps the input and two numbers a token. (On low precision torch's own rounds on the way.)"""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        wide, scale, shift = _widened(input, weight, bias)
        output, mean, inverse = torch.native_layer_norm(wide, weight.shape, scale, shift, epsilon)
        ctx.save_for_backward(input, weight, bias, mean, inverse)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        *parts, mean, inverse = ctx.saved_tensors
        gradient, wide, *vectors = _widened(gradients[0], *parts)
        shape, all_three = vectors[0].shape, (True, True, True)
        found = torch.ops.aten.native_layer_norm_backward(gradient, wide, shape, mean, inverse, *vectors, all_three)
        of_input, of_weight, of_bias = (value.to(part.dtype) for value, part in zip(found, parts, strict=True))
        return of_input, of_weight, of_bias, None


def _widened(first: Tensor, *rest: Tensor) -> list[Tensor]:
    wide = torch.promote_types(first.dtype, torch.float32)
    return [part.to(wide) for part in (first, *rest)]


def layer_norm_reference(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    output: Tensor = _LayerNormReference.apply(input, weight, bias, epsilon)
    return output


# ------------------------------------------------------------------------------------------------- around the kernels


class _Norm(torch.autograd.Function):
    """LayerNorm, or RMSNorm where there is no bias, of the input; or of input + residual, and then that sum, too.

    Keeps what is normalised and one or two numbers a token.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        flat, width, centered = as_rows(input), input.shape[-1], bias is not None
        rows, added = flat.shape[0], None if residual is None else as_rows(residual)
        output = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        total = None if residual is None else torch.empty_like(output)
        inverses = torch.empty(rows, dtype=torch.float32, device=input.device)
        means = torch.empty_like(inverses) if centered else None
        if rows:
            shape = tile(width, largest=FORWARD_COLUMNS)
            norm_kernels.normalize[(-(-rows // shape.rows),)](
                *(flat, added, weight.contiguous(), None if bias is None else bias.contiguous()),
                *(total, output, means, inverses, rows, flat.stride(0), 0 if added is None else added.stride(0)),
                *(epsilon, width, centered, shape.rows, shape.columns),
                num_warps=shape.warps,
            )
        ctx.set_materialize_grads(False)
        if total is None:
            ctx.save_for_backward(input, weight, bias, means, inverses)
            return output.view(input.shape)
        total = total.view(input.shape)
        ctx.save_for_backward(total, weight, bias, means, inverses)
        return output.view(input.shape), total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight, bias, means, inverses = ctx.saved_tensors
        total_gradient = gradients[1] if len(gradients) == 2 else None
        if gradients[0] is None:
            return total_gradient, total_gradient, None, None, None
        flat, gradient, width = as_rows(input), as_rows(gradients[0]), input.shape[-1]
        rows, centered = flat.shape[0], bias is not None
        added = None if total_gradient is None else as_rows(total_gradient)
        shape = tile(width, largest=BACKWARD_COLUMNS)
        most = BACKWARD_COLUMNS if input.dtype == torch.float32 else SUMMED_COLUMNS[centered]
        parts = -(-width // most)
        part = -(-width // (parts * shape.columns)) * shape.columns
        programs = looping_programs(-(-rows // shape.rows), parts * shape.warps, input.device)
        input_gradient = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        sums = torch.empty((1 + centered, programs, width), dtype=torch.float32, device=input.device)
        norm_kernels.normalize_backward[(programs, parts)](
            *(gradient, added, flat, weight.contiguous(), means, inverses),
            *(input_gradient, sums[0], sums[1] if centered else None),
            *(rows, gradient.stride(0), 0 if added is None else added.stride(0), flat.stride(0)),
            *(width, centered, shape.rows, shape.columns, part),
            num_warps=shape.warps,
        )
        totals, input_gradient = sums.sum(dim=1), input_gradient.view(input.shape)
        bias_gradient = None if bias is None else totals[1].to(bias.dtype)
        residual_gradient = input_gradient if len(gradients) == 2 else None
        return input_gradient, residual_gradient, totals[0].to(weight.dtype), bias_gradient, None


# ------------------------------------------------------------------------------------------------- what is called


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    if not runs_triton("norm", input, weight):
        return rms_norm_reference(input, weight, epsilon)
    output: Tensor = _Norm.apply(input, None, weight, None, epsilon)
    return output


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    if not runs_triton("norm", input, weight, bias):
        return layer_norm_reference(input, weight, bias, epsilon)
    output: Tensor = _Norm.apply(input, None, weight, bias, epsilon)
    return output


def residual_rms_norm(input: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of input + residual, both [..., hidden] of one dtype, and that sum: the norm is of the rounded one."""
    tensors = (input, residual, weight)
    if not (runs_triton("norm", *tensors) and runs_triton("residual_norm", *tensors)):
        total = residual + input
        return rms_norm(total, weight, epsilon), total
    outputs: tuple[Tensor, Tensor] = _Norm.apply(input, residual, weight, None, epsilon)
    return outputs


def residual_layer_norm(
    input: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """The norm of input + residual, both [..., hidden] of one dtype, and that sum: the norm is of the rounded one."""
    tensors = (input, residual, weight, bias)
    if not (runs_triton("norm", *tensors) and runs_triton("residual_norm", *tensors)):
        total = residual + input
        return layer_norm(total, weight, bias, epsilon), total
    outputs: tuple[Tensor, Tensor] = _Norm.apply(input, residual, weight, bias, epsilon)
    return outputs
