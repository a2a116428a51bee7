"""RMSNorm of queries, and of keys, over all heads of a layer together, which are on several tensor-parallel ranks.

Each rank adds up the squares of its channels, and one all-reduce adds up those of all ranks, two numbers a token. The
same happens in backward, with the products of gradients and normalised channels. A key-value group that several ranks
have counts once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalite.parallel import collectives
from megalite.parallel.context import ParallelContext
from megalite.parallel.mesh import Group
from megalite.parallel.sharding import Sharding
from megalite_kernels.products import rounded


class _OverHeads(torch.autograd.Function):
    """Norm of [..., heads, width] of queries and [..., groups, width] of keys, whose weights have no leading axes.

    `shares`: [groups, 1], 1 over the number of ranks that have a group. `widths`: [2], the channels of all heads, and
    of all groups.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        query_weight: Tensor,
        key_weight: Tensor,
        shares: Tensor,
        widths: Tensor,
        group: Group,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """Normalise by the root of the mean square over all ranks, in fp32 or wider."""
        wide = shares.dtype
        squares = query.to(wide).square().sum((-2, -1)), (key.to(wide).square() * shares).sum((-2, -1))
        means = collectives.all_reduce_(torch.stack(squares, dim=-1), group) / widths
        inverse = (means + epsilon).rsqrt()
        ctx.group = group
        ctx.save_for_backward(query, key, query_weight, key_weight, shares, widths, inverse)
        outputs = []
        for states, weight, scale in zip((query, key), (query_weight, key_weight), inverse.unbind(-1), strict=True):
            outputs.append(rounded(states.to(wide) * scale[..., None, None] * weight, states.dtype))
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and both weights. What ranks share gets the share of each from it."""
        query, key, query_weight, key_weight, shares, widths, inverse = ctx.saved_tensors
        scales = [scale[..., None, None] for scale in inverse.unbind(-1)]
        normed = [states.to(shares.dtype) * scale for states, scale in zip((query, key), scales, strict=True)]
        products = [gradient * each for gradient, each in zip(gradients, normed, strict=True)]
        weights = query_weight, key_weight
        sums = [(product * weight).sum((-2, -1)) for product, weight in zip(products, weights, strict=True)]
        means = collectives.all_reduce_(torch.stack(sums, dim=-1), ctx.group) / widths
        of_states, of_weights = [], []
        for place, factor in enumerate((1.0, shares)):
            rest = normed[place] * means[..., place, None, None] * factor
            of_states.append(((gradients[place] * weights[place] - rest) * scales[place]).to(query.dtype))
            of_weights.append(products[place].flatten(0, -3).sum(0).to(weights[place].dtype))
        return *of_states, *of_weights, None, None, None, None


class HeadsNorm(nn.Module):
    """RMSNorm over all heads together: one for queries, and one for keys."""

    def __init__(
        self,
        context: ParallelContext,
        query: Sharding,
        keys: Sequence[Sharding],
        shared_by: Sequence[int],
        widths: tuple[int, int],
        *,
        epsilon: float,
        around_one: bool,
    ) -> None:
        """Make the norms.

        Args:
            query: placement of the weights of queries.
            keys: placements of the weights of keys, in the order of this rank's groups.
            shared_by: number of ranks that have each of these groups.
            widths: channels of all heads, and of all groups.
            around_one: see `LayerNorm`.
        """
        super().__init__()
        device, wide = context.mesh.device, torch.promote_types(context.dtype, torch.float32)
        self.group, self.epsilon, self.around_one = context.group("heads"), epsilon, around_one
        self.query = context.parameter(query)
        self.keys = nn.ParameterList(context.parameter(each) for each in keys)
        self.shares = torch.tensor([1.0 / ranks for ranks in shared_by], dtype=wide, device=device).unsqueeze(-1)
        self.widths = torch.tensor(widths, dtype=wide, device=device)

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise queries [..., heads, width] and keys [..., groups, width]."""
        weights = self.query, torch.cat(list(self.keys)) if len(self.keys) > 1 else self.keys[0]
        of_query, of_key = (weight.to(self.shares.dtype).view(-1, query.shape[-1]) for weight in weights)
        if self.around_one:
            of_query, of_key = 1.0 + of_query, 1.0 + of_key
        found: tuple[Tensor, Tensor] = _OverHeads.apply(
            query, key, of_query, of_key, self.shares, self.widths, self.group, self.epsilon
        )
        return found
