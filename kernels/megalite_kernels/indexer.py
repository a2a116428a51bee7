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
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite_kernels.attention import masked_scores, wide_product
from megalite_kernels.implementation import on_gpu

_ELEMENTS, _ON_GPU, _ROWS = 2**22, 2**26, 64
"""Numbers of the largest array of a block: 16 MiB in fp32; on a GPU, where blocks are launches, 256 MiB. Queries of a
block, if they are not more: below, heads are divided, too."""


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


class Cut(NamedTuple):
    """Blocks of queries, and of heads."""

    rows: list[slice]
    heads: list[slice]


def cut(queries: int, heads: int, numbers: int, device: torch.device) -> Cut:
    """Cut queries and heads into blocks. `numbers`: numbers of the largest array of one query and head."""
    most = (_ON_GPU if on_gpu(device) else _ELEMENTS) // max(1, numbers)
    rows = min(queries, max(most // heads, min(_ROWS, most), 1))
    together = max(1, min(heads, most // rows))
    return Cut(
        [slice(start, min(start + rows, queries)) for start in range(0, queries, rows)],
        [slice(start, min(start + together, heads)) for start in range(0, heads, together)],
    )


def index_scores(indices: Indices, *, relu: bool, heads: Sequence[slice] = (slice(None),)) -> Tensor:
    """Return the score of each key for each query, [batch, queries, keys] in fp32 or wider.

    `heads`: blocks of heads, of one of which there are products at a time.
    """
    scores: Tensor | None = None
    for some in heads:
        products = _products(indices, some, relu=relu)
        of_some = (indices.weights[:, :, some].to(products.dtype).unsqueeze(2) @ products).squeeze(2)
        scores = of_some if scores is None else scores.add_(of_some)
    assert scores is not None
    return scores


def _products(indices: Indices, heads: slice, *, relu: bool) -> Tensor:
    """Return the scaled products of queries and keys, [batch, queries, heads, keys] in fp32 or wider."""
    query = indices.query[:, :, heads]
    products = wide_product(query.flatten(1, 2).unsqueeze(1), indices.key.unsqueeze(1))
    products = products.squeeze(1).unflatten(1, query.shape[1:3])
    products = products.mul_(1.0 / math.sqrt(query.shape[-1]))
    return products.relu_() if relu else products


def add_index_gradients_(
    sums: Indices, indices: Indices, of_scores: Tensor, *, relu: bool, heads: Sequence[slice] = (slice(None),)
) -> None:
    """Add the gradients of what the indexer has made, in fp32 or wider, to sums, from that of the scores."""
    query, weights, key = (each.to(of_scores.dtype) for each in indices)
    for some in heads:
        products = _products(indices, some, relu=relu)
        sums.weights[:, :, some] += (products @ of_scores.unsqueeze(-1)).squeeze(-1)
        of_products = weights[:, :, some].unsqueeze(-1) * of_scores.unsqueeze(2)
        if relu:
            of_products = of_products.mul_(products > 0)
        of_products = of_products.mul_(1.0 / math.sqrt(query.shape[-1])).flatten(1, 2)
        own = query[:, :, some]
        sums.query[:, :, some] += (of_products @ key).unflatten(1, own.shape[1:3])
        sums.key.add_(of_products.transpose(1, 2) @ own.flatten(1, 2))


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
    blocks = cut(queries, heads, batch * keys, chosen.device)
    for rows in blocks.rows:
        scores = index_scores(indices.of_rows(rows, keys), relu=relu, heads=blocks.heads)
        chosen[:, rows] = numbers_of(best_keys(scores, visible.mask(rows, keys), count), count)
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
def summed_probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    *,
    scale: float,
    cap: float | None,
    heads: Sequence[slice] = (slice(None),),
) -> Tensor:
    """Return the sum over heads of attention's probabilities, [batch, queries, keys] in fp32 or wider.

    Args:
        query: [batch, heads, queries, width].
        key: [batch, heads, keys, width].
        mask: [batch or 1, queries, keys] bool. The probabilities of a query that sees no key are 0.
        scale: factor of the scores.
        cap: soft cap of the scores; None for no cap.
        heads: blocks of heads, of one of which there are scores at a time.
    """
    mask = mask.unsqueeze(1)
    blind = ~mask.any(dim=-1, keepdim=True)
    total = torch.zeros((), dtype=torch.promote_types(query.dtype, torch.float32), device=query.device)
    for some in heads:
        scores = masked_scores(query[:, some], key[:, some], mask | blind, scale, cap)
        total = total + torch.softmax(scores, dim=-1).sum(dim=1)
    return total.masked_fill_(blind.squeeze(1), 0.0)


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
