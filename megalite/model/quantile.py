"""Quantile balancing: offsets of the experts' logits by which tokens choose evenly, without a loss (Megatron-LM's).

A token chooses the k experts with the largest logits, each less the offset of its expert. The value of the next one is
the token's bar. An expert would have its share of a sample's m tokens, m * k / E, if its offset were the largest but so
many of its excesses over their bars. The mean of these numbers over the samples of a step moves the offsets.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST, _UNITS = 2.0**12, 2.0**32
"""Sums are whole numbers of units of 2^-32, so that all layouts have the same; 2^18 samples cannot overflow them."""


def excess_over_bars(logits: Tensor, offset: Tensor, topk: int, padding: Tensor | None) -> Tensor:
    """Return how far logits are above the bar of their token: [sequence, batch, experts]; -inf for padding."""
    bars = (logits - offset).topk(topk + 1, dim=-1).values[..., -1:]
    excess = logits - bars
    return excess if padding is None else excess.masked_fill(padding[:, :, None], -torch.inf)


def sum_of_quantiles(excess: Tensor, topk: int) -> Tensor:
    """Return the sums over whole samples of each expert's offset, and the samples that count: int64, [experts + 1].

    `excess`: [sequence, batch, experts], in any order along the sequence.
    """
    tokens = (excess[..., 0] > -torch.inf).sum(0)
    places = (tokens * topk).div(excess.shape[-1], rounding_mode="floor")
    largest_first = excess.sort(dim=0, descending=True).values
    found = largest_first.gather(0, places[None, :, None].expand(1, -1, excess.shape[-1]))[0]
    units = (found.double().clamp(-_LARGEST, _LARGEST) * _UNITS).round().long()
    return torch.cat([(units * (tokens > 0)[:, None]).sum(0), (tokens > 0).sum()[None]])


def next_offset(offset: Tensor, sums: Tensor, share: float) -> Tensor:
    """Return the offsets after a step: `share` of the old ones and the rest of the mean quantiles, around zero.

    Args:
        sums: what `sum_of_quantiles` returns, over all samples of the step. Without any, nothing moves.
    """
    samples = sums[-1]
    mean = sums[:-1].double() / _UNITS / samples.clamp(min=1)
    moved = share * offset.double() + (1.0 - share) * mean
    return torch.where(samples > 0, (moved - moved.mean()).to(offset.dtype), offset)
