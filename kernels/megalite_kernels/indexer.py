"""Choice of the keys that sparse attention attends to, and the loss of the indexer that makes it (DeepSeek-V3.2).

The score of a key for a query is a weighted sum over the heads of the indexer, in fp32 or wider:

    score = sum over heads of weight_head * relu(query_head . key) / sqrt(width)

A query takes its k best visible keys; of equal scores, which ReLU makes often, the first keys. The loss of a query is
the divergence KL(target || softmax(scores)) over its chosen or its visible keys, where the target is the mean over
attention's heads of their probabilities. Callers go by blocks of queries, so that no array of queries times keys is
ever whole.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.attention import masked_scores
from megalite_kernels.implementation import on_gpu

_ELEMENTS, _ON_GPU = 2**22, 2**26
"""Numbers of the largest array of a block of queries: 16 MiB in fp32; on a GPU, where blocks are launches, 256 MiB."""


class Indices(NamedTuple):
    """Queries, weights and keys that an indexer makes of tokens.

    Attributes:
        query: [batch, queries, heads, width].
        weights: [batch, queries, heads], those of the heads.
        key: [batch, keys, width], one for all heads.
    """

    query: Tensor
    weights: Tensor
    key: Tensor

    def of_rows(self, rows: slice, keys: int) -> Indices:
        """Return those of some queries and the first keys."""
        return Indices(self.query[:, rows], self.weights[:, rows], self.key[:, :keys])


class VisibleKeys(NamedTuple):
    """Keys that each query sees: from `first` to `last`, both included, [batch or 1, queries] int64 each."""

    first: Tensor
    last: Tensor

    def mask(self, rows: slice, keys: int) -> Tensor:
        """Return a mask of the first keys for some queries, [batch or 1, rows, keys] bool."""
        places = torch.arange(keys, device=self.last.device)
        return (places >= self.first[:, rows, None]) & (places <= self.last[:, rows, None])


def rows_in_blocks(queries: int, numbers: int, device: torch.device) -> list[slice]:
    """Cut queries into blocks. `numbers`: numbers of the largest array of one query."""
    size = max(1, min(queries, (_ON_GPU if on_gpu(device) else _ELEMENTS) // max(1, numbers)))
    return [slice(start, min(start + size, queries)) for start in range(0, queries, size)]


def index_scores(indices: Indices, *, relu: bool) -> Tensor:
    """Return the score of each key for each query, [batch, queries, keys] in fp32 or wider."""
    products = index_products(indices)
    return weighed_products(indices, products.relu_() if relu else products)


def index_products(indices: Indices) -> Tensor:
    """Return the scaled products of queries and keys, [batch, queries, heads, keys] in fp32 or wider."""
    wide = torch.promote_types(indices.query.dtype, torch.float32)
    query, key = indices.query.to(wide), indices.key.to(wide)
    products = (query.flatten(1, 2) @ key.transpose(1, 2)).unflatten(1, query.shape[1:3])
    return products.mul_(1.0 / math.sqrt(query.shape[-1]))


def weighed_products(indices: Indices, products: Tensor) -> Tensor:
    """Return the scores, given the products behind the ReLU, if there is one."""
    return (indices.weights.to(products.dtype).unsqueeze(2) @ products).squeeze(2)


def index_gradients(indices: Indices, products: Tensor, of_scores: Tensor, *, relu: bool) -> Indices:
    """Return the gradients of what the indexer has made, in fp32 or wider, from that of the scores.

    `products`: those behind the ReLU, if there is one.
    """
    query, weights, key = (each.to(products.dtype) for each in indices)
    of_products = weights.unsqueeze(-1) * of_scores.unsqueeze(2)
    if relu:
        of_products = of_products.mul_(products > 0)
    of_weights = (products @ of_scores.unsqueeze(-1)).squeeze(-1)
    of_products = of_products.mul_(1.0 / math.sqrt(query.shape[-1])).flatten(1, 2)
    of_query = (of_products @ key).unflatten(1, query.shape[1:3])
    return Indices(of_query, of_weights, of_products.transpose(1, 2) @ query.flatten(1, 2))


def best_keys(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """Return a mask of the best `count` visible keys of each query, all if it sees no more; of equal ones the first.

    `visible`: [batch or 1, queries, keys] bool, as the result.
    """
    if count >= scores.shape[-1]:
        return visible.expand_as(scores)
    scores = scores.masked_fill(~visible, -math.inf)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above = scores > least
    equal = (scores == least) & visible
    return above | (equal & (equal.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))


@torch.no_grad()
def choose_keys(indices: Indices, visible: VisibleKeys, count: int, *, relu: bool) -> Tensor:
    """Return the numbers of the best keys of each query in order, [batch, queries, count] int32; -1 behind the last."""
    batch, queries, heads, _ = indices.query.shape
    keys = indices.key.shape[1]
    chosen = torch.empty(batch, queries, count, dtype=torch.int32, device=indices.query.device)
    for rows in rows_in_blocks(queries, batch * heads * keys, chosen.device):
        best = best_keys(index_scores(indices.of_rows(rows, keys), relu=relu), visible.mask(rows, keys), count)
        chosen[:, rows] = numbers_of(best, count)
    return chosen


def numbers_of(mask: Tensor, count: int) -> Tensor:
    """Return the numbers of a mask's true keys in order, [batch, queries, count] int32; -1 behind the last."""
    places = torch.where(mask, mask.cumsum(dim=-1) - 1, count)
    keys = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device).expand_as(mask)
    found = keys.new_full((*mask.shape[:-1], count + 1), -1)
    return found.scatter_(-1, places, keys)[..., :count]


