"""RMSNorm and LayerNorm over the last dimension.

RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm (arXiv:1607.06450):
(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias. Statistics in fp32 or wider.

Input and output [..., hidden], weight and bias [hidden]. With n = (x - mean) * r, r = 1 / sqrt(... + epsilon), no mean
in RMSNorm, and g the incoming gradient, those of weight and bias are the sums over tokens of g * n and of g, and the
input's is r * (g * weight - n * mean(g * weight * n) - mean(g * weight)), the last term in LayerNorm alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.implementation import kernel, runs_triton
from megalite_kernels.launch import as_rows, looping_programs, tile

if TYPE_CHECKING:
    import triton.language as tl

FORWARD_COLUMNS = 16384  # a wider row is read again from the cache for each of its statistics
BACKWARD_COLUMNS = 8192  # likewise, and its weight gradient is added up in memory

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


def layer_norm_reference(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    wide = input.to(weight.dtype)
    return F.layer_norm(wide, weight.shape, weight, bias.to(weight.dtype), epsilon).to(input.dtype)


# ------------------------------------------------------------------------------------------------- the kernels


@kernel
def _normalize(
    input: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    means: tl.tensor,
    inverses: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program has ROWS rows, and goes over their columns once a statistic where they are more than COLUMNS."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    column = tl.arange(0, COLUMNS)
    mean = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    if CENTERED:
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = present[:, None] & (start + column < WIDTH)[None, :]
            x = tl.load(input + row[:, None] * stride + (start + column)[None, :], mask=inside, other=0.0)
            mean += tl.sum(x.to(tl.float32), 1)
        mean /= WIDTH
        tl.store(means + row, mean, mask=present)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = present[:, None] & (start + column < WIDTH)[None, :]
        if not CENTERED or COLUMNS < WIDTH:
            x = tl.load(input + row[:, None] * stride + (start + column)[None, :], mask=inside, other=0.0)
        distance = tl.where(inside, x.to(tl.float32) - mean[:, None], 0.0)
        squares += tl.sum(distance * distance, 1)
    inverse = tl.rsqrt(squares / WIDTH + tl.cast(epsilon, tl.float32))
    tl.store(inverses + row, inverse, mask=present)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = present[:, None] & (start + column < WIDTH)[None, :]
        if COLUMNS < WIDTH:
            x = tl.load(input + row[:, None] * stride + (start + column)[None, :], mask=inside, other=0.0)
        scale = tl.load(weight + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        y = (x.to(tl.float32) - mean[:, None]) * inverse[:, None] * scale[None, :]
        if CENTERED:
            y += tl.load(bias + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)[None, :]
        place = output + row[:, None] * WIDTH + (start + column)[None, :]
        tl.store(place, y.to(output.dtype.element_ty), mask=inside)


@kernel
def _normalize_backward(
    gradient: tl.tensor,
    input: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    inverses: tl.tensor,
    input_gradient: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    rows: tl.tensor,
    gradient_stride: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Each program adds up over its tiles of rows, in their order: [programs, WIDTH] sums of each parameter's gradient.

    Where rows are wider than COLUMNS, the sums must hold zeros at the start.
    """
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    weight_sum = tl.zeros((COLUMNS,), tl.float32)
    bias_sum = tl.zeros((COLUMNS,), tl.float32)
    for index in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(index, tl.int64) * ROWS + tl.arange(0, ROWS)
        present = row < rows
        inverse = tl.load(inverses + row, mask=present, other=0.0)[:, None]
        mean = tl.zeros((ROWS, 1), tl.float32)
        if CENTERED:
            mean = tl.load(means + row, mask=present, other=0.0)[:, None]
        along = tl.zeros((ROWS,), tl.float32)
        common = tl.zeros((ROWS,), tl.float32)
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = present[:, None] & (start + column < WIDTH)[None, :]
            x = tl.load(input + row[:, None] * stride + (start + column)[None, :], mask=inside, other=0.0)
            g = tl.load(gradient + row[:, None] * gradient_stride + (start + column)[None, :], mask=inside, other=0.0)
            scale = tl.load(weight + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
            scaled = g.to(tl.float32) * scale[None, :]
            along += tl.sum(scaled * (x.to(tl.float32) - mean) * inverse, 1)
            if CENTERED:
                common += tl.sum(scaled, 1)
        along /= WIDTH
        common /= WIDTH
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = present[:, None] & (start + column < WIDTH)[None, :]
            if COLUMNS < WIDTH:
                x = tl.load(input + row[:, None] * stride + (start + column)[None, :], mask=inside, other=0.0)
                g = tl.load(
                    gradient + row[:, None] * gradient_stride + (start + column)[None, :], mask=inside, other=0.0
                )
                scale = tl.load(weight + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
            normed = (x.to(tl.float32) - mean) * inverse
            result = (g.to(tl.float32) * scale[None, :] - normed * along[:, None] - common[:, None]) * inverse
            place = input_gradient + row[:, None] * WIDTH + (start + column)[None, :]
            tl.store(place, result.to(input_gradient.dtype.element_ty), mask=inside)
            weight_part = tl.sum(g.to(tl.float32) * normed, 0)
            bias_part = tl.sum(g.to(tl.float32), 0)
            if COLUMNS < WIDTH:
                valid = start + column < WIDTH
                sums = weight_sums + program.to(tl.int64) * WIDTH + start + column
                tl.store(sums, tl.load(sums, mask=valid, other=0.0) + weight_part, mask=valid)
                if CENTERED:
                    sums = bias_sums + program.to(tl.int64) * WIDTH + start + column
                    tl.store(sums, tl.load(sums, mask=valid, other=0.0) + bias_part, mask=valid)
            else:
                weight_sum += weight_part
                bias_sum += bias_part
        if COLUMNS < WIDTH:
            tl.debug_barrier()  # another thread may add to a sum in the next tile
    if COLUMNS >= WIDTH:
        tl.store(weight_sums + program.to(tl.int64) * WIDTH + column, weight_sum, mask=column < WIDTH)
        if CENTERED:
            tl.store(bias_sums + program.to(tl.int64) * WIDTH + column, bias_sum, mask=column < WIDTH)


# ------------------------------------------------------------------------------------------------- their gradient


class _Norm(torch.autograd.Function):
    """LayerNorm, or RMSNorm where there is no bias. Keeps the input and one or two numbers a token."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        flat, width = as_rows(input), input.shape[-1]
        rows, centered = flat.shape[0], bias is not None
        output = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        inverses = torch.empty(rows, dtype=torch.float32, device=input.device)
        means = torch.empty_like(inverses) if centered else None
        if rows:
            shape = tile(width, largest=FORWARD_COLUMNS)
            _normalize[(-(-rows // shape.rows),)](
                *(flat, weight.contiguous(), None if bias is None else bias.contiguous(), output, means, inverses),
                *(rows, flat.stride(0), epsilon, width, centered, shape.rows, shape.columns),
                num_warps=shape.warps,
            )
        ctx.save_for_backward(input, weight, bias, means, inverses)
        return output.view(input.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        input, weight, bias, means, inverses = ctx.saved_tensors
        flat, gradient, width = as_rows(input), as_rows(gradients[0]), input.shape[-1]
        rows, centered = flat.shape[0], bias is not None
        shape = tile(width, largest=BACKWARD_COLUMNS)
        programs = looping_programs(-(-rows // shape.rows), shape.warps, input.device)
        input_gradient = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        create = torch.zeros if shape.columns < width else torch.empty
        sums = create((1 + centered, programs, width), dtype=torch.float32, device=input.device)
        _normalize_backward[(programs,)](
            *(gradient, flat, weight.contiguous(), means, inverses),
            *(input_gradient, sums[0], sums[1] if centered else None),
            *(rows, gradient.stride(0), flat.stride(0), width, centered, shape.rows, shape.columns),
            num_warps=shape.warps,
        )
        totals = sums.sum(dim=1)
        bias_gradient = None if bias is None else totals[1].to(bias.dtype)
        return input_gradient.view(input.shape), totals[0].to(weight.dtype), bias_gradient, None


# ------------------------------------------------------------------------------------------------- what is called


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    if not runs_triton("norm", input, weight):
        return rms_norm_reference(input, weight, epsilon)
    output: Tensor = _Norm.apply(input, weight, None, epsilon)
    return output


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden], in the dtype of the input; the weight may be wider."""
    if not runs_triton("norm", input, weight, bias):
        return layer_norm_reference(input, weight, bias, epsilon)
    output: Tensor = _Norm.apply(input, weight, bias, epsilon)
    return output
