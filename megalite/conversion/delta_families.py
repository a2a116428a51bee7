"""Families of Hugging Face models with gated delta nets: Qwen3-Next, the text models of Qwen3.5, OLMo-Hybrid."""

from __future__ import annotations

import re
from functools import partial

from megalite.config.layer_specs import DELTA_LETTER, EXPERTS_LETTER
from megalite.conversion import config_keys as keys
from megalite.conversion import layer_keys
from megalite.conversion.config_keys import Json, Keys, fixed, key, layers_of, tied
from megalite.conversion.family import Family
from megalite.conversion.layer_keys import Letters, only_with, qwen_letters
from megalite.conversion.mapping import MappedBox, Rule, norm
from megalite.conversion.position_keys import rotary
from megalite.conversion.recurrent_rules import (
    convolutions_apart,
    gated_delta,
    matrices_apart,
    norms,
    one_convolution,
    projections_apart,
    projections_by_key_head,
)
from megalite.conversion.shared_rules import (
    ATTENTION,
    FFN,
    MLP,
    OF_ALL,
    WIDTHS,
    WITHOUT_BIASES,
    attention,
    attention_but_queries,
    ends,
    experts,
    fused_experts,
    gated_mlp,
    shared_expert,
)

IMAGES = "model.visual."
"""Prefix of the tensors of what sees images."""
_ALWAYS = WITHOUT_BIASES | {
    "swiglu": True,
    "qk_layernorm": True,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
}


def _keys(letters: Letters, groups: int, *own: Keys) -> tuple[Keys, ...]:
    """Return the entries that these families share. `groups`: number of key-value heads if config.json lacks it."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    sizes = heads | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    return (
        *OF_ALL,
        *WIDTHS,
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        key("attention_dropout", "attention_dropout", 0.0),
        fixed("hidden_act", "silu"),  # also of the convolution
        fixed("attention_bias", False),
        fixed("attn_output_gate", True, written=False),
        tied(False),
        keys.grouped_queries(groups),
        keys.head_width(256),
        *only_with(DELTA_LETTER, letters, *(key(name, name, default) for name, default in sizes.items())),
        *own,
    )


def _of_experts(letters: Letters, topk: int, *own: Keys) -> tuple[Keys, ...]:
    """Return the entries for experts. `topk`: number that a token chooses if config.json lacks it."""
    return tuple(
        only_with(
            EXPERTS_LETTER,
            letters,
            Keys((), lambda _: {"moe_shared_expert_gate": True}, lambda _: {}),
            keys.num_experts("num_experts"),
            key("num_experts_per_tok", "moe_router_topk", topk),
            key("moe_intermediate_size", "moe_ffn_hidden_size", 512, written="expert_ffn_size"),
            key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", 512),
            *own,
        )
    )


def _rules(*projections: Rule) -> tuple[Rule, ...]:
    """Return the rules for a model without those of experts. `projections`: those of its gated delta nets."""
    gate = (MappedBox("attention.query", (slice(None), 0)), MappedBox("attention.gate", (slice(None), 1)))
    return (
        *norms(f"{_LAYER}.input_layernorm", "gated_delta_norm", "input_norm"),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *gated_delta(_DELTA, *projections, one_convolution(_DELTA)),
        Rule(f"{ATTENTION}.q_proj.weight", "(heads two width) hidden -> heads two width hidden", gate),
        *attention_but_queries(ATTENTION),
        *gated_mlp(),
        *ends("model.embed_tokens.weight", "model.norm", "lm_head.weight"),
    )


_LAYER = "model.layers.{layer}"
_DELTA = f"{_LAYER}.linear_attn"
_OF_NEXT = (*_rules(*projections_by_key_head(_DELTA)), *shared_expert(MLP))
_OF_TEXT = _rules(*projections_apart(_DELTA))
_next_letters = partial(qwen_letters, experts=keys.sparse_by_step)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    _keys(
        _next_letters,
        2,
        FFN,
        layer_keys.qwen_layers(_next_letters, "decoder_sparse_step", "mlp_only_layers"),
        rotary(share="partial_rotary_factor", default_share=0.25),
        *_of_experts(_next_letters, 10, keys.negated("norm_topk_prob", "moe_router_pre_softmax", True)),
    ),
    _ALWAYS,
    (*_OF_NEXT, *experts(MLP)),
    rewritten=(*_OF_NEXT, *fused_experts(MLP)),
    further=r"mtp\..*",
)


def _text(name: str, architecture: str, *, sparse: bool, groups: int) -> Family:
    """Return the family of the text models of Qwen3.5, whose layers all have experts, or none."""

    def with_experts(config: Json) -> list[bool]:
        return [sparse] * layers_of(config)

    letters = partial(qwen_letters, experts=with_experts)
    gate = fixed("output_gate_type", "swish", written=False)
    own = (layer_keys.qwen_layers(letters), layer_keys.rotary_of_text(), gate)
    return Family(
        name,
        architecture,
        _keys(letters, groups, *own, *(_of_experts(letters, 8) if sparse else (FFN,))),
        _ALWAYS,
        (*_OF_TEXT, *shared_expert(MLP), *experts(MLP)) if sparse else _OF_TEXT,
        rewritten=(*_OF_TEXT, *shared_expert(MLP), *fused_experts(MLP)) if sparse else (),
        prefixes={"model.language_model.": "model.", "": "model."},
        further=rf"mtp\..*|{re.escape(IMAGES)}.*",
    )


QWEN3_5 = _text("qwen3_5_text", "Qwen3_5ForCausalLM", sparse=False, groups=4)
QWEN3_5_MOE = _text("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", sparse=True, groups=2)

# ------------------------------------------------------------------------------------------------ OLMo-Hybrid


def _olmo_rules(norm_before: str, norm_of_mlp: str, *convolutions: Rule) -> tuple[Rule, ...]:
    """Return the rules for a model with these convolutions, and these names of norms of layers without attention."""
    return (
        *norm(f"{_LAYER}.{norm_before}", "gated_delta_norm"),
        *norm(f"{_LAYER}.{norm_of_mlp}", "mlp_norm"),
        *norm(f"{_LAYER}.post_attention_layernorm", "attention_output_norm"),
        *norm(f"{_LAYER}.post_feedforward_layernorm", "mlp_output_norm"),
        *gated_delta(_DELTA, *matrices_apart(_DELTA), *convolutions, norm="o_norm", output="o_proj"),
        *attention(over_heads=True),
        *gated_mlp(),
        *ends("model.embed_tokens.weight", "model.norm", "lm_head.weight"),
    )


OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    (
        *OF_ALL,
        *WIDTHS,
        FFN,
        layer_keys.olmo_layers(),
        Keys((), lambda _: {}, lambda _: {"pad_token_id": None}),  # otherwise transformers takes number 100277
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        key("attention_dropout", "attention_dropout", 0.0),
        fixed("hidden_act", "silu"),
        fixed("attention_bias", False),
        tied(False),
        keys.grouped_queries(),
        layer_keys.rotary_or_none(),
        layer_keys.olmo_delta_sizes(),
        key("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
        key("linear_allow_neg_eigval", "linear_allow_neg_eigval", True),
    ),
    WITHOUT_BIASES
    | {"swiglu": True, "qk_layernorm": True, "qk_layernorm_over_heads": True, "linear_norm_epsilon": 1e-5},
    _olmo_rules("attention_layer_norm", "feedforward_layer_norm", *convolutions_apart(_DELTA)),
    rewritten=_olmo_rules("input_layernorm", "post_attention_layernorm", one_convolution(_DELTA)),
)
