"""Rules of the network: its numbers, alone and together, and the widths that ranks split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.activations import FLAGS
from megalite.config.fields import flag_of, needs, range_problems
from megalite.config.kinds.experts import expert_problems
from megalite.config.kinds.kind import Split
from megalite.config.kinds.table import kind_problems, splits
from megalite.config.layer_costs import least_parameters
from megalite.config.layer_specs import EXPERTS_LETTER, PATTERN_FLAG
from megalite.config.model import ModelConfig
from megalite.config.prediction import depth_problems
from megalite.config.validate_logits import clip_problems
from megalite.errors import ConfigurationError
from megalite.small_files import shown

MAX_BYTES = 2**44
"""Upper bound for the memory of a rank: 16 TiB, about a hundred times the memory of the largest GPU."""
LEAST_ITEM_BYTES = 2
"""Smallest size of a weight or an activation in bytes."""


def number_problems(model: ModelConfig) -> list[str]:
    """Return a line for each number of a network that is not possible, alone or together with others."""
    return list(range_problems(model)) or list(network_problems(model))


def model_problems(model: ModelConfig) -> list[str]:
    """Return the problems of a network that a file describes: of its numbers, or otherwise of their relations."""
    return number_problems(model) or list(relation_problems(model))


def relation_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each relation between the model's fields that does not hold, except for flags without effect."""
    heads = model.num_attention_heads
    if model.max_position_embeddings is None and model.position_embedding_type == "learned_absolute":
        yield "--position-embedding-type learned_absolute needs --max-position-embeddings, at least --seq-length"
    if model.has_attention and not model.has_latents and model.kv_channels is None and model.hidden_size % heads:
        yield f"--hidden-size {model.hidden_size} is not a multiple of --num-attention-heads {heads} (or --kv-channels)"
    if model.group_query_attention and heads % model.num_query_groups:
        yield f"--num-attention-heads {heads} is not a multiple of --num-query-groups {model.num_query_groups}"
    if not model.group_query_attention and model.num_query_groups != 1:
        yield f"--num-query-groups {model.num_query_groups} needs --group-query-attention"
    chosen = [flag for flag in FLAGS if getattr(model, flag)]
    if model.activation.flags != set(chosen):
        yield f"--{' and --'.join(chosen).replace('_', '-')} are different activations: choose one"
    if not model.activation.gated:
        yield from needs(model, "glu_linear_offset activation_func_clamp_value", "--swiglu, --geglu or --quick-geglu")
    if not model.qk_layernorm:
        yield from needs(model, "qk_layernorm_over_heads", "--qk-layernorm")
    elif model.qk_layernorm_over_heads and model.normalization != "RMSNorm":
        yield "--qk-layernorm-over-heads needs --normalization RMSNorm"
    if model.output_norm_freq is not None:
        idle = "sandwich_norm use_parallel_residual"
        yield from needs(model, idle, "layers with norms before both halves: leave --output-norm-freq out")
    if model.window_size is None:
        yield from needs(model, "window_attn_skip_freq window_rotary_base", "--window-size")
    yield from expert_problems(model)
    if model.hybrid_layer_pattern is not None:
        yield from _pattern(model, model.hybrid_layer_pattern)
    try:
        _ = model.all_layers
    except ConfigurationError as error:
        yield str(error)
    yield from depth_problems(model)
    yield from _variant(model)
    yield from kind_problems(model)
    yield from clip_problems(model)
    if model.has_attention:
        yield from _rotary(model)


