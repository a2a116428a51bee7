"""Rotary position embedding of queries and keys (arXiv:2104.09864).

The first `rotated` channels of a head form pairs, and each pair is rotated by position * frequency. The other channels
are copied. Channel i is paired with i + rotated / 2 (half-split), or 2i with 2i + 1 (interleaved). The transpose of a
rotation is the rotation by the opposite angle, so backward needs only the tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megalite_kernels.implementation import current
from megalite_kernels.products import product_into, rounded

# ------------------------------------------------------------------------------------------------- the reference


def _rotate_reference(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, *, backward: bool
) -> tuple[Tensor, Tensor]:
    sine = -sine if backward else sine
    return _rotated(query, cosine, sine, interleaved), _rotated(key, cosine, sine, interleaved)


def _rotated(input: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool) -> Tensor:
    rotated = 2 * cosine.shape[-1]
    wide = input.to(cosine.dtype)
    output = torch.empty(wide.shape, dtype=wide.dtype, device=wide.device)
    first, second = _pairs(wide, rotated, interleaved)
    first_output, second_output = _pairs(output, rotated, interleaved)
    product_into(first_output, first, cosine).addcmul_(second, -sine)  # compiled, addcmul by -1 rounds differently
    product_into(second_output, second, cosine).addcmul_(first, sine)
    if rotated < input.shape[-1]:
        output[..., rotated:] = wide[..., rotated:]
    return rounded(output, input.dtype)


def _pairs(heads: Tensor, rotated: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first and the second channels of all pairs, as views."""
    if interleaved:
        return heads[..., 0:rotated:2], heads[..., 1:rotated:2]
    return heads[..., : rotated // 2], heads[..., rotated // 2 : rotated]


# ------------------------------------------------------------------------------------------------- public functions


def rotary_embedding(
    query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, *, interleaved: bool
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of queries and keys [sequence, batch, heads, head_dim]. Keys may have fewer heads.

    The tables [sequence, batch or 1, 1, rotated / 2] are in fp32 or wider. Arithmetic is in their precision, and the
    result is rounded once.
    """
    rotate = _rotate_reference
    if current().runs_triton("rotary", query, key, cosine, sine):
        from megalite_kernels.rotary_kernels import launch_rotate as rotate
    queries, keys = _Rotation.apply(query, key, cosine, sine, interleaved, rotate)
    return queries, keys


class _Rotation(torch.autograd.Function):
    """Rotation that saves only the tables. `rotate`: the reference, or the launcher of the kernel."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cosine: Tensor, sine: Tensor, interleaved: bool, rotate: Any
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cosine, sine)
        ctx.interleaved, ctx.rotate = interleaved, rotate
        return rotate(query, key, cosine, sine, interleaved, backward=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.rotate(*gradients, *ctx.saved_tensors, ctx.interleaved, backward=True)
        return query, key, None, None, None, None
