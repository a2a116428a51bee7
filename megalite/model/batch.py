"""What a stage computes on, and what its layers need to know of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

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
    mask: Tensor | BlockMask | None
    """as megalite_kernels.attention has it; None: causal over the whole sample. Where there is a cache,
    its keys are the slots so far"""
    windowed_mask: Tensor | BlockMask | None
    """The same for layers with a sliding window"""
    key: RandomKey
    cache: KeyValueCache | None = None
    """Where the tokens before these are; None: nowhere"""


def first_visible(micro_batch: MicroBatch, before: int | None) -> Tensor:
    """The first key that each query sees, [batch or 1, sequence]: of its document, and of the `before` before it."""
    tokens = torch.arange(micro_batch.tokens.shape[1], device=micro_batch.tokens.device)
    near = torch.zeros_like(tokens) if before is None else (tokens - before).clamp(min=0)
    documents = micro_batch.document_ids
    if documents is None:
        return near.unsqueeze(0)
    begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
    return torch.maximum((tokens * begins).cummax(dim=1).values, near)
