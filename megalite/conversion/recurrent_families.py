"""Families of Hugging Face models with recurrent layers: Nemotron-H, Bamba."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise

from megalite.config import ModelConfig
from megalite.config.layer_specs import EXPERTS_LETTER, MAMBA_LETTER
from megalite.conversion import config_keys as keys
from megalite.conversion import layer_keys
from megalite.conversion.config_keys import Keys, fixed, key, tied
from megalite.conversion.family import Family
from megalite.conversion.layer_keys import bamba_letters, nemotron_letters, only_with
from megalite.conversion.mapping import DOWN, UP, MappedBox, Rule, axes_of, axis_lengths, linear, norm
from megalite.conversion.shared_rules import (
    OF_ALL,
    SIGMOID,
    WIDTHS,
    WITHOUT_BIASES,
    attention,
    choice_bias,
    ends,
    gated_mlp,
    not_gated,
    router,
)


def in_a_row(*parts: tuple[str, str]) -> Callable[[ModelConfig], tuple[MappedBox, ...]]:
    """Return the boxes of tensors that follow each other along the first axis of a tensor of the files.

    `parts`: each one's name, and the pattern of its view of its part.
    """

    def pieces(model: ModelConfig) -> tuple[MappedBox, ...]:
        lengths = axis_lengths(model)
        rows = [math.prod(lengths[axis] for axis in axes_of(pattern)[0]) for _, pattern in parts]
        bounds = pairwise(accumulate(rows, initial=0))
        return tuple(
            MappedBox(tensor, (slice(start, stop),), pattern=pattern)
            for (tensor, pattern), (start, stop) in zip(parts, bounds, strict=True)
        )

    return pieces


# ------------------------------------------------------------------------------------------------ Mamba-2

_HEADS, _GROUPS = ("mamba_heads", "mamba_width"), ("mamba_groups", "mamba_state")
_CONVOLVED = (("x", _HEADS), ("B", _GROUPS), ("C", _GROUPS))


def mamba(block: str) -> tuple[Rule, ...]:
    """Return the rules for a Mamba-2 layer."""

    def part(name: str, axes: tuple[str, str], last: str = "") -> tuple[str, str]:
        return f"mamba.{name}", f"({' '.join(axes)}){last} -> {' '.join(axes)}{last}"

    projections = [part("z", _HEADS, " hidden"), *(part(name, axes, " hidden") for name, axes in _CONVOLVED)]
    projections.append(("mamba.dt", "mamba_heads hidden -> mamba_heads hidden"))
    taps = [part(f"conv_{name}", axes, " mamba_taps") for name, axes in _CONVOLVED]
    heads = "mamba_heads -> mamba_heads"
    return (
        Rule(f"{block}.in_proj.weight", "mamba_rows hidden -> mamba_rows hidden", in_a_row(*projections)),
        Rule(
            f"{block}.conv1d.weight",
            "mamba_channels one mamba_taps -> mamba_channels (one mamba_taps)",
            in_a_row(*taps),
        ),
        Rule(
            f"{block}.conv1d.bias",
            "mamba_channels -> mamba_channels",
            in_a_row(*(part(f"conv_{name}_bias", axes) for name, axes in _CONVOLVED)),
        ),
        *(Rule(f"{block}.{name}", heads, (MappedBox(f"mamba.{name}"),)) for name in ("A_log", "D", "dt_bias")),
        Rule(
            f"{block}.norm.weight",
            "(mamba_heads mamba_width) -> mamba_heads mamba_width",
            (MappedBox("mamba.norm.weight"),),
        ),
        Rule(
            f"{block}.out_proj.weight",
            "hidden (mamba_heads mamba_width) -> hidden mamba_heads mamba_width",
            (MappedBox("mamba.output"),),
        ),
    )


def _norms(file: str, *tensors: str) -> tuple[Rule, ...]:
    """Return the rules for the norm before a half of any of several kinds, which has one name in files."""
    return tuple(rule for tensor in tensors for rule in norm(file, tensor))


# ------------------------------------------------------------------------------------------------ Nemotron-H


def _nemotron_rules(prefix: str, of_experts: tuple[Rule, ...]) -> tuple[Rule, ...]:
    mixer = f"{prefix}.layers.{{layer}}.mixer"
    return (
        *_norms(f"{prefix}.layers.{{layer}}.norm", "mamba_norm", "input_norm", "mlp_norm"),
        *mamba(mixer),
        *attention(mixer),
        *linear(f"{mixer}.up_proj", UP, MappedBox("mlp.up")),
        *linear(f"{mixer}.down_proj", DOWN, MappedBox("mlp.down")),
        router(mixer),
        choice_bias(mixer),
        *of_experts,
        *not_gated(f"{mixer}.shared_experts", "moe.shared", "shared_ffn"),
        *ends(f"{prefix}.embeddings.weight", f"{prefix}.norm_f", "lm_head.weight"),
    )


_FILES, _FUSED_FILES = "backbone.layers.{layer}.mixer", "model.layers.{layer}.mixer"
_EXPERT_ROWS = "experts {} {} -> experts {} {}"
_UP_OF_ALL, _DOWN_OF_ALL = (
    _EXPERT_ROWS.format(*2 * axes) for axes in (("expert_ffn", "hidden"), ("hidden", "expert_ffn"))
)

NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        layer_keys.nemotron_layers(),
        *only_with(MAMBA_LETTER, nemotron_letters, layer_keys.mamba_norm_epsilon("layer_norm_epsilon", 1e-5)),
        key("layer_norm_epsilon", "norm_epsilon", 1e-5),
        key("attention_dropout", "attention_dropout", 0.0),
        keys.activation("mlp_hidden_act", "relu2", gated=False),
        tied(False),
        keys.grouped_queries(8),
        keys.head_width(128),
        layer_keys.same_as("attention_head_dim", "head_dim", 128),
        layer_keys.same_as("num_query_groups", "num_key_value_heads", 8),
        layer_keys.same_as("rms_norm_eps", "layer_norm_epsilon", 1e-5),
        *(fixed(name, False) for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias")),
        fixed("sliding_window", None),
        *only_with(
            MAMBA_LETTER,
            nemotron_letters,
            key("mamba_num_heads", "mamba_num_heads", 128, written="mamba_heads"),
            key("mamba_head_dim", "mamba_head_dim", 64),
            key("ssm_state_size", "mamba_state_dim", 128),
            key("n_groups", "mamba_num_groups", 8),
            key("conv_kernel", "mamba_conv_kernel_dim", 4),
            key("time_step_min", "mamba_dt_min", 0.001),
            layer_keys.without_step_limits(),
            fixed("use_conv_bias", True),
            fixed("mamba_hidden_act", "silu"),
        ),
        *only_with(
            EXPERTS_LETTER,
            nemotron_letters,
            Keys((), lambda _: SIGMOID, lambda _: {}),
            keys.num_experts("n_routed_experts", "num_local_experts"),
            key("num_experts_per_tok", "moe_router_topk", 2),
            key("moe_intermediate_size", "moe_ffn_hidden_size", 7688, written="expert_ffn_size"),
            key("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 7688),
            key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0, written="topk_scaling_factor"),
            keys.expert_groups(),
            keys.normalized_scores("norm_topk_prob", "num_experts_per_tok", 2),
            fixed("n_shared_experts", 1),
        ),
    ),
    WITHOUT_BIASES | {"position_embedding_type": "none"},
    _nemotron_rules("backbone", not_gated(f"{_FILES}.experts.{{expert}}", "moe", "expert_ffn")),
    fused=_nemotron_rules(
        "model",
        (
            Rule(f"{_FUSED_FILES}.experts.up_proj", _UP_OF_ALL, (MappedBox("moe.up"),)),
            Rule(f"{_FUSED_FILES}.experts.down_proj", _DOWN_OF_ALL, (MappedBox("moe.down"),)),
        ),
    ),
    prefix="backbone.",
    further=r"mtp\..*",
    halves=1,
)

# ------------------------------------------------------------------------------------------------ Bamba

_BAMBA_LAYER = "model.layers.{layer}"
BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        layer_keys.bamba_layers(),
        *only_with(MAMBA_LETTER, bamba_letters, layer_keys.mamba_norm_epsilon("rms_norm_eps", 1e-5)),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        key("attention_dropout", "attention_dropout", 0.0),
        keys.activation("hidden_act", "silu", gated=True),
        keys.linear_biases(),
        tied(False),
        keys.grouped_queries(8),
        keys.head_width(),
        layer_keys.half_rotary(),
        *only_with(
            MAMBA_LETTER,
            bamba_letters,
            *layer_keys.bamba_sizes(),
            fixed("mamba_conv_bias", True),
            fixed("mamba_proj_bias", False),
        ),
    ),
    WITHOUT_BIASES,
    (
        *_norms(f"{_BAMBA_LAYER}.input_layernorm", "mamba_norm", "input_norm"),
        *mamba(f"{_BAMBA_LAYER}.mamba"),
        *attention(),
        *norm(f"{_BAMBA_LAYER}.pre_ff_layernorm", "mlp_norm"),
        *gated_mlp(f"{_BAMBA_LAYER}.feed_forward"),
        *ends("model.embed_tokens.weight", "model.final_layernorm", "lm_head.weight"),
    ),
)
