"""Triton kernels of the norms, with or without a residual, and their launchers: see norm.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import as_rows, looping_programs, tile

FORWARD_COLUMNS = 16384  # wider rows are read again, from the cache, for each statistic
BACKWARD_COLUMNS = 8192  # wider rows are read again, as in forward
# Most columns per program for which backward's sums over rows fit in registers without spilling. False is RMSNorm. True
# is LayerNorm, which has twice as many sums. For fp32, whose columns take more registers, it is BACKWARD_COLUMNS.
SUMMED_COLUMNS = {False: 16384, True: 12288}

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _sum_in_fp32(
    input: tl.tensor,
    residual: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    inside: tl.tensor,
) -> tl.tensor:
    """Load a tile of the input, or of input + residual rounded to the dtype in which it is stored, as fp32."""
    x = tl.load(input + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        x += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = x.to(residual.dtype.element_ty).to(tl.float32)
    return x


@triton.jit(do_not_specialize=["rows"])
def normalize(
    input: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    output: tl.tensor,
    means: tl.tensor,
    inverses: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    residual_stride: tl.tensor,
    epsilon: tl.tensor,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Normalize ROWS rows per program. Rows wider than COLUMNS are read once per statistic and once for the output."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = row < rows
    column = tl.arange(0, COLUMNS)
    mean = tl.zeros((ROWS,), tl.float32)
    squares = tl.zeros((ROWS,), tl.float32)
    if CENTERED:
        for start in tl.static_range(0, WIDTH, COLUMNS):
            inside = present[:, None] & (start + column < WIDTH)[None, :]
            x = _sum_in_fp32(input, residual, row, start + column, stride, residual_stride, inside)
            mean += tl.sum(x, 1)
        mean /= WIDTH
        tl.store(means + row, mean, mask=present)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = present[:, None] & (start + column < WIDTH)[None, :]
        if not CENTERED or COLUMNS < WIDTH:
            x = _sum_in_fp32(input, residual, row, start + column, stride, residual_stride, inside)
        distance = tl.where((start + column < WIDTH)[None, :], x - mean[:, None], 0.0)
        squares += tl.sum(distance * distance, 1)
    inverse = tl.rsqrt(squares / WIDTH + tl.cast(epsilon, tl.float32))
    tl.store(inverses + row, inverse, mask=present)
    for start in tl.static_range(0, WIDTH, COLUMNS):
        inside = present[:, None] & (start + column < WIDTH)[None, :]
        if COLUMNS < WIDTH:
            x = _sum_in_fp32(input, residual, row, start + column, stride, residual_stride, inside)
        place = row[:, None] * WIDTH + (start + column)[None, :]
        if residual is not None:
            tl.store(total + place, x.to(total.dtype.element_ty), mask=inside)
        scale = tl.load(weight + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * inverse[:, None] * scale[None, :]
        if CENTERED:
            y += tl.load(bias + start + column, mask=start + column < WIDTH, other=0.0).to(tl.float32)[None, :]
        tl.store(output + place, y.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def normalize_backward(
    gradient: tl.tensor,
    total_gradient: tl.tensor,
    input: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    inverses: tl.tensor,
    input_gradient: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    rows: tl.tensor,
    gradient_stride: tl.tensor,
    total_gradient_stride: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PART: tl.constexpr,
) -> None:
    """Compute the input's gradient, and partial sums [programs, WIDTH] of the gradients of weight and bias.

    Each program sums over its tiles of rows in a fixed order. Rows wider than COLUMNS are read twice, the second time
    from the cache. Rows wider than PART are split along the grid's second axis: each program writes PART columns, and
    reads the others only for the statistics.
    """
    program = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    own_column = column + tl.program_id(1) * PART if PART < WIDTH else column
    zeros = (tl.zeros((ROWS, COLUMNS), tl.float32),)
    weight_sum = zeros
    for _ in tl.static_range(COLUMNS, PART, COLUMNS):  # Triton 3.6 cannot multiply tuples
        weight_sum = weight_sum + zeros  # type: ignore[assignment]
    bias_sum = weight_sum
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
            common += tl.sum(scaled, 1)
        along_row = along[:, None] / WIDTH * inverse
        common_row = common[:, None] / WIDTH * inverse
        for start in tl.static_range(0, PART, COLUMNS):
            inside = present[:, None] & (start + own_column < WIDTH)[None, :]
            if COLUMNS < WIDTH:
                x = tl.load(input + row[:, None] * stride + (start + own_column)[None, :], mask=inside, other=0.0)
                g = tl.load(
                    gradient + row[:, None] * gradient_stride + (start + own_column)[None, :], mask=inside, other=0.0
                )
                scale = tl.load(weight + start + own_column, mask=start + own_column < WIDTH, other=0.0).to(tl.float32)
            normed = (x.to(tl.float32) - mean) * inverse
            result = g.to(tl.float32) * scale[None, :] * inverse - normed * along_row
            if CENTERED:
                result -= common_row
            result = result.to(input_gradient.dtype.element_ty)
            if total_gradient is not None:  # after rounding, so the bits are the same without fusion
                place = total_gradient + row[:, None] * total_gradient_stride + (start + own_column)[None, :]
                added = result.to(tl.float32) + tl.load(place, mask=inside, other=0.0).to(tl.float32)
                result = added.to(input_gradient.dtype.element_ty)
            tl.store(input_gradient + row[:, None] * WIDTH + (start + own_column)[None, :], result, mask=inside)
            weight_part, bias_part = (weight_sum[0] + g.to(tl.float32) * normed,), (bias_sum[0] + g.to(tl.float32),)
            weight_sum, bias_sum = weight_sum[1:] + weight_part, bias_sum[1:] + bias_part  # rotate to the next columns
    for start in tl.static_range(0, PART, COLUMNS):
        place = program.to(tl.int64) * WIDTH + start + own_column
        tl.store(weight_sums + place, tl.sum(weight_sum[start // COLUMNS], 0), mask=start + own_column < WIDTH)
        if CENTERED:
            tl.store(bias_sums + place, tl.sum(bias_sum[start // COLUMNS], 0), mask=start + own_column < WIDTH)


# ------------------------------------------------------------------------------------------------- launchers


class Norm(torch.autograd.Function):
    """RMSNorm, or LayerNorm if there is a bias. With a residual, it normalizes and also returns input + residual.

    It saves the tensor that it normalizes, and one or two numbers per token.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the output and, with a residual, also the sum that was normalized. Statistics are kept in fp32."""
        flat, width, centered = as_rows(input), input.shape[-1], bias is not None
        rows, added = flat.shape[0], None if residual is None else as_rows(residual)
        output = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        total = None if residual is None else torch.empty_like(output)
        inverses = torch.empty(rows, dtype=torch.float32, device=input.device)
        means = torch.empty_like(inverses) if centered else None
        if rows:
            shape = tile(width, largest=FORWARD_COLUMNS)
            normalize[(-(-rows // shape.rows),)](
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
        """Return the gradients of the input, residual, weight and bias; the first two are one tensor."""
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
        normalize_backward[(programs, parts)](
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
