"""Micro-batches that a stage computes on, and facts about them that its layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.cache import KeyValueCache
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite_kernels.attention import Mask

_WHOLE = SequenceLayout(0, ())  # stands for all of the tokens, whose number a default cannot know


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass. It tells where each token stands: no module derives that from a local index."""

    tokens: Tensor
    """[batch, sequence] int64"""
    positions: Tensor
    """[batch, sequence] int64, counted from the start of the sample, or of the document"""
    first_keys: Tensor | None
    """[batch, sequence] int64, the place in the sample of the first key that each query sees, which is that of its
    document's first token (`first_keys`); None: the sample's first"""
    labels: Tensor | None
    """[batch, sequence] int64; None where logits are wanted rather than a loss"""
    loss_mask: Tensor | None
    """[batch, sequence], the weight of each token's loss"""
    key: RandomKey
    layout: SequenceLayout = _WHOLE
    """The places of the tokens in their samples; by default they are whole samples"""

    def __post_init__(self) -> None:
        if self.layout is _WHOLE:
            object.__setattr__(self, "layout", SequenceLayout.whole(self.tokens.shape[1]))


@dataclass(frozen=True)
class LayerContext:
    """Facts that every layer of a stage shares for one micro-batch."""

    rotary: tuple[Tensor, Tensor] | None
    """cosine and sine [sequence, batch, 1, rotated / 2]"""
    windowed_rotary: tuple[Tensor, Tensor] | None
    """The same for layers with a sliding window"""
    masks: Mapping[int | None, Mask]
    """Keys that tokens see, by a layer's window (`LayerSpec.keys_before`), as megalite_kernels.attention has it; None:
    causal over the whole sample. Where there is a cache, the keys are the slots so far"""
    key: RandomKey
    layout: SequenceLayout
    rows: Runs
    """The places in the sample of what stands between layers: of a part of the tokens under sequence parallelism"""
    cache: KeyValueCache | None = None
    """Keys and values of the tokens before these; None: there are none"""


def first_keys(document_ids: Tensor) -> Tensor:
    """The place in the sample of each token's document's first token, [batch, sequence], from the number of each
    token's document. Tokens see keys of their own document only."""
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
    return (places * begins).cummax(dim=1).values


def first_visible(micro_batch: MicroBatch, before: int | None) -> Tensor:
    """The first key that each query sees, [batch or 1, sequence]: of its document, and of the `before` before it."""
    places = micro_batch.layout.places(micro_batch.tokens.device)
    near = (torch.zeros_like(places) if before is None else (places - before).clamp(min=0)).unsqueeze(0)
    return near if micro_batch.first_keys is None else torch.maximum(micro_batch.first_keys, near)
