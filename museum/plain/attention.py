"""Norms, rotary embeddings and attention, with keys and values of all context-parallel ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from museum.plain.data import Batch, places_of_rank
from museum.plain.ranks import Group, Ranks, all_gather, all_sum, both
from museum.plain.settings import EPSILON, ROTARY_BASE, Settings
from museum.plain.tensor_parallel import ColumnLinear, Part, RowLinear, block, weight


class Norm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, features: int, settings: Settings) -> None:
        super().__init__()
        self.weight = weight(Part((features,)), settings)

    def forward(self, hidden: Tensor) -> Tensor:
        return normalised(hidden) * self.weight


def normalised(hidden: Tensor) -> Tensor:
    """Return vectors of root mean square 1."""
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(hidden.dtype)


def positions_of_rank(batch: Batch, group: Group) -> Tensor:
    """Return the positions of this rank's tokens for rotary embeddings, [s]."""
    return batch.places


def rotary(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotate queries or keys [b, s, heads, head] by their positions, the two halves of a head against each other."""
    size = heads.shape[-1]
    wide = torch.promote_types(heads.dtype, torch.float32)
    frequencies = ROTARY_BASE ** (-torch.arange(0, size, 2, dtype=wide) / size)
    angles = (positions[:, None].to(wide) * frequencies)[:, None]
    cosine, sine = (torch.cat([each, each], -1).to(heads.dtype) for each in (angles.cos(), angles.sin()))
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat([-second, first], -1) * sine


def key_value_exchange(own: Tensor, group: Group) -> Tensor:
    """Return the keys or values of whole samples, in their order, from those of this context-parallel rank."""
    if group.size == 1:
        return own
    sequence = own.shape[1] * group.size
    places = [places_of_rank(sequence, index, group.size) for index in range(group.size)]
    order = torch.cat(places).argsort()
    return both(
        own,
        lambda x: torch.cat(all_gather(x, group), 1)[:, order],
        lambda x: key_value_gradient(x, group)[:, places[group.index]],
    )


def key_value_gradient(partial: Tensor, group: Group) -> Tensor:
    """Return the gradient of the keys or values of whole samples, from that of this rank's queries."""
    return all_sum(partial, group)


def causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys [sequence] each query [s] attends to, by their places."""
    return keys[None, :] <= queries[:, None]


def document_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys [b, sequence] are of the document of each query [b, s]."""
    return keys[:, None, :] == queries[:, :, None]


def attention_scale(settings: Settings) -> float:
    """Return the factor of the products of queries and keys."""
    return settings.head**-0.5


def key_value_heads_of_rank(settings: Settings, group: Group) -> tuple[int, int]:
    """Return start and number of the key-value heads of a tensor-parallel rank."""
    return group.index * settings.key_value_heads // group.size, max(settings.key_value_heads // group.size, 1)


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks, settings = ranks, ranks.settings
        head, hidden = settings.head, settings.hidden
        start, count = block(settings.heads, ranks.tp)
        queries = (start * head, count * head)
        start, count = key_value_heads_of_rank(settings, ranks.tp)
        of_keys = Part(
            (settings.key_value_heads * head, hidden),
            (0, start * head, count * head),
            shares_heads=ranks.tp.size > settings.key_value_heads,
        )
        self.q_proj = ColumnLinear(Part((hidden, hidden), (0, *queries)), ranks)
        self.k_proj = ColumnLinear(of_keys, ranks)
        self.v_proj = ColumnLinear(of_keys, ranks)
        self.o_proj = RowLinear(Part((hidden, hidden), (1, *queries)), ranks)
        if settings.qk_norm:
            self.q_norm, self.k_norm = Norm(head, settings), Norm(head, settings)

    def forward(self, hidden: Tensor, batch: Batch) -> Tensor:
        settings, cp = self.ranks.settings, self.ranks.cp
        query, key, value = (
            layer(hidden).unflatten(-1, (-1, settings.head)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        if settings.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        positions = positions_of_rank(batch, cp)
        query, key = rotary(query, positions), rotary(key, positions)
        key, value = key_value_exchange(key, cp), key_value_exchange(value, cp)
        mask = causal_mask(batch.places, torch.arange(settings.sequence))
        mask = mask & document_mask(batch.documents, batch.key_documents)
        return self.o_proj(attention(query, key, value, mask[:, None], attention_scale(settings)).flatten(-2))


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return [b, s, heads, head] from keys and values [b, sequence, groups, head]; consecutive heads share a group."""
    repeats = query.shape[2] // key.shape[2]
    query, key, value = (
        query.transpose(1, 2),
        key.repeat_interleave(repeats, 2).transpose(1, 2),
        value.repeat_interleave(repeats, 2).transpose(1, 2),
    )
    scores = (query @ key.transpose(-1, -2) * scale).to(torch.promote_types(query.dtype, torch.float32))
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(value.dtype)
    return (weights @ value).transpose(1, 2)
