"""The end of a GPT: final norm, output layer and loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megalite.model.batch import MicroBatch
from megalite.model.norm import LayerNorm
from megalite.parallel.context import ParallelContext
from megalite.parallel.cross_entropy import vocab_parallel_cross_entropy, vocab_parallel_entropy
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.linear_cross_entropy import linear_cross_entropy
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Sharding
from megalite.parallel.stage import LossTerm
from megalite_kernels.activation import soft_cap
from megalite_kernels.loss_options import LossOptions


def _valid_tokens(micro_batch: MicroBatch) -> Tensor:
    """Sum the loss weights of a micro-batch's tokens, in fp64."""
    assert micro_batch.loss_mask is not None
    return micro_batch.loss_mask.sum(dtype=torch.float64)


LM_LOSS = LossTerm("lm_loss", _valid_tokens)


@dataclass(frozen=True)
class LossConfig:
    """Options of the loss."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    fused: bool = False
    """Compute the loss together with the output layer, in chunks of tokens, without storing all logits."""


class OutputLayer(ColumnParallelLinear):
    """Layer that computes logits from hidden states, or losses if labels are given."""

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
    ) -> Tensor:
        """Compute logits [sequence, batch, columns], or with labels [sequence, batch] losses of their shape.

        The input is [sequence (/ size under sequence parallelism), batch, hidden]. In evaluation, losses are the plain
        cross entropy, without label smoothing and z-loss. If `plain`, they are so in training, too, and the result is
        [1, sequence, batch], or [2, sequence, batch] with the predictions' entropies. If `frozen`, the losses do not
        train the weight.
        """
        if labels is None:
            logits = super().forward(input)
            return logits if self.evaluated.soft_cap is None else soft_cap(logits, self.evaluated.soft_cap)
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

    def _losses(self, input: Tensor, labels: Tensor, options: LossOptions, frozen: bool = False) -> Tensor:
        if not self.fused:
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
        self, hidden: Tensor, labels: Tensor | None = None, *, plain: bool = False, entropies: bool = False
    ) -> Tensor:
        """Apply the norm and the output layer to the hidden states that leave the last layer of the network."""
        return self.of_normed(self.norm(hidden), labels, plain=plain, entropies=entropies)

    def of_normed(self, normed: Tensor, labels: Tensor | None = None, **options: bool) -> Tensor:
        """Apply the output layer to hidden states behind a final norm. `options`: those of its forward."""
        if self.multiplier != 1.0:
            normed = normed * self.multiplier
        found: Tensor = self.output(normed, labels, **options)
        return found
