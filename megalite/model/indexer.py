"""Indexer of sparse attention (DeepSeek-V3.2): it says which keys a query attends to.

From the layer's input x, and the latent q of queries behind its norm:

    query_h = rotated(query_h(q)),    key = rotated(norm(key(x))),    weight_h = weights_h(x) / sqrt(heads)

Every tensor-parallel rank has the whole indexer and applies it to its tokens between layers. Its inputs pass no
gradient on, so its loss trains the indexer alone, and no other loss trains it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.model.norm import LayerNorm
from megalite.parallel.context import ParallelContext
from megalite.parallel.linear import ReplicatedLinear
from megalite.parallel.placement import stacked
from megalite.parallel.sharding import LogicalTensor, Normal
from megalite_kernels.indexer import Indices
from megalite_kernels.rotary import rotary_embedding

Tables = tuple[Tensor, Tensor]
"""Cosines and sines of rotary positions."""


@dataclass(frozen=True)
class IndexerSizes:
    """Sizes and options of an indexer.

    Attributes:
        heads: heads of its queries, which share a key.
        width: width of a head.
        topk: number of keys that a query attends to.
        epsilon: of the norm of keys.
        rotated: width of the rotated part of queries and keys, which comes first.
        interleaved: rotate channel 2i with 2i + 1, instead of channel i with i + rotated / 2.
        relu: pass the products of queries and keys through a ReLU.
        around_one: the weight of the norm is stored minus 1.
        trained: return the indexer's loss.
        dense: attend to all visible keys, which the loss is over, too.
        sparse_loss: take the loss over the chosen keys instead of all visible ones.
    """

    heads: int
    width: int
    topk: int
    epsilon: float
    rotated: int
    interleaved: bool = False
    relu: bool = True
    around_one: bool = False
    trained: bool = False
    dense: bool = False
    sparse_loss: bool = False


class Indexer(nn.Module):
    """Projections of an indexer."""

    def __init__(
        self, context: ParallelContext, name: str, sizes: IndexerSizes, *, hidden: int, rank: int, std: float
    ) -> None:
        """Make it.

        Args:
            hidden: width of the layer's input.
            rank: width of what queries are made of.
            std: standard deviation of the initial weights.
        """
        super().__init__()
        self.sizes = sizes
        context = replace(context, rounding=None)  # which keys are chosen must not follow from few bits

        def matrix(part: str, shape: tuple[int, ...], pattern: str) -> LogicalTensor:
            return LogicalTensor(f"{name}.{part}", shape, Normal(std), True, pattern)

        shape = (sizes.heads, sizes.width, rank)
        query = matrix("query", shape, "heads width input -> 1 (heads width) input")
        self.query = ReplicatedLinear(context, context.replicated(query, columns=1), None)
        of_input = [
            matrix("key", (sizes.width, hidden), "width hidden -> 1 width hidden"),
            matrix("weights", (sizes.heads, hidden), "heads hidden -> 1 heads hidden"),
        ]
        self.of_input = ReplicatedLinear(context, stacked([context.replicated(each) for each in of_input]), None)
        self.query.can_have_adapters = self.of_input.can_have_adapters = False
        self.key_norm = LayerNorm(
            context, f"{name}.key_norm", sizes.width, eps=sizes.epsilon, around_one=sizes.around_one
        )

    def forward(self, hidden: Tensor, of_queries: Tensor, rotary: Tables | None) -> Indices:
        """Return queries, their weights, and keys of the same tokens.

        Args:
            hidden: [sequence, batch, hidden].
            of_queries: what queries are made of, [sequence, batch, rank].
            rotary: tables of these tokens; None for no rotation.
        """
        sizes = self.sizes
        query = self.query(of_queries.detach()).unflatten(-1, (sizes.heads, sizes.width))
        key, weights = self.of_input(hidden.detach()).split([sizes.width, sizes.heads], dim=-1)
        key = self.key_norm(key.contiguous())
        if rotary is not None:
            query, keys = rotary_embedding(query, key.unsqueeze(2), *rotary, interleaved=sizes.interleaved)
            key = keys.squeeze(2)
        wide = torch.promote_types(weights.dtype, torch.float32)
        weights = weights.to(wide) / math.sqrt(sizes.heads)
        return Indices(query.transpose(0, 1), weights.transpose(0, 1), key.transpose(0, 1))
