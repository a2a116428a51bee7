"""Micro-batches, and the inputs derived from them that all layers of a stage share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.model.cache import StageCache
from megalite.model.sample_mask import SampleMask
from megalite.parallel.attention_plan import FirstKeys
from megalite.parallel.randomness import RandomKey
from megalite.parallel.sequence import Runs, SequenceLayout
from megalite.parallel.stage import TermSums
from megalite_kernels.attention import Mask

_NO_BOUNDS = FirstKeys()
_WHOLE = SequenceLayout(0, ((),))  # a marker for full samples: a default value cannot depend on the number of tokens


@dataclass(frozen=True)
class TokenLoss:
    """Loss of one's own that takes the place of the language-model loss.

    Attributes:
        sums: function from the log-probabilities of the labels and the entropies of the predictions (None unless
            `entropies`), both [batch, sequence], to sums of terms of the loss. The log-probabilities are without label
            smoothing and z-loss. All tensor-parallel ranks must return the same.
        entropies: compute the entropies, too. It costs a copy of the logits.
    """

    sums: Callable[[Tensor, Tensor | None], TermSums]
    entropies: bool = False


@dataclass(frozen=True)
class LogitLoss:
    """Term of the loss that is a function of the logits, beside the language-model loss.

    Attributes:
        name: name of the term.
        values: function from this rank's columns of the logits [sequence, batch, padded vocabulary / size] and their
            soft cap, which has not been applied, to the term of each token, [sequence, batch]. It must not keep the
            logits, which the backward of the losses overwrites.
    """

    name: str
    values: Callable[[Tensor, float | None], Tensor]


@dataclass(frozen=True)
class FurtherTokens:
    """Inputs and labels of the depths of multi-token prediction, cut from whole samples as those of the network.

    Attributes:
        tokens: [depths, batch, sequence] int64: at depth d, from 1 on, the token d places behind each.
        labels: [depths, batch, sequence] int64: the token after that one.
        loss_mask: [depths, batch, sequence], the weight of each token's loss.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor

    def with_first(self, labels: Tensor, loss_mask: Tensor) -> FurtherTokens:
        """Return the same with the network's labels and loss mask, [batch, sequence], before those of the depths."""
        every = torch.cat([labels[None], self.labels]), torch.cat([loss_mask[None], self.loss_mask])
        return FurtherTokens(self.tokens, *every)


@dataclass(frozen=True)
class SampleSources:
    """Sources of the samples of a micro-batch, those of a blend of data.

    Attributes:
        numbers: [batch] int64, the source of each sample.
        count: number of all sources.
    """

    numbers: Tensor
    count: int

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over each source of values [batch, sequence], [sources] in fp64, without a gradient."""
        of_samples = values.detach().sum(1, dtype=torch.float64)
        return of_samples.new_zeros(self.count).index_add_(0, self.numbers, of_samples)


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass, with the position of each token. Modules never derive it from a local index.

    Attributes:
        tokens: [batch, sequence] int64.
        positions: [batch, sequence] int64, counted from the start of the sample or of the document.
        first_keys: [batch, tokens of the sample] int64, index in the sample of the first key that each query sees,
            which is its document's first token (see the function `first_keys`). None for the sample's first token.
            Under context parallelism, too, it covers all tokens of the sample.
        labels: [batch, sequence] int64; None for logits instead of a loss.
        loss_mask: [batch, sequence], the weight of each token's loss.
        key: key of the random numbers.
        layout: indices of the tokens in their samples; by default, the rank has full samples.
        bounds: bounds of `first_keys` on the host, which context parallelism plans by.
        padding: [batch, sequence] bool, true for tokens that only fill up a sample; None if there are none.
        lengths: [batch], number of tokens of each whole sample that do not fill it up; None if `padding` says it.
        replayed: [batch, sequence, layers with experts, topk] int64, the experts that routers take instead of choosing;
            -1 where they choose. None: they always choose.
        choices: the place where each router of a layer leaves its choices, [sequence, batch, topk] int32, by its number
            among the layers with experts; with -1 for padding, and before the capacity drops any. None: nowhere.
        token_loss: the loss, given `labels`; None for the sum of the token losses times `loss_mask`.
        logit_loss: further term of the loss, given `labels` and `loss_mask`; None: there is none.
        further: inputs and labels of the network's depths; None: they do not run.
        sources: sources of the samples, by which the loss is recorded, too; None: it is not.
        text_bytes: [batch, sequence] int64, bytes of the text of each label, for which the loss in bits is recorded,
            too; None: it is not.
    """

    tokens: Tensor
    positions: Tensor
    first_keys: Tensor | None
    labels: Tensor | None
    loss_mask: Tensor | None
    key: RandomKey
    layout: SequenceLayout = _WHOLE
    bounds: FirstKeys = _NO_BOUNDS
    padding: Tensor | None = None
    replayed: Tensor | None = None
    choices: dict[int, Tensor] | None = None
    token_loss: TokenLoss | None = None
    logit_loss: LogitLoss | None = None
    further: FurtherTokens | None = None
    lengths: Tensor | None = None
    sources: SampleSources | None = None
    text_bytes: Tensor | None = None

    @property
    def sample_ids(self) -> Sequence[int]:
        """Global number of each sample."""
        return self.key.samples

    def __post_init__(self) -> None:
        if self.layout is _WHOLE:
            object.__setattr__(self, "layout", SequenceLayout.whole(self.tokens.shape[1]))


