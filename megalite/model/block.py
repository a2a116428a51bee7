"""One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)); or x + attention(norm(x)) + mlp(norm(x)).

With sandwich norms, norm(attention(...)) and norm(mlp(...)) stand in the place of attention(...) and mlp(...).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from megalite.config.model import FeedForward, Mixer, ModelConfig
from megalite.model.attention import Attention
from megalite.model.batch import LayerContext
from megalite.model.mlp import MLP
from megalite.model.norm import Norm
from megalite.parallel.context import ParallelContext
from megalite.parallel.randomness import Site, dropout
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums


class MixerModule(Protocol):
    """Mixer of tokens: from [sequence (/ size under sequence parallelism), batch, hidden] to the same."""

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, *, recompute: bool) -> None: ...

    def __call__(self, hidden: Tensor, context: LayerContext) -> Tensor: ...


class FeedForwardModule(Protocol):
    """Layer that treats tokens one by one: from the same to the same, and sums of its loss terms."""

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int) -> None: ...

    @staticmethod
    def loss_terms(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
        """Declare the terms of the loss that layers of this kind return; `context.token_axes` are the axes of a sum
        over the tokens that a layer is given.
        """

    def __call__(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]: ...


MIXERS: Mapping[Mixer, type[MixerModule]] = {"attention": Attention}
FEED_FORWARDS: Mapping[FeedForward, type[FeedForwardModule]] = {"dense": MLP}


class LayerOutput(NamedTuple):
    """Hidden states, what is still to be added to them, and the layer's terms of the loss."""

    hidden: Tensor
    branch: Tensor
    terms: TermSums = NO_SUMS


class Block(nn.Module):
    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, *, recompute_attention: bool) -> None:
        super().__init__()

        def norm(name: str) -> Norm:
            return Norm(config, context, f"layers.{layer}.{name}", config.hidden_size)

        self.input_norm = norm("input_norm")
        spec = config.layers[layer]
        self.attention = MIXERS[spec.mixer](config, context, layer, recompute=recompute_attention)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FEED_FORWARDS[spec.feed_forward](config, context, layer)
        self.attention_output_norm = norm("attention_output_norm") if config.sandwich_norm else None
        self.mlp_output_norm = norm("mlp_output_norm") if config.sandwich_norm else None
        self.dropout, self.parallel_residual = config.hidden_dropout, config.use_parallel_residual
        self.attention_site = Site(layer, "attention output")
        self.mlp_site = Site(layer, "mlp output")

    def forward(self, hidden: Tensor, branch: Tensor | None, context: LayerContext) -> LayerOutput:
        """Hidden states, and what the layer before leaves to be added to them, to the same two.

        [sequence (/ size under sequence parallelism), batch, hidden] each: so additions go with the norms after them.
        """
        probability = self.dropout if self.training else 0.0
        normed, hidden = (self.input_norm(hidden), hidden) if branch is None else self.input_norm(branch, hidden)
        attended = self.attention(normed, context)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        attended = dropout(attended, probability, context.key, self.attention_site, context.rows)
        if self.parallel_residual:
            normed, hidden = self.mlp_norm(hidden), hidden + attended
        else:
            normed, hidden = self.mlp_norm(attended, hidden)
        transformed, terms = self.mlp(normed, context)
        if self.mlp_output_norm is not None:
            transformed = self.mlp_output_norm(transformed)
        return LayerOutput(hidden, dropout(transformed, probability, context.key, self.mlp_site, context.rows), terms)
