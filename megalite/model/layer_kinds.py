"""Kinds of layers: for each mixer and each feed-forward layer, what makes it and which loss terms it returns.

Their letters are in `megalite/config/layer_specs.py`, and their costs and rules in `megalite/config/kinds/`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from megalite.config.layer_specs import FeedForward, Mixer
from megalite.config.model import ModelConfig
from megalite.model.attention import Attention, AttentionSizes
from megalite.model.batch import LayerContext, tokens_of
from megalite.model.gated_delta import GatedDelta
from megalite.model.indexer import IndexerSizes
from megalite.model.kimi_delta import KimiDelta
from megalite.model.latent_attention import LatentAttention, LatentSizes
from megalite.model.mamba import Mamba
from megalite.model.mlp import MLP, FeedForwardSizes
from megalite.model.moe import MoE
from megalite.model.norm import LayerNorm, RMSNorm
from megalite.model.recompute import Recompute
from megalite.model.rotary import growth_of_scores
from megalite.model.router import Router
from megalite.model.short_convolution import ShortConvolution
from megalite.model.sparse_attention import INDEXER_LOSS, SparseAttention
from megalite.parallel.context import ParallelContext
from megalite.parallel.largest_logits import LogitClip
from megalite.parallel.stage import NO_SUMS, LossTerm, TermSums


class MixerModule(Protocol):
    """Layer that mixes tokens, such as attention. One with loss terms also returns their sums.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __call__(self, hidden: Tensor, context: LayerContext) -> Tensor | tuple[Tensor, TermSums]: ...


class FeedForwardModule(Protocol):
    """Layer that processes each token separately. It also returns the sums of its loss terms.

    Input and output are [sequence (/ size under sequence parallelism), batch, hidden].
    """

    def __call__(self, hidden: Tensor, context: LayerContext) -> tuple[Tensor, TermSums]: ...


def with_terms(output: Tensor | tuple[Tensor, TermSums]) -> tuple[Tensor, TermSums]:
    """Return the output of a mixer and the sums of its loss terms."""
    return output if isinstance(output, tuple) else (output, NO_SUMS)


class LayerKind(NamedTuple):
    """Kind of half of a layer: a mixer or a feed-forward layer.

    Attributes:
        make: makes that of a layer, by the layer's place in the network.
        norm: name of the norm before it. With the number of the layer in names, it is unique in the network.
        output_norm: name of the norm after it, which networks with sandwich norms have.
        site: site of the dropout of its output (`SITES` in `megalite/parallel/randomness.py`), as unique as the norm.
        loss_terms: declares the loss terms that layers of this kind return. A sum over the tokens of a layer's input
            has the axes `context.token_axes`.
    """

    make: Callable[[ModelConfig, ParallelContext, int, Recompute], nn.Module]
    norm: str
    output_norm: str
    site: str
    loss_terms: Callable[[ModelConfig, ParallelContext], tuple[LossTerm, ...]] = lambda config, context: ()


def make_norm(config: ModelConfig) -> Callable[..., LayerNorm]:
    """Return the function that makes the network's norms, of a context, a name and a width."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    return functools.partial(kind, eps=config.norm_epsilon, around_one=config.apply_layernorm_1p)


def logit_clip(config: ModelConfig) -> LogitClip | None:
    """Return what becomes of the logits of attention; None: they are not even measured."""
    if config.qk_clip:
        return LogitClip(config.qk_clip_threshold, config.qk_clip_alpha)
    return LogitClip() if config.log_max_attention_logit else None


def make_attention(config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> Attention:
    """Make the attention of a layer from the network's configuration."""
    (number, _), (name, _) = config.numbers[layer], config.names[layer]
    assert number is not None
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
        window=config.all_layers[layer].keys_before,
        scale=None if scalar is None else 1.0 / math.sqrt(scalar),
        cap=config.attn_logit_softcapping,
        dropout=config.attention_dropout,
        rotary_interleaved=config.rotary_interleaved,
        rotary=config.all_layers[layer].rotary,
        output_gate=config.attention_output_gate,
        softmax_type=config.softmax_type,
    )
    over_heads = config.qk_layernorm_over_heads
    decays = config.apply_wd_to_qk_layernorm
    norm = functools.partial(make_norm(config), decays=decays) if config.qk_layernorm else None
    return Attention(
        context,
        f"{name}.attention",
        sizes,
        norm=None if over_heads else norm,
        norm_over_heads=(config.norm_epsilon, config.apply_layernorm_1p) if over_heads else None,
        layer=number,
        way=context.attention_ways[layer % len(context.attention_ways)],
        recompute=recompute.attention,
        clip=logit_clip(config),
    )


def make_latent_attention(
    config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute
) -> LatentAttention:
    """Make the latent attention of a layer from the network's configuration, with an indexer if it is sparse."""
    (number, _), (name, _) = config.numbers[layer], config.names[layer]
    assert number is not None
    sizes = LatentSizes(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        key_width=config.qk_head_dim,
        rotated=config.qk_pos_emb_head_dim,
        value_width=config.v_head_dim,
        scale=growth_of_scores(config) / math.sqrt(config.qk_head_dim + config.qk_pos_emb_head_dim),
        std=config.init_method_std,
        output_std=config.output_init_std,
        output_bias=config.add_bias_linear,
        cap=config.attn_logit_softcapping,
        dropout=config.attention_dropout,
        output_gate=config.attention_output_gate,
    )
    epsilon = config.norm_epsilon if config.latent_norm_epsilon is None else config.latent_norm_epsilon
    norm = functools.partial(make_norm(config), eps=epsilon, decays=config.apply_wd_to_qk_layernorm)
    make: Callable[..., LatentAttention] = LatentAttention
    if config.all_layers[layer].mixer == "sparse_attention":
        make = functools.partial(SparseAttention, indexer=indexer_sizes(config), **choosing_layers(config, layer))
    return make(
        context,
        f"{name}.latent_attention",
        sizes,
        norm=norm if config.qk_layernorm else None,
        layer=number,
        way=context.attention_ways[layer % len(context.attention_ways)],
        recompute=recompute.attention,
        clip=logit_clip(config),
    )