def _variant(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with the mixer of those layers of a GPT that have no attention."""
    variant = model.experimental_attention_variant
    if variant != "gated_delta_net":
        yield from needs(model, "linear_attention_freq", "--experimental-attention-variant gated_delta_net")
        if variant == "dsa" and not model.multi_latent_attention:
            yield "--experimental-attention-variant dsa needs --multi-latent-attention"
    elif model.linear_attention_freq is None:
        yield f"--experimental-attention-variant {variant} needs --linear-attention-freq, for the layers that have it"


def _pattern(model: ModelConfig, pattern: str) -> Iterator[str]:
    """Yield what contradicts a pattern of layers."""
    what = f"{PATTERN_FLAG} {shown(pattern)}"
    if model.moe_layer_freq is not None:
        yield f"{what} says which layers have experts (E): leave --moe-layer-freq out"
    if model.use_parallel_residual:
        yield f"{what} has one half of a block in each layer: --use-parallel-residual needs both in one, leave it out"
    if (model.no_rope_freq or "").strip().isdigit():
        yield (
            f"{what}: give --no-rope-freq as a list with an entry for each letter, 1 for attention without rotation, "
            "because a number counts all letters"
        )
    if (model.output_norm_freq or "").strip().isdigit() and model.output_norm_freq != "1":
        yield (
            f"{what}: give --output-norm-freq as a list with an entry for each letter, 1 for a norm behind it, because "
            "a number counts all letters"
        )
    frequency = model.window_attn_skip_freq
    if model.window_size is not None and (frequency is None or frequency.strip().isdigit()):
        yield (
            f"{what} and --window-size: give --window-attn-skip-freq as a list with an entry for each letter, 1 for "
            "attention in the window, because a number counts all letters"
        )
    has_experts = EXPERTS_LETTER in pattern + (model.mtp_hybrid_override_pattern or "")
    if has_experts and model.num_experts is None:
        yield f"{what} has layers with experts ({EXPERTS_LETTER}): give --num-experts, or write - for a dense layer"
    if not has_experts and model.num_experts is not None:
        yield f"{what} has no layer with experts ({EXPERTS_LETTER}): leave --num-experts out, or write one"


def _rotary(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with rotary embeddings and their scaling."""
    if model.position_embedding_type == "yarn":
        yield from _yarn(model)
    share, width, rotated = model.rotary_percent, model.head_dim, model.rotated_channels
    if model.has_latents:
        pass  # a part of each head of its own is rotated
    elif model.rotary and rotated < 2:
        yield f"--rotary-percent {share} of {width} channels per head leaves no pair to rotate"
    elif model.rotary and rotated % 2:
        yield (
            f"--rotary-percent {share} rotates {rotated} of {width} channels per head, which go in pairs: choose a "
            "share of an even number"
        )
    if not model.use_rope_scaling:
        return
    if model.rotary_seq_len_interpolation_factor is not None:
        yield "--use-rope-scaling and --rotary-seq-len-interpolation-factor are two scalings: choose one"
    elif model.rope_scaling_high_freq_factor <= model.rope_scaling_low_freq_factor:
        yield (
            f"--rope-scaling-high-freq-factor {model.rope_scaling_high_freq_factor} is not above "
            f"--rope-scaling-low-freq-factor {model.rope_scaling_low_freq_factor}"
        )


def _yarn(model: ModelConfig) -> Iterator[str]:
    original, slow = model.yarn_original_max_position_embeddings, model.yarn_beta_slow
    if original is None:
        yield "--position-embedding-type yarn needs --yarn-original-max-position-embeddings"
    if model.rotary_base <= 1:
        yield f"--position-embedding-type yarn needs a --rotary-base above 1, not {model.rotary_base}"
    if model.yarn_beta_fast < slow:
        yield f"--yarn-beta-fast {model.yarn_beta_fast} is below --yarn-beta-slow {slow}"
    if original is not None and original < 2 * math.pi * slow:
        yield f"nothing turns --yarn-beta-slow {slow} times over --yarn-original-max-position-embeddings {original}"


def idle_positions(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each flag of positions without effect: it is for another kind of positions, or scales by 1."""
    if not model.has_attention:  # without which all of them are turned off
        return
    scalings = "use_rope_scaling rotary_seq_len_interpolation_factor"
    if model.position_embedding_type != "yarn":
        yield from needs(model, "yarn_* rotary_scaling_factor mscale mscale_all_dim", "--position-embedding-type yarn")
    else:
        factor = model.rotary_scaling_factor
        if factor <= 1:
            yield f"--position-embedding-type yarn needs a --rotary-scaling-factor above 1, not {factor}"
        yield from needs(model, scalings, "--position-embedding-type rope: YaRN is a scaling of its own")
    if not model.rotary:
        names = f"rotary_base rotary_percent rotary_interleaved window_rotary_base no_rope_freq {scalings}"
        yield from needs(model, names, "--position-embedding-type rope")
    if not model.use_rope_scaling:
        yield from needs(model, "rope_scaling_*", "--use-rope-scaling")


def network_problems(model: ModelConfig, ranks: int = 2**13) -> Iterator[str]:
    """Yield a line if the weights do not fit on so many ranks."""
    if LEAST_ITEM_BYTES * least_parameters(model) // ranks > MAX_BYTES:
        names = ["num_layers", "hidden_size", "num_attention_heads", "kv_channels", "ffn_hidden_size", "vocab_size"]
        names += ["num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"]
        if model.position_embedding_type == "learned_absolute":
            names.append("max_position_embeddings")
        sizes = {flag_of(name): getattr(model, name) for name in names}
        flags = ", ".join(f"{flag} {size}" for flag, size in sizes.items() if size is not None)
        holding = "a rank" if ranks == 1 else f"{ranks:,} ranks"
        yield f"{flags}: a network of {least_parameters(model):.1e} parameters, more than {holding} can hold"


def uneven_widths(model: ModelConfig, ranks: int) -> list[str]:
    """Return a line for each width that so many tensor-parallel ranks cannot split evenly, each expert among them.

    Raises ConfigurationError as `ModelConfig.layers` does.
    """
    if ranks < 1:
        return [f"--tensor-model-parallel-size {ranks}: must be at least 1"]
    _ = model.layers
    widths = [*splits(model)]
    if model.num_experts is not None:
        widths.append(Split("expert width", model.expert_ffn_size))
        widths.append(Split("width of the shared experts", model.moe_shared_expert_intermediate_size or 0))
    return [problem for width in widths for problem in width.problems(ranks)]


def has_idle_softmax(model: ModelConfig) -> bool:
    """Tell whether --moe-router-pre-softmax changes nothing: separate scores, which Megatron-LM takes it with, too."""
    separate = model.moe_router_score_function != "softmax" and model.num_experts is not None
    return separate and "sinkhorn" not in model.moe_router_load_balancing_type


def with_router_weights(model: ModelConfig) -> ModelConfig:
    """Return a network with the weights that Sinkhorn gives its choices, and without a softmax that has no effect."""
    if has_idle_softmax(model):
        return replace(model, moe_router_pre_softmax=False)
    if "sinkhorn" not in model.moe_router_load_balancing_type or model.num_experts is None:
        return model
    if model.moe_router_topk == 1:
        return replace(model, moe_router_score_function="sigmoid")
    return replace(model, moe_router_pre_softmax=True)
