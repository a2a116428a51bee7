"""Families of Hugging Face models with Mamba-2 layers: Nemotron-H, Bamba, Granite 4."""

from __future__ import annotations

from megalite.config.layer_specs import EXPERTS_LETTER, MAMBA_LETTER
from megalite.conversion import config_keys as keys
from megalite.conversion import layer_keys
from megalite.conversion.config_keys import Keys, fixed, key, tied
from megalite.conversion.family import Family
from megalite.conversion.layer_keys import bamba_letters, granite_letters, nemotron_letters, only_with
from megalite.conversion.mapping import DOWN, UP, MappedBox, Rule, linear, norm
from megalite.conversion.recurrent_rules import mamba, norms
from megalite.conversion.shared_rules import (
    FFN,
    OF_ALL,
    RMS_NORM,
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

# ------------------------------------------------------------------------------------------------ Nemotron-H


_DOWN_TO_LATENT = "expert_hidden hidden -> expert_hidden hidden"
_UP_FROM_LATENT = "hidden expert_hidden -> hidden expert_hidden"
_NEMOTRON = "backbone.layers.{layer}.mixer"


def _nemotron_rules(*of_experts: Rule) -> tuple[Rule, ...]:
    """Return the rules of Nemotron-H, with these for the matrices of its experts."""
    return (
        *norms("backbone.layers.{layer}.norm", "mamba_norm", "input_norm", "mlp_norm"),
        *mamba(_NEMOTRON),
        *attention(_NEMOTRON),
        *linear(f"{_NEMOTRON}.up_proj", UP, MappedBox("mlp.up")),
        *linear(f"{_NEMOTRON}.down_proj", DOWN, MappedBox("mlp.down")),
        router(_NEMOTRON),
        choice_bias(_NEMOTRON),
        *of_experts,
        Rule(f"{_NEMOTRON}.fc1_latent_proj.weight", _DOWN_TO_LATENT, (MappedBox("moe.latent_down"),)),
        Rule(f"{_NEMOTRON}.fc2_latent_proj.weight", _UP_FROM_LATENT, (MappedBox("moe.latent_up"),)),
        *not_gated(f"{_NEMOTRON}.shared_experts", "moe.shared", "shared_ffn"),
        *ends("backbone.embeddings.weight", "backbone.norm_f", "lm_head.weight"),
    )


_UP_OF_ALL = "experts expert_ffn expert_hidden -> experts expert_ffn expert_hidden"
_DOWN_OF_ALL = "experts expert_hidden expert_ffn -> experts expert_hidden expert_ffn"

NEMOTRON_H = Family(
    "nemotron_h",
    "NemotronHForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        FFN,
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
        layer_keys.same_as("norm_eps", "layer_norm_epsilon", 1e-5),
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
            key("moe_latent_size", "moe_latent_size", None),
            key("moe_intermediate_size", "moe_ffn_hidden_size", 7688, written="expert_ffn_size"),
            key("moe_shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 7688),
            key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0, written="topk_scaling_factor"),
            keys.expert_groups(),
            keys.normalized_scores("norm_topk_prob", "num_experts_per_tok", 2),
            fixed("n_shared_experts", 1),
        ),
    ),
    WITHOUT_BIASES | {"position_embedding_type": "none"},
    _nemotron_rules(*not_gated(f"{_NEMOTRON}.experts.{{expert}}", "moe", "expert_ffn", "expert_hidden")),
    rewritten=_nemotron_rules(
        Rule(f"{_NEMOTRON}.experts.up_proj", _UP_OF_ALL, (MappedBox("moe.up"),)),
        Rule(f"{_NEMOTRON}.experts.down_proj", _DOWN_OF_ALL, (MappedBox("moe.down"),)),
    ),
    prefixes={"model.": "backbone.", "": "backbone."},
    further=r"mtp\..*",
    halves=1,
)

# ------------------------------------------------------------------------------------------------ Bamba, Granite 4

