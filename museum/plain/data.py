"""Samples, and the part of them that a context-parallel rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from museum.plain.ranks import Group
from museum.plain.settings import Settings


@dataclass(frozen=True)
class Batch:
    """Micro-batch, [b, s] each, and the places of the tokens in their sample, [s]."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    documents: Tensor
    places: Tensor
    key_documents: Tensor
    """Documents of all tokens of the samples, [b, sequence]."""


def next_batch(settings: Settings, step: int, micro_batch: int, dp: Group) -> Batch:
    """Return a micro-batch of whole samples; steps count from 1."""
    first = (step - 1) * settings.batch + (micro_batch * dp.size + dp.index) * settings.micro_batch
    samples = [sample(settings, first + number) for number in range(settings.micro_batch)]
    tokens, mask, documents = (torch.stack(each) for each in zip(*samples, strict=True))
    places = torch.arange(settings.sequence)
    return Batch(tokens[:, :-1], tokens[:, 1:], mask, documents, places, documents)


def sample(settings: Settings, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens of a sample and the one after it, the mask of its losses, and the documents of its tokens.

    Some tokens are more frequent than others, so that the loss falls.
    """
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + number)
    frequencies = 1.0 / torch.arange(1, settings.vocabulary + 1)
    tokens = torch.multinomial(frequencies, settings.sequence + 1, replacement=True, generator=generator)
    mask = (torch.rand(settings.sequence, generator=generator) >= settings.masked).to(settings.wide)
    ends = torch.rand(settings.sequence, generator=generator) < (0.2 if settings.documents else 0.0)
    return tokens, mask, ends.cumsum(0)


def places_of_rank(sequence: int, index: int, count: int) -> Tensor:
    """Return the places of a context-parallel rank's tokens in their sample: one chunk from each end (zigzag)."""
    chunks = torch.arange(sequence).chunk(2 * count)
    return torch.cat([chunks[index], chunks[2 * count - 1 - index]])


def part_of_rank(batch: Batch, group: Group) -> Batch:
    """Return a context-parallel rank's tokens of a micro-batch."""
    if group.size == 1:
        return batch
    places = places_of_rank(batch.tokens.shape[1], group.index, group.size)
    return Batch(
        batch.tokens[:, places],
        batch.labels[:, places],
        batch.loss_mask[:, places],
        batch.documents[:, places],
        places,
        batch.documents,
    )
