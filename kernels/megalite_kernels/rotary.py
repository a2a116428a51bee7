"""Rotary position embedding of queries and keys (arXiv:2104.09864).

Of the first `rotated` channels of a head, pairs are turned by position * frequency; the others pass through. Channel i
is paired with i + rotated / 2 (half-split) or, interleaved, 2i with 2i + 1. The transpose of a rotation is the rotation
by the opposite angle, so that backward needs the tables alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.products import product_into

# ------------------------------------------------------------------------------------------------- the reference


class _RotateReference(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved = interleaved
        return _rotated(input, cosine, sine, interleaved)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        cosine, sine = ctx.saved_tensors
        return _rotated(gradients[0], cosine, -sine, ctx.interleaved), None, None, None


def _rotated(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    rotated = 2 * cosine.shape[-1]
    wide = input.to(cosine.dtype)
    output = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    first, second = _pairs(wide, rotated, interleaved)
    first_output, second_output = _pairs(output, rotated, interleaved)
    product_into(first_output, first, cosine).addcmul_(second, sine, value=-1.0)
    product_into(second_output, second, cosine).addcmul_(first, sine)
    if rotated < input.shape[-1]:
        output[..., rotated:] = wide[..., rotated:]
    return output.to(input.dtype)


def _pairs(heads: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second channels of all pairs, as views."""
    if interleaved:
        return heads[..., 0:rotated:2], heads[..., 1:rotated:2]
    return heads[..., : rotated // 2], heads[..., rotated // 2 : rotated]


def rotary_embedding_reference(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool
) -> tuple[Tensor, Tensor]:
    queries: Tensor = _RotateReference.apply(query, cosine, sine, interleaved)
    keys: Tensor = _RotateReference.apply(key, cosine, sine, interleaved)
    return queries, keys


# ------------------------------------------------------------------------------------------------- what is called


def rotary_embedding(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Turn the heads of queries and keys [sequence, batch, heads, head_dim], where there may be fewer keys' heads.

    The tables [sequence, batch or 1, 1, rotated / 2] are fp32 or wider; the products are taken in their precision and
    rounded once.
    """
    if not current().runs_triton("rotary", query, key, cosine, sine):
        return rotary_embedding_reference(query, key, cosine, sine, interleaved)
    from megalite_kernels.rotary_kernels import Rotary

    queries, keys = Rotary.apply(query, key, cosine, sine, interleaved)
    return queries, keys
