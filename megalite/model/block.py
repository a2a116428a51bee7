"""One transformer layer: x + attention(norm(x)), then x + mlp(norm(x)); or x + attention(norm(x)) + mlp(norm(x)).

With sandwich norms, norm(attention(...)) and norm(mlp(...)) replace attention(...) and mlp(...).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from megalite.config.model import FeedForward, Mixer, ModelConfig
from megalite.model.attention import Attention, AttentionSizes
from megalite.model.batch import LayerContext
from megalite.model.mlp import MLP, FeedForwardSizes
from megalite.model.moe import MoE
from megalite.model.norm import LayerNorm, RMSNorm
from megalite.model.router import Router
from megalite.parallel.context import ParallelContext
from megalite.parallel.randomness import Site, dropout
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums


@dataclass(frozen=True)
class Recompute:
    """Megatron's choices: recompute parts of every layer, or complete layers.

    Attributes:
        attention: recompute the attention core of every layer.
        moe: save only the input of each layer's experts and router.
        mlp_parts: number of parts of the sequence on which dense feed-forward layers run one after another, each part
            recomputed. 1 leaves these layers whole.
        method: "uniform" saves only the input of each run of `layers` layers. "block" saves only the input of each of
            the first `layers` layers, and recomputes no others. None recomputes no complete layers.
    """

    attention: bool = False
    moe: bool = False
    mlp_parts: int = 1
    method: str | None = None
    layers: int = 1

    def spans(self, total: int) -> list[tuple[int, int, bool]]:
        """Split `total` layers into runs (start, stop, recomputed)."""
        if self.method == "uniform":
            return [(start, min(start + self.layers, total), True) for start in range(0, total, self.layers)]
        if self.method == "block":
            recomputed = min(self.layers, total)
            return [(layer, layer + 1, True) for layer in range(recomputed)] + [(recomputed, total, False)]
        return [(0, total, False)]


class MixerModule(Protocol):
    """Layer that mixes tokens, such as attention.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __call__(self, hidden: Tensor, context: LayerContext) -> Tensor: ...


class MakeMixer(Protocol):
    """Function that makes a mixer of a layer."""

    def __call__(
        self, config: ModelConfig, context: ParallelContext, layer: int, *, recompute: bool
    ) -> MixerModule: ...


class FeedForwardModule(Protocol):
    """Layer that processes each token separately. It also returns the sums of its loss terms.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __call__(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]: ...


class FeedForwardKind(NamedTuple):
    """Kind of feed-forward layer.

    Attributes:
        make: makes that of a layer, by its number.
        loss_terms: declares the loss terms that layers of this kind return. A sum over the tokens of a layer's input
            has the axes `context.token_axes`.
    """

    make: Callable[[ModelConfig, ParallelContext, int], FeedForwardModule]
    loss_terms: Callable[[ModelConfig, ParallelContext], tuple[LossTerm, ...]] = lambda config, context: ()


def make_norm(config: ModelConfig) -> Callable[..., LayerNorm]:
    """Return the function that makes the network's norms, of a context, a name and a width."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return functools.partial(kind, eps=config.norm_epsilon, around_one=config.apply_layernorm_1p)


def make_attention(config: ModelConfig, context: ParallelContext, layer: int, *, recompute: bool) -> Attention:
    """Make the attention of a layer from the network's configuration."""
    scalar = config.query_pre_attn_scalar
    sizes = AttentionSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        groups=config.kv_groups,
        width=config.head_dim,
        std=config.init_method_std,
        output_std=config.output_init_std,
        bias=config.add_bias_linear or config.add_qkv_bias,
        output_bias=config.add_bias_linear,
        window=config.layers[layer].keys_before,
        scale=None if scalar is None else 1.0 / math.sqrt(scalar),
        cap=config.attn_logit_softcapping,
        dropout=config.attention_dropout,
        rotary_interleaved=config.rotary_interleaved,
    )
    norm = make_norm(config) if config.qk_layernorm else None
    return Attention(context, f"layers.{layer}.attention", sizes, norm=norm, layer=layer, recompute=recompute)


MIXERS: Mapping[Mixer, MakeMixer] = {"attention": make_attention}


def feed_forward_sizes(config: ModelConfig, ffn: int) -> FeedForwardSizes:
    """Return the sizes of layers of this inner width."""
    std, output_std = config.init_method_std, config.output_init_std
    return FeedForwardSizes(config.hidden_size, ffn, config.activation, std, output_std, config.add_bias_linear)