@dataclass(frozen=True)
class LayerContext:
    """Inputs derived from one micro-batch that all layers of a stage share.

    Attributes:
        rotary: cosine and sine, [sequence, batch, 1, rotated / 2] each.
        windowed_rotary: the same for layers with a sliding window.
        masks: attention mask (see megalite_kernels.attention) for each window (`LayerSpec.keys_before`). A mask of None
            is causal over the full sample. With a cache, the keys are the slots filled so far. Under context
            parallelism, it is a `SampleMask`.
        key: key of the random numbers.
        layout: indices of the tokens in their samples.
        rows: indices in the sample of the hidden states between layers: a part of the tokens under sequence
            parallelism.
        cache: keys and values of earlier tokens; None if there are none.
        padding: [tokens of `rows`, batch] bool, true for tokens that only fill up a sample; None if there are none.
        replayed: [tokens of `rows`, batch, layers with experts, topk], as in `MicroBatch`.
        choices: as in `MicroBatch`.
        first_keys: as in `MicroBatch`: where the documents of a sample begin.
        chosen: the keys that each layer with an indexer has chosen, by its number, for layers that share them.
        lengths: as in `MicroBatch`; None if there is no padding, or if nobody asks.
    """

    rotary: tuple[Tensor, Tensor] | None
    windowed_rotary: tuple[Tensor, Tensor] | None
    masks: Mapping[int | None, Mask | SampleMask]
    key: RandomKey
    layout: SequenceLayout
    rows: Runs
    cache: StageCache | None = None
    padding: Tensor | None = None
    replayed: Tensor | None = None
    choices: dict[int, Tensor] | None = None
    first_keys: Tensor | None = None
    chosen: dict[int, Tensor | None] = field(default_factory=dict)
    lengths: Tensor | None = None


def tokens_of(micro_batch: MicroBatch) -> Tensor:
    """Return the number of tokens that are not padding."""
    if micro_batch.padding is None:
        return torch.tensor(micro_batch.tokens.numel())
    return (~micro_batch.padding).sum()


def first_keys(document_ids: Tensor) -> Tensor:
    """Return the index in the sample of the first token of each token's document, [batch, sequence].

    As the first visible key, it limits attention to the token's own document.

    `document_ids`: the document of each token, [batch, sequence].
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    begins = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (1, 0))
    return (places * begins).cummax(dim=1).values


def first_visible(micro_batch: MicroBatch, before: int | None) -> Tensor:
    """Return the index of the first key that each query of the sample sees, [batch or 1, tokens of the sample].

    A query sees keys of its document and, if `before` is given, at most so many keys before its own.
    """
    places = torch.arange(micro_batch.layout.length, device=micro_batch.tokens.device)
    near = (torch.zeros_like(places) if before is None else (places - before).clamp(min=0)).unsqueeze(0)
    return near if micro_batch.first_keys is None else torch.maximum(micro_batch.first_keys, near)
