"""Grouped linear layers: rows are sorted by expert, and each expert's rows are multiplied by its own matrix."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.parallel.parameter import GroupedProductGradient, LateGradient, Parameter, accumulate_grad
from megalite.parallel.products import PLAIN, Products, saved_by
from megalite.parallel.sharding import Sharding
from megalite_kernels.grouped import scale_gradients_


class ExpertRows(NamedTuple):
    """The rows of each expert: expert e has the rows from offsets[e] to offsets[e + 1].

    Attributes:
        offsets: [experts + 1], from 0 to the number of rows.
        ends: offsets[1:] as an int32 tensor on the device.
    """

    offsets: tuple[int, ...]
    ends: Tensor


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Parameter, groups: ExpertRows, products: Products) -> Tensor:
        # Not by save_for_backward: the saved tensor would not have the parameter's gradient buffer.
        ctx.weight, ctx.groups, ctx.products = weight, groups, products
        output, kept = products.of_groups(input, weight, *groups)
        ctx.save_for_backward(*(kept.tensors if weight.requires_grad else ()))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), groups, kept = gradients, ctx.groups, ctx.products.restored(saved_by(ctx))
        input_gradient, _ = ctx.products.of_groups(gradient, ctx.weight, *groups, backward=True)
        # Last: accumulating the last gradient may free the weight.
        product = LateGradient(lambda: GroupedProductGradient(gradient, kept.values(gradient.dtype), *groups))
        return input_gradient, accumulate_grad(ctx.weight, product), None, None


class _ActivatedGroupedLinear(torch.autograd.Function):
    """Product of scale * activation(input) and the weights. Only the input, or its codes, and the scale are saved."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        scale: Tensor,
        activation: Callable[[Tensor], Tensor],
        weight: Parameter,
        groups: ExpertRows,
        products: Products,
        keeper: Products,
    ) -> Tensor:
        """Return the products [rows, out]. What `keeper` keeps of the input is activated again in backward."""
        ctx.weight, ctx.activation, ctx.groups, ctx.products = weight, activation, groups, products
        ctx.keeper, ctx.dtype = keeper, input.dtype
        ctx.save_for_backward(scale, *keeper.keep(input).tensors)
        return products.of_groups(_scale_(activation(input), scale), weight, *groups)[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input, the scale and the weight."""
        scale, *kept = saved_by(ctx)
        input = ctx.keeper.restored(tuple(kept)).values(ctx.dtype)
        with torch.enable_grad():
            output = ctx.activation(input.requires_grad_())
        activated = output.detach()
        gradient, _ = ctx.products.of_groups(gradients[0], ctx.weight, *ctx.groups, backward=True)
        scale_gradient = scale_gradients_(gradient, activated, scale)
        (input_gradient,) = torch.autograd.grad(output, input, gradient)
        # Last: until here, the graph may still use what the activation returned.
        product = GroupedProductGradient(gradients[0], _scale_(activated, scale), *ctx.groups)
        return input_gradient, scale_gradient, None, accumulate_grad(ctx.weight, product), None, None, None


class _GroupedBias(torch.autograd.Function):
    """The bias of each row's expert, [rows, width]."""

    @staticmethod
    def forward(ctx: Any, bias: Parameter, groups: ExpertRows, width: int) -> Tensor:
        ctx.bias, ctx.groups = bias, groups
        counts = groups.ends.diff(prepend=groups.ends.new_zeros(1))  # a copy of the offsets would wait for the device
        return bias.view(-1, width).repeat_interleave(counts, dim=0, output_size=groups.offsets[-1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ones = gradients[0].new_ones(len(gradients[0]), 1)  # the product with which is the sum of a group's rows
        return accumulate_grad(ctx.bias, GroupedProductGradient(gradients[0], ones, *ctx.groups)), None, None


def grouped_linear(input: Tensor, weight: Parameter, groups: ExpertRows, products: Products = PLAIN) -> Tensor:
    """Compute rows_e @ W_e.T for each expert e.

    The weight's gradient is accumulated once per backward, for all experts together, even without rows.

    Args:
        input: [rows, in], sorted by expert.
        weight: the matrices of this rank's experts, [experts * out, in].
        products: with rounded operands or not. The gradient of the weight is not rounded.

    Returns:
        [rows, out].

    Raises:
        ValueError: the groups do not cover all rows or do not match the weight's experts, the rows have another width,
            or the weight is not one tensor of experts.
    """
    _check(input, input.shape[1], weight, groups)
    found: Tensor = _GroupedLinear.apply(input, weight, groups, products)
    return found


def activated_grouped_linear(
    input: Tensor,
    scale: Tensor,
    activation: Callable[[Tensor], Tensor],
    weight: Parameter,
    groups: ExpertRows,
    products: Products = PLAIN,
    *,
    keeps_values: bool = False,
) -> Tensor:
    """Compute (scale * activation(rows))_e @ W_e.T for each expert e, and compute the activation again in backward.

    Args:
        input: [rows, width], sorted by expert, for an activation that maps them to [rows, in].
        scale: [rows], in fp32 or wider.
        keeps_values: keep no codes of the input, whatever the products do: another product keeps its values.

    Returns, raises: see `grouped_linear`.
    """
    _check(input, weight.sharding.local_shape[-1], weight, groups)
    keeps_codes = products.stores_activations and not keeps_values and torch.is_grad_enabled()
    keeper = products if keeps_codes else PLAIN
    found: Tensor = _ActivatedGroupedLinear.apply(input, scale, activation, weight, groups, products, keeper)
    return found


def grouped_bias(bias: Parameter, groups: ExpertRows, width: int) -> Tensor:
    """Return the bias of each row's expert, [rows, width], from those of this rank's experts, experts * width."""
    found: Tensor = _GroupedBias.apply(bias, groups, width)
    return found


def _check(input: Tensor, width: int, weight: Parameter, groups: ExpertRows) -> None:
    offsets = groups.offsets
    if not offsets or offsets[0] != 0 or offsets[-1] != len(input) or any(b < a for a, b in pairwise(offsets)):
        raise ValueError(f"the offsets {list(offsets)[:9]} ... do not rise from 0 to the {len(input)} rows")
    experts, expected = _experts(weight.sharding), weight.sharding.local_shape[-1]
    if (len(offsets) - 1, width) != (experts, expected):
        raise ValueError(
            f"rows of {len(offsets) - 1} experts with {width} numbers each are given to "
            f"{weight.sharding.name}, which has {experts} experts for rows of {expected}"
        )


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


def _scale_(rows: Tensor, scale: Tensor) -> Tensor:
    """Multiply each row in place with its scale, in the scale's precision, and round once to that of the rows."""
    return torch.mul(rows, scale[:, None], out=rows)