def make_mlp(config: ModelConfig, context: ParallelContext, layer: int) -> MLP:
    return MLP(context, f"layers.{layer}.mlp", feed_forward_sizes(config, config.ffn_size))


def make_moe(config: ModelConfig, context: ParallelContext, layer: int) -> MoE:
    """Make the experts of a layer from the network's configuration."""
    shared = config.moe_shared_expert_intermediate_size
    return MoE(
        context,
        f"layers.{layer}.moe",
        Router(config, context, layer),
        feed_forward_sizes(config, config.expert_ffn_size),
        shared=None if shared is None else feed_forward_sizes(config, shared),
        shared_gate=config.moe_shared_expert_gate and shared is not None,
        overlaps_shared_experts=config.moe_shared_expert_overlap,
        dispatcher=config.moe_token_dispatcher_type,
        padded=config.moe_pad_expert_input_to_capacity,
    )


def _terms_of_routers(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
    return tuple(replace(term, axes=context.token_axes) for term in Router.loss_terms(config))


FEED_FORWARDS: Mapping[FeedForward, FeedForwardKind] = {
    "dense": FeedForwardKind(make_mlp),
    "moe": FeedForwardKind(make_moe, _terms_of_routers),
}


class LayerOutput(NamedTuple):
    """Output of a block: hidden states, the residual branch that must still be added to them, and loss terms.

    The next layer adds the branch, so that the addition is fused with its norm.
    """

    hidden: Tensor
    branch: Tensor
    terms: TermSums = NO_SUMS


class Block(nn.Module):
    def __init__(self, config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> None:
        super().__init__()

        def norm(name: str) -> LayerNorm:
            return make_norm(config)(context, f"layers.{layer}.{name}", config.hidden_size)

        self.input_norm = norm("input_norm")
        spec = config.layers[layer]
        self.attention = MIXERS[spec.mixer](config, context, layer, recompute=recompute.attention)
        self.mlp_norm = norm("mlp_norm")
        self.mlp = FEED_FORWARDS[spec.feed_forward].make(config, context, layer)
        if isinstance(self.mlp, MoE):
            self.mlp.recompute = recompute.moe
        self.attention_output_norm = norm("attention_output_norm") if config.sandwich_norm else None
        self.mlp_output_norm = norm("mlp_output_norm") if config.sandwich_norm else None
        self.dropout, self.parallel_residual = config.hidden_dropout, config.use_parallel_residual
        self.attention_site = Site(layer, "attention output")
        self.mlp_site = Site(layer, "mlp output")
        self.in_parts: Callable[[Tensor, LayerContext, float], Tensor] | None = None
        """Runs the feed-forward layer, with its norms and its dropout, on parts of the sequence."""
        if recompute.mlp_parts > 1 and isinstance(self.mlp, MLP):
            from megalite.model.sequence_parts import FeedForwardInParts

            self.in_parts = FeedForwardInParts(
                self.mlp_norm, self.mlp, self.mlp_output_norm, self.mlp_site, parts=recompute.mlp_parts
            )

    def forward(self, hidden: Tensor, branch: Tensor | None, context: LayerContext) -> LayerOutput:
        """Run the block on the hidden states plus the previous layer's branch.

        Both are [sequence (/ size under sequence parallelism), batch, hidden]. They are passed separately so that the
        addition is fused with the norm after it. `branch` is None in the first block of a stage or recomputed run.
        """
        probability = self.dropout if self.training else 0.0
        normed, hidden = (self.input_norm(hidden), hidden) if branch is None else self.input_norm(branch, hidden)
        attended = self.attention(normed, context)
        if self.attention_output_norm is not None:
            attended = self.attention_output_norm(attended)
        attended = dropout(attended, probability, context.key, self.attention_site, context.rows)
        if self.in_parts is not None:
            total = hidden + attended
            source = hidden if self.parallel_residual else total
            return LayerOutput(total, self.in_parts(source, context, probability))
        if self.parallel_residual:
            normed, hidden = self.mlp_norm(hidden), hidden + attended
        else:
            normed, hidden = self.mlp_norm(attended, hidden)
        transformed, terms = self.mlp(normed, context)
        if self.mlp_output_norm is not None:
            transformed = self.mlp_output_norm(transformed)
        return LayerOutput(hidden, dropout(transformed, probability, context.key, self.mlp_site, context.rows), terms)
