"""What a stage computes on, and what its layers need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.model.cache import KeyValueCache
from megalite.parallel.randomness import RandomKey


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass. Every position is explicit: no module derives one from a local index."""

    tokens: Tensor
    """[batch, sequence] int64"""
    positions: Tensor
    """[batch, sequence] int64, counted from the start of the sample, or of the document"""
    document_ids: Tensor | None
    """[batch, sequence] int64; tokens attend inside their document only. None: across the whole sample"""
    labels: Tensor | None
    """[batch, sequence] int64; None where logits are wanted rather than a loss"""
    loss_mask: Tensor | None
    """[batch, sequence], the weight of each token's loss"""
    key: RandomKey


@dataclass(frozen=True)
class LayerContext:
    """What every layer of a stage shares for one micro-batch."""

    rotary: tuple[Tensor, Tensor] | None
    """cosine and sine [sequence, batch, 1, rotated / 2]"""
    windowed_rotary: tuple[Tensor, Tensor] | None
    """The same for layers with a sliding window"""
    mask: Tensor | None
    """[batch, 1, sequence, sequence] bool, true where a query may look; None: causal over the whole sample. Where there
    is a cache, the last dimension is its slots so far"""
    windowed_mask: Tensor | None
    """The same for layers with a sliding window, [batch or 1, 1, sequence, sequence]; None: causal"""
    key: RandomKey
    cache: KeyValueCache | None = None
    """Where the tokens before these are; None: nowhere"""


def document_mask(document_ids: Tensor) -> Tensor:
    """[batch, sequence] to the causal mask inside documents [batch, 1, sequence, sequence]."""
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    return torch.tril(same).unsqueeze(1)


def windowed_mask(mask: Tensor | None, positions: Tensor, before: int) -> Tensor | None:
    """A mask as in LayerContext, without the keys that are more than `before` before their query.

    `positions`: [batch, sequence], of which only the shape and the device are read: what stands between two tokens of
    one document is the same in the sample.
    """
    sequence = positions.shape[1]
    if before >= sequence - 1:
        return mask
    near = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=positions.device).tril().triu(-before)
    return near if mask is None else mask & near