def mask_of(numbers: Tensor, keys: int) -> Tensor:
    """Return the mask of the first keys that `numbers_of` gives back, [batch, queries, keys] bool."""
    places = torch.where((numbers < 0) | (numbers >= keys), keys, numbers).long()
    mask = torch.zeros(*numbers.shape[:-1], keys + 1, dtype=torch.bool, device=numbers.device)
    return mask.scatter_(-1, places, True)[..., :keys]


@torch.no_grad()
def summed_probabilities(query: Tensor, key: Tensor, mask: Tensor, *, scale: float, cap: float | None) -> Tensor:
    """Return the sum over heads of attention's probabilities, [batch, queries, keys] in fp32 or wider.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, heads, keys, width].
        mask: [batch or 1, queries, keys] bool. The probabilities of a query that sees no key are 0.
        scale: factor of the scores.
        cap: soft cap of the scores; None for no cap.
    """
    mask = mask.unsqueeze(1)
    blind = ~mask.any(dim=-1, keepdim=True)
    scores = masked_scores(query, key, mask | blind, scale, cap)
    return torch.softmax(scores, dim=-1).masked_fill(blind, 0.0).sum(dim=1)


def divergence(scores: Tensor, target: Tensor, mask: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum of the queries' divergences, and its gradient with respect to the scores.

    Args:
        scores: [batch, queries, keys].
        target: sums of probabilities, 0 where the mask is false; normalised here.
        mask: keys over which the softmax of the scores is taken, [batch or 1, queries, keys] bool.
        counted: [batch, queries] bool, the queries that count; None for all.
    """
    mask = mask.expand_as(scores)
    blind = ~mask.any(dim=-1, keepdim=True)
    target = target / target.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(target.dtype).tiny)
    logs = F.log_softmax(scores.masked_fill(~(mask | blind), -math.inf), dim=-1)
    terms = torch.xlogy(target, target) - target * logs.masked_fill(~mask, 0.0)
    gradient = (logs.exp() - target).masked_fill(~mask, 0.0)
    if counted is not None:
        terms, gradient = terms * counted.unsqueeze(-1), gradient * counted.unsqueeze(-1)
    return terms.sum(), gradient