_LAYER = "model.layers.{layer}"
BAMBA = Family(
    "bamba",
    "BambaForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        FFN,
        layer_keys.bamba_layers(),
        *only_with(MAMBA_LETTER, bamba_letters, layer_keys.mamba_norm_epsilon("rms_norm_eps", 1e-5)),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        key("attention_dropout", "attention_dropout", 0.0),
        fixed("hidden_act", "silu"),  # also of the convolution
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
    RMS_NORM | {"swiglu": True},
    (
        *norms(f"{_LAYER}.input_layernorm", "mamba_norm", "input_norm"),
        *mamba(f"{_LAYER}.mamba"),
        *attention(),
        *norm(f"{_LAYER}.pre_ff_layernorm", "mlp_norm"),
        *gated_mlp(f"{_LAYER}.feed_forward"),
        *ends("model.embed_tokens.weight", "model.final_layernorm", "lm_head.weight"),
    ),
)


def _granite_rules(router: str, up: str, down: str) -> tuple[Rule, ...]:
    """Return the rules of Granite 4, whose router and experts have these names."""
    shared, experts = f"{_LAYER}.shared_mlp", f"{_LAYER}.block_sparse_moe"
    of_all = (
        (f"{experts}.{router}", "experts hidden -> experts hidden", "moe.router"),
        (f"{experts}.{up}", "experts (two expert_ffn) hidden -> experts two expert_ffn hidden", "moe.gate_up"),
        (f"{experts}.{down}", "experts hidden expert_ffn -> experts hidden expert_ffn", "moe.down"),
        (f"{shared}.input_linear.weight", "(two ffn) hidden -> two ffn hidden", "mlp.gate_up"),
        (f"{shared}.output_linear.weight", "hidden ffn -> hidden ffn", "mlp.down"),
        (f"{shared}.input_linear.weight", "(two shared_ffn) hidden -> two shared_ffn hidden", "moe.shared.gate_up"),
        (f"{shared}.output_linear.weight", "hidden shared_ffn -> hidden shared_ffn", "moe.shared.down"),
    )
    return (
        *norms(f"{_LAYER}.input_layernorm", "mamba_norm", "input_norm"),
        *mamba(f"{_LAYER}.mamba"),
        *attention(),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *(Rule(file, pattern, (MappedBox(tensor),)) for file, pattern, tensor in of_all),
        *ends("model.embed_tokens.weight", "model.norm", "lm_head.weight"),
    )


GRANITE = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        layer_keys.granite_layers(),
        *only_with(MAMBA_LETTER, granite_letters, layer_keys.mamba_norm_epsilon("rms_norm_eps", 1e-6)),
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        key("attention_dropout", "attention_dropout", 0.0),
        fixed("hidden_act", "silu"),  # also of the convolution
        fixed("attention_bias", False),
        fixed("normalization_function", "rmsnorm", written=False),
        tied(False),
        keys.grouped_queries(),
        keys.head_width(),
        layer_keys.optional_rotary(),
        layer_keys.factor_of_scores(),
        *(key(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
        *only_with(
            MAMBA_LETTER,
            granite_letters,
            *layer_keys.bamba_sizes(),
            fixed("mamba_conv_bias", True),
            fixed("mamba_proj_bias", False),
        ),
        *only_with("-", granite_letters, key("shared_intermediate_size", "ffn_hidden_size", 1024, written="ffn_size")),
        *only_with(
            EXPERTS_LETTER,
            granite_letters,
            key("shared_intermediate_size", "moe_shared_expert_intermediate_size", 1024),
            key("intermediate_size", "moe_ffn_hidden_size", written="expert_ffn_size"),
            key("num_experts_per_tok", "moe_router_topk", 2),
        ),
    ),
    WITHOUT_BIASES | {"swiglu": True},
    _granite_rules("router.layer.weight", "input_linear.weight", "output_linear.weight"),
    rewritten=_granite_rules("router.weight", "experts.gate_up_proj", "experts.down_proj"),
)
