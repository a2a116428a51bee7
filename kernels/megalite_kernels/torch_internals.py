"""Uses of what is not public in torch, each with its reason: the file to look at when torch has a new release.

Gradients that torch computes itself in backward, where a reference has a backward of its own: torch's operators for
them are under `torch.ops.aten` alone. tests/unit/test_torch_internals.py asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def silu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor) -> None:
    """Write the gradient of silu(input) into a place that may be a part of a larger tensor."""
    torch.ops.aten.silu_backward.grad_input(gradient, input, grad_input=place)


def gelu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor, approximate: str) -> None:
    """Write the gradient of GELU, in its form `approximate`, into a place that may be a part of a larger tensor."""
    torch.ops.aten.gelu_backward.grad_input(gradient, input, approximate=approximate, grad_input=place)


def layer_norm_gradients(
    gradient: Tensor, input: Tensor, shape: Sequence[int], mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias from what `torch.native_layer_norm` has returned."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        gradient, input, shape, mean, inverse, weight, bias, (True, True, True)
    )
    return found
