"""Rotary position embedding (arXiv:2104.09864) in the half-split form: dimension i is paired with i + rotated / 2.

The first `rotated` dimensions of a head are turned by position * frequency; the others pass through. The transpose of a
rotation is the rotation by the opposite angle, so that backward needs the tables alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite_kernels.products import product_into


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return _rotate(input, cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotate(gradients[0], cosine, -sine), None, None


def _rotate(input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = cosine.shape[-1]
    wide = input.to(cosine.dtype)
    first, second = wide[..., :half], wide[..., half : 2 * half]
    output = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    product_into(output[..., :half], first, cosine).addcmul_(second, sine, value=-1.0)
    product_into(output[..., half : 2 * half], second, cosine).addcmul_(first, sine)
    if 2 * half < input.shape[-1]:
        output[..., 2 * half :] = wide[..., 2 * half :]
    return output.to(input.dtype)


def rotary_embedding(input: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the heads of `input` [sequence, batch, heads, head_dim] by tables [sequence, batch, 1, rotated / 2].

    The tables are fp32 or wider; the products are taken in their precision and rounded once.
    """
    output: Tensor = _Rotate.apply(input, cosine, sine)
    return output
