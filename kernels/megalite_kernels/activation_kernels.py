"""Triton kernels of the activations and their launchers: see activation.py.

One forward and one backward kernel serve all activations. They process tiles of ROWS rows and COLUMNS columns of the
output. The input of a gated activation has the gate at the output's column and the up projection WIDTH columns later.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megalite_kernels.launch import as_rows, looping_programs, tile

COLUMNS = 4096  # wider rows are split over several programs

# ------------------------------------------------------------------------------------------------- the kernels


@triton.jit
def _value_and_slope(x: tl.tensor, FUNCTION: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the activation function of x and its derivative, in fp32."""
    if FUNCTION == "squared_relu":
        positive = tl.where(x < 0.0, 0.0, x)  # tl.maximum would drop NaN
        value, slope = positive * positive, 2.0 * positive
    elif FUNCTION == "exact_gelu":
        below = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476)  # normal cumulative distribution
        value, slope = x * below, below + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif FUNCTION == "gelu":
        # 0.5 * (1 + tanh(u)) is sigmoid(2 * u). 1 - sigmoid(x) is computed as sigmoid(-x), to avoid cancellation.
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        below, above = tl.sigmoid(twice), tl.sigmoid(-twice)
        value = x * below
        slope = below + value * above * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    elif FUNCTION == "quick_gelu":
        below, above = tl.sigmoid(1.702 * x), tl.sigmoid(-1.702 * x)
        value = x * below
        slope = below + 1.702 * value * above
    else:
        tl.static_assert(FUNCTION == "silu", "no kernel computes this activation")
        below, above = tl.sigmoid(x), tl.sigmoid(-x)
        value = x * below
        slope = below + value * above
    return value, slope


@triton.jit
def _load_with_bias(
    input: tl.tensor, bias: tl.tensor, row: tl.tensor, column: tl.tensor, stride: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    x = tl.load(input + row[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        x += tl.load(bias + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _limited(x: tl.tensor, LIMIT: tl.constexpr, BOTH: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the numbers cut at the limit, and where they were beyond it. BOTH: also at its negative."""
    beyond = x > LIMIT
    cut = tl.where(beyond, LIMIT, x)  # tl.minimum would drop NaN
    if BOTH:
        beyond = beyond | (x < -LIMIT)
        cut = tl.where(x < -LIMIT, -LIMIT, cut)
    return cut, beyond


@triton.jit(do_not_specialize=["rows"])
def activate(
    input: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    stride: tl.tensor,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write ROWS x COLUMNS elements of the output per program. GATED: the second half of a row is multiplied in."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    x = _load_with_bias(input, bias, row, column, stride, inside)
    if LIMIT is not None:
        x, _ = _limited(x, LIMIT, False)
    value, _ = _value_and_slope(x, FUNCTION)
    if GATED:
        up = _load_with_bias(input, bias, row, column + WIDTH, stride, inside)
        if LIMIT is not None:
            up, _ = _limited(up, LIMIT, True)
        value *= up if OFFSET is None else up + OFFSET
    tl.store(output + row[:, None] * WIDTH + column[None, :], value.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def activate_backward(
    gradient: tl.tensor,
    input: tl.tensor,
    bias: tl.tensor,
    input_gradient: tl.tensor,
    bias_sums: tl.tensor,
    rows: tl.tensor,
    gradient_stride: tl.tensor,
    stride: tl.tensor,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    OFFSET: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Compute the input's gradient and, if there is a bias, partial sums of its gradient.

    Each program sums over its tiles of rows, in a fixed order, and writes one row of `bias_sums`
    [programs, input's width].
    """
    program = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    width = WIDTH * 2 if GATED else WIDTH
    gate_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    up_sum = tl.zeros((ROWS, COLUMNS), tl.float32)
    for index in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(index, tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
        g = tl.load(gradient + row[:, None] * gradient_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        x = _load_with_bias(input, bias, row, column, stride, inside)
        if LIMIT is not None:
            x, beyond = _limited(x, LIMIT, False)
        value, slope = _value_and_slope(x, FUNCTION)
        if LIMIT is not None:
            slope = tl.where(beyond, 0.0, slope)
        place = input_gradient + row[:, None] * width + column[None, :]
        if GATED:
            up_gradient = g * value
            up = _load_with_bias(input, bias, row, column + WIDTH, stride, inside)
            if LIMIT is not None:
                up, beyond = _limited(up, LIMIT, True)
                up_gradient = tl.where(beyond, 0.0, up_gradient)
            g *= up if OFFSET is None else up + OFFSET
            tl.store(place + WIDTH, up_gradient.to(input_gradient.dtype.element_ty), mask=inside)
            up_sum += up_gradient
        g *= slope
        tl.store(place, g.to(input_gradient.dtype.element_ty), mask=inside)
        gate_sum += g
    if bias is not None:
        place = bias_sums + program.to(tl.int64) * width + column
        tl.store(place, tl.sum(gate_sum, 0), mask=column < WIDTH)
        if GATED:
            tl.store(place + WIDTH, tl.sum(up_sum, 0), mask=column < WIDTH)


# ------------------------------------------------------------------------------------------------- launchers


class Activation(torch.autograd.Function):
    """An activation that saves only the input and the bias."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        bias: Tensor | None,
        function: str,
        gated: bool,
        limit: float | None,
        offset: float | None,
    ) -> Tensor:
        """Return the output [..., width], where width is half of the input's with a gate."""
        flat, width = as_rows(input), input.shape[-1] // (1 + gated)
        rows, shape = flat.shape[0], tile(width, largest=COLUMNS)
        output = torch.empty((rows, width), dtype=input.dtype, device=input.device)
        if rows:
            activate[(-(-rows // shape.rows), -(-width // shape.columns))](
                *(flat, None if bias is None else bias.contiguous(), output, rows, flat.stride(0)),
                *(function, gated, limit, offset, width, shape.rows, shape.columns),
                num_warps=shape.warps,
            )
        ctx.save_for_backward(input, bias)
        ctx.constants = function, gated, limit, offset
        return output.view(*input.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the bias. Sums for the bias are in fp32, one row per program."""
        input, bias = ctx.saved_tensors
        flat, gradient = as_rows(input), as_rows(gradients[0])
        rows, width = gradient.shape
        shape = tile(width, largest=COLUMNS)
        programs, blocks = max(-(-rows // shape.rows), 1), -(-width // shape.columns)
        sums = None
        if bias is not None:
            programs = max(looping_programs(programs * blocks, shape.warps, input.device) // blocks, 1)
            sums = torch.empty((programs, flat.shape[1]), dtype=torch.float32, device=input.device)
        input_gradient = torch.empty(flat.shape, dtype=input.dtype, device=input.device)
        activate_backward[(programs, blocks)](
            *(gradient, flat, None if bias is None else bias.contiguous(), input_gradient, sums),
            *(rows, gradient.stride(0), flat.stride(0), *ctx.constants, width, shape.rows, shape.columns),
            num_warps=shape.warps,
        )
        bias_gradient = None if sums is None else sums.sum(dim=0).to(bias.dtype)
        return input_gradient.view(input.shape), bias_gradient, None, None, None, None
