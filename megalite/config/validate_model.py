"""Rules of the network: its numbers, alone and together, and the widths that ranks split."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from megalite.config.activations import FLAGS
from megalite.config.fields import flag_of, needs, range_problems
from megalite.config.layer_costs import least_parameters
from megalite.config.layer_specs import EXPERTS_LETTER, PATTERN_FLAG
from megalite.config.model import ModelConfig
from megalite.config.validate_recurrent import recurrent_problems, uneven_recurrent_widths
from megalite.errors import ConfigurationError
from megalite.small_files import shown

MAX_BYTES = 2**44
"""Upper bound for the memory of a rank: 16 TiB, about a hundred times the memory of the largest GPU."""
OF_ATTENTION = """group_query_attention num_query_groups qk_layernorm apply_wd_to_qk_layernorm attn_logit_softcapping
    query_pre_attn_scalar window_size window_attn_skip_freq window_rotary_base add_qkv_bias rotary_* use_rope_scaling
    rope_scaling_* yarn_* mscale mscale_all_dim qk_layernorm_over_heads softmax_type attention_output_gate no_rope_freq
    attention_dropout kv_channels"""
"""Fields that nothing but attention reads, beside the number of its heads."""
_WITHOUT_LOSS = {"none", "sinkhorn", "quantile_balancing"}
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
    if model.has_attention and model.kv_channels is None and model.hidden_size % heads:
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
    if model.window_size is None:
        yield from needs(model, "window_attn_skip_freq window_rotary_base", "--window-size")
    yield from expert_problems(model)
    if model.hybrid_layer_pattern is not None:
        yield from _pattern(model, model.hybrid_layer_pattern)
    try:
        _ = model.layers
    except ConfigurationError as error:
        yield str(error)
    yield from recurrent_problems(model)
    if model.has_attention:
        yield from _rotary(model)


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
    frequency = model.window_attn_skip_freq
    if model.window_size is not None and (frequency is None or frequency.strip().isdigit()):
        yield (
            f"{what} and --window-size: give --window-attn-skip-freq as a list with an entry for each letter, 1 for "
            "attention in the window, because a number counts all letters"
        )
    if EXPERTS_LETTER in pattern and model.num_experts is None:
        yield f"{what} has layers with experts ({EXPERTS_LETTER}): give --num-experts, or write - for a dense layer"
    if EXPERTS_LETTER not in pattern and model.num_experts is not None:
        yield f"{what} has no layer with experts ({EXPERTS_LETTER}): leave --num-experts out, or write one"


def _rotary(model: ModelConfig) -> Iterator[str]:
    """Yield what is wrong with rotary embeddings and their scaling."""
    if model.position_embedding_type == "yarn":
        yield from _yarn(model)
    share, width, rotated = model.rotary_percent, model.head_dim, model.rotated_channels
    if model.rotary and rotated < 2:
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
    if model.yarn_beta_fast <= slow:
        yield f"--yarn-beta-fast {model.yarn_beta_fast} is not above --yarn-beta-slow {slow}"
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
    """Return a line for each width that so many tensor-parallel ranks cannot split evenly, each expert among them."""
    if ranks < 1:
        return [f"--tensor-model-parallel-size {ranks}: must be at least 1"]
    widths = {"attention heads": model.num_attention_heads} if "attention" in model.kinds else {}
    if model.has_dense_layers:
        widths |= {"feed-forward width": model.ffn_size}
    if model.num_experts is not None:
        widths |= {"expert width": model.expert_ffn_size}
        widths |= {"width of the shared experts": model.moe_shared_expert_intermediate_size or 0}
    uneven = [
        f"--tensor-model-parallel-size {ranks} does not divide the {what}, {width}"
        for what, width in widths.items()
        if width % ranks
    ]
    return [*uneven, *uneven_recurrent_widths(model, ranks)]


def expert_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each relation between the options of experts that does not hold."""
    experts, topk = model.num_experts, model.moe_router_topk
    if experts is None:
        yield from needs(model, "moe_*", what_has_experts(model))
        return
    if topk > experts:
        yield f"--moe-router-topk {topk} is more than --num-experts {experts}"
    softmax = model.moe_router_score_function == "softmax"
    if "sinkhorn" in model.moe_router_load_balancing_type:
        yield from _sinkhorn(model)
    elif topk == 1 and softmax and not model.moe_router_pre_softmax:
        yield "--moe-router-topk 1 with softmax gives every token the weight 1: add --moe-router-pre-softmax"
    yield from _quantiles(model, experts)
    yield from _expert_groups(model, experts)
    if model.moe_router_enable_expert_bias and softmax:
        yield "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid or sqrtsoftplus"
    if not model.moe_router_enable_expert_bias:
        yield from needs(model, "moe_router_bias_update_rate", "--moe-router-enable-expert-bias")
    kinds, weights = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    if len(kinds) != len(weights):
        has = f"{len(weights)} number{'s' if len(weights) > 1 else ''}"
        yield f"--moe-aux-loss-coeff has {has} for {len(kinds)} of --moe-router-load-balancing-type"
    elif len(set(kinds)) < len(kinds) or (_WITHOUT_LOSS & set(kinds) and len(kinds) > 1):
        alone = "none, sinkhorn or quantile_balancing alone"
        yield f"--moe-router-load-balancing-type {' '.join(kinds)}: give each kind once, and {alone}"
    elif _WITHOUT_LOSS & set(kinds) and any(weights):
        yield f"--moe-aux-loss-coeff {weights[0]} needs another --moe-router-load-balancing-type than {kinds[0]}"
    if model.moe_expert_capacity_factor is None:
        names = "moe_token_drop_policy moe_pad_expert_input_to_capacity"
        yield from needs(model, names, "--moe-expert-capacity-factor")
    if model.moe_shared_expert_intermediate_size is None:
        names = "moe_shared_expert_gate moe_shared_expert_overlap"
        yield from needs(model, names, "--moe-shared-expert-intermediate-size")


