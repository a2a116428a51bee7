"""Grouped linear layer: rows are sorted by expert, and each expert's rows are multiplied by its own matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.parameter import GroupedProductGradient, Parameter, accumulate_grad
from megalite.parallel.sharding import Sharding


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Parameter, offsets: tuple[int, ...], use: int) -> Tensor:
        # Not by save_for_backward: the saved tensor would not have the parameter's gradient buffer.
        ctx.weight, ctx.offsets, ctx.use = weight, offsets, use
        ctx.save_for_backward(input)
        matrices = _matrices(weight, input, offsets)
        output = input.new_empty(len(input), matrices.shape[1])
        for matrix, rows in zip(matrices, _rows(offsets), strict=True):
            torch.mm(input[rows], matrix.t(), out=output[rows])
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        input, (gradient,) = ctx.saved_tensors[0].detach(), gradients  # a deferred gradient must not keep the graph
        input_gradient = torch.empty_like(input, memory_format=torch.contiguous_format)
        for matrix, rows in zip(_matrices(ctx.weight, input, ctx.offsets), _rows(ctx.offsets), strict=True):
            torch.mm(gradient[rows], matrix, out=input_gradient[rows])
        # Last: accumulating the last gradient may free the weight.
        product = GroupedProductGradient(gradient, input, ctx.offsets)
        return input_gradient, accumulate_grad(ctx.weight, product, ctx.use), None, None


def grouped_linear(input: Tensor, weight: Parameter, offsets: Sequence[int], use: int = 0) -> Tensor:
    """Compute rows_e @ W_e.T for each expert e.

    The weight's gradient is accumulated once per backward, for all experts together, even without rows.

    Args:
        input: [rows, in], sorted by expert.
        weight: the matrices of this rank's experts, [experts * out, in].
        offsets: [experts + 1], from 0 to the number of rows: expert e has the rows from offsets[e] to offsets[e + 1].
        use: the number of this use, if the weight is tied.

    Returns:
        [rows, out].

    Raises:
        ValueError: the offsets do not cover all rows or do not match the weight's experts, the rows have another width,
            or the weight is not one tensor of experts.
    """
    if not offsets or offsets[0] != 0 or offsets[-1] != len(input) or any(b < a for a, b in pairwise(offsets)):
        raise ValueError(f"the offsets {list(offsets)[:9]} ... do not rise from 0 to the {len(input)} rows")
    experts, width = _experts(weight.sharding), weight.sharding.local_shape[-1]
    if (len(offsets) - 1, input.shape[1]) != (experts, width):
        raise ValueError(
            f"rows of {len(offsets) - 1} experts with {input.shape[1]} numbers each are given to "
            f"{weight.sharding.name}, which has {experts} experts for rows of {width}"
        )
    found: Tensor = _GroupedLinear.apply(input, weight, tuple(offsets), use)
    return found


def _experts(sharding: Sharding) -> int:
    """Return the number of experts on this rank.

    Raises:
        ValueError: the weight fuses several tensors, so its rows are grouped by tensor instead of by expert.
    """
    first = sharding.pieces[0]
    if first.rows != sharding.local_shape[0]:
        held = ", ".join(f"{piece.tensor.name} {list(piece.box.size)}" for piece in sharding.pieces[:4])
        raise ValueError(
            "a grouped product needs a weight that is one tensor without padding, of at least one expert on each rank; "
            f"this one is {sharding.local_shape[0]} rows, for {held}: make a fused weight one tensor "
            "[experts, 2, ...], and take no more ranks than there are experts"
        )
    return first.box.size[0]


def _matrices(weight: Tensor, input: Tensor, offsets: Sequence[int]) -> Tensor:
    """View the weight as [experts, out, in]."""
    return weight.view(len(offsets) - 1, -1, input.shape[1])


def _rows(offsets: Sequence[int]) -> Iterator[slice]:
    return (slice(start, stop) for start, stop in pairwise(offsets))
