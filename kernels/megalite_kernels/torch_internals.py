"""Uses of non-public torch functions. Review this file for every new torch release.

References with their own backward call the gradient operators that torch itself uses in backward. These operators are
available only under `torch.ops.aten`. tests/unit/test_torch_internals.py checks that they exist.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def silu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor) -> None:
    """Write the gradient of silu(input) into `place`, which may be a view of a part of a larger tensor."""
    torch.ops.aten.silu_backward.grad_input(gradient, input, grad_input=place)


def gelu_gradient_into(place: Tensor, gradient: Tensor, input: Tensor, approximate: str) -> None:
    """Write the gradient of GELU into `place`, which may be a view of a part of a larger tensor.

    `approximate`: "none" or "tanh", as in `torch.nn.functional.gelu`.
    """
    torch.ops.aten.gelu_backward.grad_input(gradient, input, approximate=approximate, grad_input=place)


def layer_norm_gradients(
    gradient: Tensor, input: Tensor, shape: Sequence[int], mean: Tensor, inverse: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias. `mean` and `inverse` are from `torch.native_layer_norm`."""
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.native_layer_norm_backward(
        gradient, input, shape, mean, inverse, weight, bias, (True, True, True)
    )
    return found