def indexer_sizes(config: ModelConfig) -> IndexerSizes:
    """Return the sizes and options of the indexers of sparse attention."""
    epsilon = config.norm_epsilon if config.dsa_indexer_k_norm_epsilon is None else config.dsa_indexer_k_norm_epsilon
    heads, width, topk = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_topk
    assert heads is not None
    assert width is not None
    assert topk is not None
    return IndexerSizes(
        heads,
        width,
        topk,
        epsilon=epsilon,
        rotated=config.qk_pos_emb_head_dim,
        interleaved=config.dsa_indexer_rope_interleaved,
        relu=config.dsa_indexer_scoring_relu,
        around_one=config.apply_layernorm_1p,
        trained=config.trains_indexers,
        dense=config.dsa_stage == "warmup",
        sparse_loss=config.dsa_indexer_use_sparse_loss,
    )


def choosing_layers(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Return the number, among attention, of the layer that chooses for one of sparse attention, and if it shares."""
    sparse = [number for number, spec in enumerate(config.all_layers) if spec.mixer == "sparse_attention"]
    source = max(each for each in sparse if each <= layer and config.all_layers[each].chooses)
    later = next((each for each in sparse if each > layer), None)
    shared = layer == source and later is not None and not config.all_layers[later].chooses
    return {"source": config.numbers[source][0], "shared": shared}


def _term_of_indexers(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
    if not config.trains_indexers:
        return ()
    weight = config.dsa_indexer_loss_coeff or 0.0
    return (LossTerm(INDEXER_LOSS, tokens_of, weight, axes=context.token_axes),)


def feed_forward_sizes(config: ModelConfig, ffn: int) -> FeedForwardSizes:
    """Return the sizes of layers of this inner width."""
    std, output_std = config.init_method_std, config.output_init_std
    offset, limit = config.glu_linear_offset, config.activation_func_clamp_value
    sizes = FeedForwardSizes(config.hidden_size, ffn, config.activation, std, output_std, config.add_bias_linear)
    return replace(sizes, offset=offset, limit=limit)


def make_mlp(config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute | None = None) -> MLP:
    return MLP(context, f"{config.names[layer][1]}.mlp", feed_forward_sizes(config, config.ffn_size))


def make_moe(config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute | None = None) -> MoE:
    """Make the experts of a layer from the network's configuration."""
    shared = config.moe_shared_expert_intermediate_size
    experts = MoE(
        context,
        f"{config.names[layer][1]}.moe",
        Router(config, context, layer),
        feed_forward_sizes(config, config.expert_ffn_size),
        shared=None if shared is None else feed_forward_sizes(config, shared),
        shared_gate=config.moe_shared_expert_gate and shared is not None,
        latent=config.moe_latent_size,
        overlaps_shared_experts=config.moe_shared_expert_overlap,
        dispatcher=config.moe_token_dispatcher_type,
        padded=config.moe_pad_expert_input_to_capacity,
    )
    experts.recompute = recompute is not None and recompute.moe
    return experts


def _terms_of_routers(config: ModelConfig, context: ParallelContext) -> tuple[LossTerm, ...]:
    return tuple(replace(term, axes=context.token_axes) for term in Router.loss_terms(config))


def mixer_kind(name: str, make: Callable[[ModelConfig, ParallelContext, str, Recompute], nn.Module]) -> LayerKind:
    """Return a kind of mixer that is no half of a GPT's block.

    `make` makes a layer from the network's configuration and the begin of the layer's names. `name`: that of the kind
    in `LayerSpec`, and in names of tensors.
    """

    def make_layer(config: ModelConfig, context: ParallelContext, layer: int, recompute: Recompute) -> nn.Module:
        return make(config, context, f"{config.names[layer][0]}.{name}", recompute)

    return LayerKind(make_layer, f"{name}_norm", f"{name}_output_norm", f"{name.replace('_', ' ')} output")


LAYER_KINDS: dict[Mixer | FeedForward, LayerKind] = {
    "attention": LayerKind(make_attention, "input_norm", "attention_output_norm", "attention output"),
    "latent_attention": LayerKind(
        make_latent_attention, "latent_attention_norm", "latent_attention_output_norm", "latent attention output"
    ),
    "sparse_attention": LayerKind(
        make_latent_attention,
        "latent_attention_norm",
        "latent_attention_output_norm",
        "latent attention output",
        _term_of_indexers,
    ),
    "mamba": mixer_kind("mamba", Mamba.of),
    "gated_delta": mixer_kind("gated_delta", GatedDelta.of),
    "kimi_delta": mixer_kind("kimi_delta", KimiDelta.of),
    "short_convolution": mixer_kind("short_convolution", ShortConvolution.of),
    "dense": LayerKind(make_mlp, "mlp_norm", "mlp_output_norm", "mlp output"),
    "moe": LayerKind(make_moe, "mlp_norm", "mlp_output_norm", "mlp output", _terms_of_routers),
}
