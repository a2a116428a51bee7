"""Micro-batches, and the facts about them that the layers of a stage share."""

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
    """The samples of one forward pass, with the position of each token: no module derives it from a local index.

    Attributes:
        tokens: [batch, sequence] int64.
        positions: [batch, sequence] int64, counted from the start of the sample, or of the document.
        first_keys: [batch, sequence] int64, the place in the sample of the first key that each query sees: that of its
            document's first token (`first_keys`). None: the sample's first.
        labels: [batch, sequence] int64; None for logits instead of a loss.
        loss_mask: [batch, sequence], the weight of each token's loss.
        layout: the places of the tokens in their samples; by default, these are whole samples.
    """

    tokens: Tensor
    positions: Tensor
    first_keys: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    key: RandomKey
    layout: SequenceLayout = _WHOLE

    def __post_init__(self) -> None:
        if self.layout is _WHOLE:
            object.__setattr__(self, "layout", SequenceLayout.whole(self.tokens.shape[1]))


@dataclass(frozen=True)
class LayerContext:
    """Facts about one micro-batch that all layers of a stage share.

    Attributes:
        rotary: cosine and sine [sequence, batch, 1, rotated / 2].
        windowed_rotary: the same for layers with a sliding window.
        masks: attention masks (see megalite_kernels.attention) by a layer's window (`LayerSpec.keys_before`); None:
            causal over the whole sample. With a cache, the keys are the slots so far.
        rows: the places in the sample of the hidden states between layers: a part of the tokens under sequence
            parallelism.
        cache: keys and values of earlier tokens; None if there are none.
    """

    rotary: tuple[Tensor, Tensor] | None
    windowed_rotary: tuple[Tensor, Tensor] | None
    masks: Mapping[int | None, Mask]
    key: RandomKey
    layout: SequenceLayout
    rows: Runs
    cache: KeyValueCache | None = None


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
