"""One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)); or x + attention(norm(x)) + mlp(norm(x)).

A layer of a pattern has only one of the two. With sandwich norms, norm(attention(...)) and norm(mlp(...)) replace
attention(...) and mlp(...). With output norms alone, the layer is x + norm(attention(x)), then x + norm(mlp(x)).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, cast

from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.batch import LayerContext
from megalite.model.layer_kinds import LAYER_KINDS, FeedForwardModule, LayerKind, MixerModule, make_norm, with_terms
from megalite.model.mlp import MLP
from megalite.model.norm import LayerNorm
from megalite.model.recompute import Recompute
from megalite.model.sequence_parts import FeedForwardInParts
from megalite.parallel.context import ParallelContext
from megalite.parallel.randomness import Site, dropout
from megalite.parallel.stage import NO_SUMS, TermSums, add_sums


class LayerOutput(NamedTuple):
    """Output of a block: hidden states, the residual branch that must still be added to them, and loss terms.

    The next layer adds the branch, so that the addition is fused with its norm.
    """

    hidden: Tensor
    branch: Tensor
    terms: TermSums = NO_SUMS


class Block(nn.Module):
    """Layer with a mixer (`attention`), a feed-forward layer (`mlp`), or both. A half or norm that it lacks is None."""

    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> None:
        super().__init__()
        spec, (mixer, feed_forward), names = config.all_layers[layer], config.numbers[layer], config.names[layer]
        mixes = None if spec.mixer is None else LAYER_KINDS[spec.mixer]
        feeds = None if spec.feed_forward is None else LAYER_KINDS[spec.feed_forward]

        def norm(kind: LayerKind | None, name: str | None, *, of_output: bool = False) -> LayerNorm | None:
            if kind is None or not (config.sandwich_norm or spec.output_norm == of_output):
                return None
            what = kind.output_norm if of_output else kind.norm
            return make_norm(config)(context, f"{name}.{what}", config.hidden_size)

        def site(kind: LayerKind | None, number: int | None) -> Site | None:
            return None if kind is None or number is None else Site(number, kind.site)

        def half(kind: LayerKind | None) -> nn.Module | None:
            return None if kind is None else kind.make(config, context, layer, recompute)

        self.input_norm, self.attention = norm(mixes, names[0]), cast(MixerModule | None, half(mixes))
        self.mlp_norm, self.mlp = norm(feeds, names[1]), cast(FeedForwardModule | None, half(feeds))
        self.attention_output_norm = norm(mixes, names[0], of_output=True)
        self.mlp_output_norm = norm(feeds, names[1], of_output=True)
        self.dropout, self.parallel_residual = config.hidden_dropout, config.use_parallel_residual
        self.multiplier = config.residual_multiplier
        """Factor of the branches."""
        self.attention_site = cast(Site, site(mixes, mixer))
        self.mlp_site = cast(Site, site(feeds, feed_forward))
        self.in_parts: FeedForwardInParts | None = None
        """Runs the feed-forward layer, with its norms and its dropout, on parts of the sequence."""
        if recompute.mlp_parts > 1 and isinstance(self.mlp, MLP):
            self.in_parts = FeedForwardInParts(
                self.mlp_norm, self.mlp, self.mlp_output_norm, self.mlp_site, parts=recompute.mlp_parts
            )

    def forward(self, hidden: Tensor, branch: Tensor | None, context: LayerContext) -> LayerOutput:
        """Run the block on the hidden states plus the previous layer's branch.

        Both are [sequence (/ size under sequence parallelism), batch, hidden]. They are passed separately so that the
        addition is fused with the norm after it. `branch` is None in the first block of a stage or recomputed run.
        """
        probability, terms = self.dropout if self.training else 0.0, NO_SUMS
        if (mixer := self.attention) is not None:
            if (norm := self.input_norm) is None:
                normed = hidden = hidden if branch is None else hidden + branch
            else:
                normed, hidden = (norm(hidden), hidden) if branch is None else norm(branch, hidden)
            branch, terms = with_terms(mixer(normed, context))
            if self.attention_output_norm is not None:
                branch = self.attention_output_norm(branch)
            branch = dropout(branch, probability, context.key, self.attention_site, context.rows)
            if self.multiplier != 1.0:
                branch = branch * self.multiplier
        if (feed_forward := self.mlp) is None:
            assert branch is not None
            return LayerOutput(hidden, branch, terms)
        if self.in_parts is not None:
            total = hidden if branch is None else hidden + branch
            source = hidden if self.parallel_residual else total
            branch = self.in_parts(source, context, probability)
            return LayerOutput(total, branch if self.multiplier == 1.0 else branch * self.multiplier, terms)
        if (norm := self.mlp_norm) is None:
            normed = hidden = hidden if branch is None else hidden + branch
        elif branch is None:
            normed = norm(hidden)
        elif self.parallel_residual:
            normed, hidden = norm(hidden), hidden + branch
        else:
            normed, hidden = norm(branch, hidden)
        transformed, own = feed_forward(normed, context)
        if self.mlp_output_norm is not None:
            transformed = self.mlp_output_norm(transformed)
        branch = dropout(transformed, probability, context.key, self.mlp_site, context.rows)
        branch = branch if self.multiplier == 1.0 else branch * self.multiplier
        return LayerOutput(hidden, branch, add_sums(terms, own))


def run_layers(layers: Iterable[nn.Module], hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]:
    """Run blocks one after another. Returns the hidden states with the last branch, and the sums of the loss terms."""
    branch, terms = None, NO_SUMS
    for layer in layers:
        hidden, branch, own = layer(hidden, branch, context)
        terms = add_sums(terms, own)
    return hidden if branch is None else hidden + branch, terms