def what_has_experts(model: ModelConfig) -> str:
    """Return what a network without experts lacks, for messages about their flags."""
    pattern = model.hybrid_layer_pattern
    lacks_letter = pattern is not None and EXPERTS_LETTER not in pattern
    return f"a layer with experts ({EXPERTS_LETTER}) in {PATTERN_FLAG}" if lacks_letter else "--num-experts"


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


def _sinkhorn(model: ModelConfig) -> Iterator[str]:
    topk, one = model.moe_router_topk, model.moe_router_topk == 1
    scores = (model.moe_router_score_function, model.moe_router_pre_softmax)
    if scores != (("sigmoid", False) if one else ("softmax", True)):
        score = "--moe-router-score-function sigmoid" if one else "--moe-router-pre-softmax"
        sinkhorn = "--moe-router-load-balancing-type sinkhorn"
        yield f"{sinkhorn} with --moe-router-topk {topk} needs {score}, and no other score"
    names = "moe_router_enable_expert_bias moe_router_num_groups moe_router_topk_scaling_factor"
    yield from needs(model, names, "another --moe-router-load-balancing-type than sinkhorn")


def _quantiles(model: ModelConfig, experts: int) -> Iterator[str]:
    """Yield what is wrong with offsets by quantiles."""
    quantiles = "--moe-router-load-balancing-type quantile_balancing"
    if not model.balances_by_quantiles:
        yield from needs(model, "moe_router_quantile_balancing_ema", quantiles)
        return
    if model.moe_router_topk == experts:
        yield f"{quantiles} needs --num-experts above --moe-router-topk {experts}"
    names = "moe_router_enable_expert_bias moe_router_num_groups"
    yield from needs(model, names, "another --moe-router-load-balancing-type than quantile_balancing")


def _expert_groups(model: ModelConfig, experts: int) -> Iterator[str]:
    """Yield what is wrong with the groups of experts among which a router chooses."""
    groups, chosen, topk = model.moe_router_num_groups, model.moe_router_group_topk, model.moe_router_topk
    if groups is None or chosen is None:
        if groups is not None:
            yield f"--moe-router-num-groups {groups} needs --moe-router-group-topk"
        yield from needs(model, "moe_router_group_*", "--moe-router-num-groups")
        return
    if experts % groups:
        yield f"--num-experts {experts} is not divisible by --moe-router-num-groups {groups}"
    elif chosen > groups:
        yield f"--moe-router-group-topk {chosen} is more than --moe-router-num-groups {groups}"
    elif topk > chosen * (experts // groups):
        open_experts = chosen * (experts // groups)
        of_groups = "only expert" if open_experts == 1 else f"{open_experts} experts"
        yield f"--moe-router-topk {topk} is more than the {of_groups} of the chosen groups"
    elif (scores := model.moe_router_group_scores) is None:
        if topk % chosen or topk // chosen > experts // groups:
            yield f"--moe-router-topk {topk} is not a multiple of --moe-router-group-topk {chosen}"
    elif scores > experts // groups:
        yield f"--moe-router-group-scores {scores} is more than the {experts // groups} experts of a group"
