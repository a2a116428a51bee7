"""The end of a GPT: final norm, output layer and loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.model.batch import LogitLoss, MicroBatch
from megalite.model.norm import LayerNorm
from megalite.parallel.context import ParallelContext
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_entropy
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.linear_cross_entropy import linear_cross_entropy
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Sharding
from megalite.parallel.stage import LossTerm, TermSums
from megalite_kernels.activation import soft_cap
from megalite_kernels.loss_options import LossOptions


def _valid_tokens(micro_batch: MicroBatch) -> Tensor:
    """Sum the loss weights of a micro-batch's tokens, in fp64."""
    assert micro_batch.loss_mask is not None
    return micro_batch.loss_mask.sum(dtype=torch.float64)


LM_LOSS = LossTerm("lm_loss", _valid_tokens)
_BY_SOURCE = "lm_loss by source"
_BITS = "bits_per_byte"


def loss_by_source(names: Sequence[str]) -> LossTerm:
    """Declare the loss of the tokens of each source, which is only recorded: lm_loss/NAME."""

    def count(micro_batch: MicroBatch) -> Tensor:
        assert micro_batch.loss_mask is not None
        return _by_source(micro_batch, micro_batch.loss_mask)

    return LossTerm(_BY_SOURCE, count, weight=0.0, parts=tuple(f"{LM_LOSS.name}/{name}" for name in names))


def bits_per_byte(names: Sequence[str]) -> LossTerm:
    """Declare the loss in bits per byte of text, and that of each source, which are only recorded."""

    def count(micro_batch: MicroBatch) -> Tensor:
        assert micro_batch.loss_mask is not None
        assert micro_batch.text_bytes is not None
        return _with_sources(micro_batch, micro_batch.loss_mask * micro_batch.text_bytes)

    return LossTerm(_BITS, count, weight=0.0, parts=(_BITS, *(f"{_BITS}/{name}" for name in names)))


def _by_source(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Return the sums of values [batch, sequence] over each source, [sources]."""
    assert micro_batch.sources is not None
    return micro_batch.sources.sums(values)


def _with_sources(micro_batch: MicroBatch, values: Tensor) -> Tensor:
    """Return the sum of values [batch, sequence], and those over each source if there are any, [1 + sources]."""
    total = values.detach().sum(dtype=torch.float64).unsqueeze(0)
    return total if micro_batch.sources is None else torch.cat([total, _by_source(micro_batch, values)])


def recorded_terms(micro_batch: MicroBatch, losses: Tensor) -> TermSums:
    """Return the sums of the terms that are only recorded, for what the micro-batch tells of its samples.

    `losses`: those of the network's tokens times their weights, [batch, sequence].
    """
    found = {}
    if micro_batch.sources is not None:
        found[_BY_SOURCE] = _by_source(micro_batch, losses)
    if micro_batch.text_bytes is not None:
        found[_BITS] = _with_sources(micro_batch, losses) / math.log(2)
    return found


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    fused: bool = False
    """Compute the loss together with the output layer, in chunks of tokens, without storing all logits."""


class OutputLayer(ColumnParallelLinear):
    """Layer that computes logits from hidden states, or losses if labels are given."""

    lacks = ("lora_dropout",)

    def __init__(
        self,
        context: ParallelContext,
        weight: Parameter | Sharding,
        vocab_size: int,
        soft_cap: float | None,
        loss: LossConfig,
        use: int = 0,
    ) -> None:
        """Make the layer.

        Args:
            weight: the placement of a new weight, or the word embedding's parameter if it is tied.
            use: the number of this use of it.
        """
        super().__init__(context, "vocabulary", [weight], use=use)
        self.vocab_size, self.fused, self.evaluated = vocab_size, loss.fused, LossOptions(soft_cap=soft_cap)
        self.trained = replace(self.evaluated, label_smoothing=loss.label_smoothing, z_loss=loss.z_loss)

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        labels: Tensor | None = None,
        *,
        plain: bool = False,
        entropies: bool = False,
        frozen: bool = False,
        further: LogitLoss | None = None,
    ) -> Tensor:
        """Compute logits [sequence, batch, columns], or with labels [sequence, batch] losses of their shape.

        The input is [sequence (/ size under sequence parallelism), batch, hidden]. In evaluation, losses are the plain
        cross entropy, without label smoothing and z-loss. If `plain`, they are so in training, too, and the result is
        [1, sequence, batch], or [2, sequence, batch] with the predictions' entropies. If `frozen`, the losses do not
        train the weight. With `further`, the result is [2, sequence, batch]: the losses, and the values of that term.
        """
        if labels is None:
            logits = super().forward(input)
            return logits if self.evaluated.soft_cap is None else soft_cap(logits, self.evaluated.soft_cap)
        if further is not None:
            return self._losses_with(input, labels, further)
        options = self.trained if self.training and not plain else self.evaluated
        if plain:  # one tensor, because ZeRO 3 gathers the weights for backward at the first gradient of the last one
            if not entropies:
                return self._losses(input, labels, options).unsqueeze(0)
            logits = super().forward(input)
            capped = logits.clone()  # because the backward of the losses overwrites the logits
            if options.soft_cap is not None:
                capped = soft_cap(capped, options.soft_cap)
            losses = vocab_parallel_cross_entropy(logits, labels, self.group, self.vocab_size, options)
            return torch.stack([losses, vocab_parallel_entropy(capped, self.group, self.vocab_size)])
        return self._losses(input, labels, options, frozen)

    def _losses_with(self, input: Tensor, labels: Tensor, further: LogitLoss) -> Tensor:
        options = self.trained if self.training else self.evaluated
        logits = super().forward(input)
        values = further.values(logits, options.soft_cap)  # first, because it does not keep the logits
        return torch.stack([vocab_parallel_cross_entropy(logits, labels, self.group, self.vocab_size, options), values])

    def _losses(self, input: Tensor, labels: Tensor, options: LossOptions, frozen: bool = False) -> Tensor:
        if not self.fused or self.update is not None:  # the fused product has no second one beside it
            logits = super().forward(input, frozen=frozen)
            return vocab_parallel_cross_entropy(logits, labels, self.group, self.vocab_size, options)
        weight, group, split = self.weights[0], self.group, self.sequence_parallel
        weight = weight.frozen_alias() if frozen else weight
        return linear_cross_entropy(
            input, weight, labels, group, self.vocab_size, options, sequence_parallel=split, use=self.use
        )


class Head(nn.Module):
    """Final norm and output layer."""

    def __init__(self, norm: LayerNorm, output: OutputLayer, multiplier: float) -> None:
        """`multiplier`: factor of the logits, by which the input of the output layer is multiplied."""
        super().__init__()
        self.norm, self.output, self.multiplier = norm, output, multiplier

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        *,
        plain: bool = False,
        entropies: bool = False,
        further: LogitLoss | None = None,
    ) -> Tensor:
        """Apply the norm and the output layer to the hidden states that leave the last layer of the network."""
        return self.of_normed(self.norm(hidden), labels, plain=plain, entropies=entropies, further=further)

    def of_normed(self, normed: Tensor, labels: Tensor | None = None, **options: bool | LogitLoss | None) -> Tensor:
        """Apply the output layer to hidden states behind a final norm. `options`: those of its forward."""
        if self.multiplier != 1.0:
            normed = normed * self.multiplier
        found: Tensor = self.output(normed, labels, **options)
        return found
