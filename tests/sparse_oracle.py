"""The indexer of sparse attention as the oracle computes it: the choice of each query by a sort of its whole row.

It imports nothing of megalite, and takes weights by global logical name, beside those of latent attention:

    layers.{i}.latent_attention.indexer.query [heads, width, query rank, or hidden without one]
    ...indexer.key [width, hidden]    ...indexer.weights [heads, hidden]    ...indexer.key_norm.weight|bias [width]

A layer of sparse attention without these takes the choice of the last one with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

SMALLEST_GAP = 1e-9
"""All layouts choose alike if the scores on both sides of each choice are equal or differ by more than rounding."""


@dataclass
class Choices:
    """Choices and losses of the indexers of a network in one forward."""

    divergences: list[Tensor] = field(default_factory=list)  # sums over the queries that count, of each indexer
    last: Tensor | None = None  # [batch, queries, keys], bool


@dataclass(frozen=True)
class Indexing:
    """Options of sparse attention, with sizes of the indexer that the weights also have."""

    heads: int
    width: int
    topk: int
    coefficient: float | None = 0.7
    sparse_loss: bool = False
    stage: str = "sparse"  # or warmup, indexer
    interleaved: bool = False
    relu: bool = True
    epsilon: float = 1e-3
    every: int = 1
    offset: int = 0

    def has_indexer(self, number: int) -> bool:
        """Tell if the layer of this number, from 0 and among layers of all kinds, chooses by itself."""
        return number < max(self.offset, 1) or (number + 1 - max(self.offset, 1)) % self.every == 0

    def trains(self, name: str) -> bool:
        """Tell if the weight of this name is trained."""
        if ".indexer." in name:
            return bool(self.coefficient)
        return self.stage == "sparse"

    def scores(
        self,
        weights: Mapping[str, Tensor],
        name: str,
        hidden: Tensor,
        of_queries: Tensor,
        rotated: Callable[[Tensor], Tensor],
        *,
        around_one: bool,
    ) -> Tensor:
        """[batch, queries, keys]; `rotated` turns the first channels of [..., heads, width]."""
        hidden, of_queries = hidden.detach(), of_queries.detach()
        weight, bias = weights[name + "key_norm.weight"], weights[name + "key_norm.bias"]
        key = F.linear(hidden, weights[name + "key"])
        key = F.layer_norm(key, weight.shape, weight + float(around_one), bias, self.epsilon)
        key = rotated(key[:, :, None])[:, :, 0]
        shares = F.linear(hidden, weights[name + "weights"]) / math.sqrt(self.heads)
        total = torch.zeros(())
        for head in range(self.heads):
            query = rotated(F.linear(of_queries, weights[name + "query"][head])[:, :, None])[:, :, 0]
            product = query @ key.transpose(1, 2) / math.sqrt(self.width)
            total = total + shares[..., head, None] * (product.clamp(min=0) if self.relu else product)
        return total

    def choose(self, scores: Tensor, visible: Tensor) -> Tensor:
        """The chosen keys, as `scores` bool; `visible` likewise."""
        chosen = torch.zeros_like(visible)
        for sample, rows in enumerate(scores.detach().tolist()):
            for query, row in enumerate(rows):
                seen = [key for key in range(len(row)) if visible[sample, query, key]]
                best = sorted(seen, key=lambda key: (-row[key], key))
                if len(best) > self.topk:
                    gap = row[best[self.topk - 1]] - row[best[self.topk]]
                    assert gap == 0 or gap > SMALLEST_GAP, "a choice that rounding may change"
                chosen[sample, query, best[: self.topk]] = True
        return chosen

    def divergence(
        self, scores: Tensor, attention: Tensor, visible: Tensor, chosen: Tensor, counted: Tensor | None
    ) -> Tensor:
        """The sum over queries of KL(attention's mean probabilities || softmax of the scores).

        `attention`: scores of attention's heads, [batch, heads, queries, keys].
        """
        keys = chosen if self.sparse_loss else visible
        target = torch.softmax(attention.detach().masked_fill(~keys[:, None], -math.inf), dim=-1).mean(1)
        logs = torch.log_softmax(scores.masked_fill(~keys, -math.inf), dim=-1)
        terms = torch.where(keys & (target > 0), target * (target.clamp(min=1e-300).log() - logs), 0.0)
        return (terms.sum(-1) * (1.0 if counted is None else counted)).sum()
