"""Families of Hugging Face models that megalite's network supports, one table per family.

Tensor names are those of published checkpoints. `mapping` explains the patterns and axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megalite.conversion import config_keys as keys
from megalite.conversion.config_keys import Keys, fixed, key, tied
from megalite.conversion.family import Family
from megalite.conversion.mapping import ATTENTION_OUTPUT, DOWN, QUERY, UP, MappedBox, Rule, linear, norm, table
from megalite.conversion.position_keys import (
    rotary,
    rotary_of_two_kinds,
    window_everywhere,
    window_from_layer,
    window_pattern,
)

# ------------------------------------------------------------------------------------------------ Llama and its like


def _ends(word: str, final_norm: str, head: str) -> tuple[Rule, ...]:
    """Return the rules for the tensors before and after the layers."""
    embedding, output = table(word, "vocabulary", "embedding.word"), table(head, "vocabulary", "output")
    return (embedding, *norm(final_norm, "final_norm"), output)


_ATTENTION, _MLP = "model.layers.{layer}.self_attn", "model.layers.{layer}.mlp"
_KEY_OR_VALUE = "(groups width) hidden -> groups 1 width hidden", "(groups width) -> groups 1 width"
_GATE_OR_UP = "ffn hidden -> 1 ffn hidden", "ffn -> 1 ffn"
_LLAMA_LAYER = (
    *linear(f"{_ATTENTION}.q_proj", QUERY, MappedBox("attention.query")),
    *linear(f"{_ATTENTION}.k_proj", _KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 0))),
    *linear(f"{_ATTENTION}.v_proj", _KEY_OR_VALUE, MappedBox("attention.key_value", offset=(0, 1))),
    *linear(f"{_ATTENTION}.o_proj", ATTENTION_OUTPUT, MappedBox("attention.output")),
    *linear(f"{_MLP}.gate_proj", _GATE_OR_UP, MappedBox("mlp.gate_up", offset=(0,))),
    *linear(f"{_MLP}.up_proj", _GATE_OR_UP, MappedBox("mlp.gate_up", offset=(1,))),
    *linear(f"{_MLP}.down_proj", DOWN, MappedBox("mlp.down")),
    *norm(f"{_ATTENTION}.q_norm", "attention.query_norm", "width"),
    *norm(f"{_ATTENTION}.k_norm", "attention.key_norm", "width"),
    *norm("model.layers.{layer}.input_layernorm", "input_norm"),
)
_LLAMA_ENDS = _ends("model.embed_tokens.weight", "model.norm", "lm_head.weight")
_LLAMA_MLP_NORM = norm("model.layers.{layer}.post_attention_layernorm", "mlp_norm")
_LLAMA_RULES = (*_LLAMA_LAYER, *_LLAMA_MLP_NORM, *_LLAMA_ENDS)

_UNUSED = {"is_encoder_decoder": False, "tie_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}}
_OF_ALL = tuple(fixed(name, value, written=False) for name, value in ({"is_causal": True} | _UNUSED).items())
_SIZES = (
    key("vocab_size", "vocab_size"),
    key("hidden_size", "hidden_size"),
    key("num_hidden_layers", "num_layers"),
    key("num_attention_heads", "num_attention_heads"),
    key("intermediate_size", "ffn_hidden_size", written="ffn_size"),
    key("max_position_embeddings", "max_position_embeddings"),
    key("initializer_range", "init_method_std", 0.02),
)
_LLAMA_KEYS = (
    *_SIZES,
    key("rms_norm_eps", "norm_epsilon", 1e-6),
    key("attention_dropout", "attention_dropout", 0.0),
)
_RMS_NORM = {"normalization": "RMSNorm", "hidden_dropout": 0.0}
_WITHOUT_BIASES = _RMS_NORM | {"add_bias_linear": False}


def _llama_like(
    name: str,
    architecture: str,
    always: dict[str, object],
    groups: int | None,
    *own: Keys,
    position: Keys | None = None,
    rules: tuple[Rule, ...] = _LLAMA_RULES,
) -> Family:
    """Return a family similar to Llama.

    `groups`: number of key-value heads if config.json does not have it. `position`: entry for rotary embeddings; None:
    that of Llama. `rules`: of the tensors but for experts.
    """
    shared = (*_OF_ALL, keys.activation("hidden_act", "silu", gated=True), position or rotary(), tied(False))
    all_keys = (*_LLAMA_KEYS, *shared, keys.grouped_queries(groups), *own)
    return Family(name, architecture, all_keys, always, rules)


LLAMA = _llama_like(
    "llama",
    "LlamaForCausalLM",
    _RMS_NORM,
    None,
    keys.head_width(),
    keys.linear_biases(),
    fixed("rope_interleaved", False, written=False),
)
MISTRAL = _llama_like("mistral", "MistralForCausalLM", _WITHOUT_BIASES, 8, keys.head_width(), window_everywhere())
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    _WITHOUT_BIASES | {"add_qkv_bias": True},
    32,
    keys.head_width(),
    window_from_layer(),
    fixed("use_mrope", False, written=False),
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    _WITHOUT_BIASES | {"qk_layernorm": True},
    32,
    keys.head_width(128),
    fixed("attention_bias", False),
    window_from_layer(),
)

# ------------------------------------------------------------------------------------------------ experts


_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


def _gated(block: str, tensor: str, width: str, names: Sequence[str] = _GATE_UP_DOWN) -> tuple[Rule, ...]:
    """Return the rules for the gate, up and down matrices of experts, one or shared, which have these names.

    `tensor`: prefix of the logical tensors. `width`: the axis of the inner width.
    """
    gate, up, down = (f"{block}.{name}.weight" for name in names)
    return (
        Rule(gate, f"{width} hidden -> 1 {width} hidden", (MappedBox(f"{tensor}.gate_up", offset=(0,)),)),
        Rule(up, f"{width} hidden -> 1 {width} hidden", (MappedBox(f"{tensor}.gate_up", offset=(1,)),)),
        Rule(down, f"hidden {width} -> hidden {width}", (MappedBox(f"{tensor}.down"),)),
    )


def _experts(block: str, names: Sequence[str]) -> tuple[Rule, ...]:
    """Return the rules for the router and for the experts of a layer one by one, whose matrices have these names."""
    router = Rule(f"{block}.gate.weight", "experts hidden -> experts hidden", (MappedBox("moe.router"),))
    return (router, *_gated(f"{block}.experts.{{expert}}", "moe", "expert_ffn", names))


_FUSED_EXPERTS = (
    Rule(f"{_MLP}.gate.weight", "experts hidden -> experts hidden", (MappedBox("moe.router"),)),
    Rule(
        f"{_MLP}.experts.gate_up_proj",
        "experts (two expert_ffn) hidden -> experts two expert_ffn hidden",
        (MappedBox("moe.gate_up"),),
    ),
    Rule(
        f"{_MLP}.experts.down_proj",
        "experts hidden expert_ffn -> experts hidden expert_ffn",
        (MappedBox("moe.down"),),
    ),
)


_QWEN_EXPERTS = _experts(_MLP, _GATE_UP_DOWN)
_QWEN_KEYS = (
    keys.sparse_layers(),
    keys.negated("norm_topk_prob", "moe_router_pre_softmax", False),
    key("moe_intermediate_size", "moe_ffn_hidden_size", written="expert_ffn_size"),
)


def _with_experts(family: Family, rules: tuple[Rule, ...], *shared: Rule) -> Family:
    """Return the family with rules for experts one by one, and for shared ones."""
    fused = (*family.rules, *_FUSED_EXPERTS, *shared)
    return replace(family, rules=(*family.rules, *rules, *shared), fused=fused)


MIXTRAL = _with_experts(
    _llama_like(
        "mixtral",
        "MixtralForCausalLM",
        _WITHOUT_BIASES,
        8,
        keys.head_width(),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        window_everywhere(None),
        keys.num_experts("num_local_experts", "num_experts"),
        key("num_experts_per_tok", "moe_router_topk", 2),
        fixed("router_jitter_noise", 0.0),
        position=rotary(default_base=1_000_000.0),
    ),
    _experts("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")),
)
QWEN2_MOE = _with_experts(
    _llama_like(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _WITHOUT_BIASES | {"add_qkv_bias": True, "moe_shared_expert_gate": True},
        16,
        keys.head_width(),
        window_from_layer(states_layers=True),
        fixed("qkv_bias", True),
        keys.num_experts("num_experts"),
        key("num_experts_per_tok", "moe_router_topk", 4),
        key("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        *_QWEN_KEYS,
    ),
    _QWEN_EXPERTS,
    *_gated(f"{_MLP}.shared_expert", "moe.shared", "shared_ffn"),
    Rule(f"{_MLP}.shared_expert_gate.weight", "one hidden -> one hidden", (MappedBox("moe.shared_gate"),)),
)
QWEN3_MOE = _with_experts(
    _llama_like(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _WITHOUT_BIASES | {"qk_layernorm": True},
        4,
        keys.head_width(),
        fixed("attention_bias", False),
        fixed("use_sliding_window", False),
        keys.num_experts("num_experts", "num_local_experts"),
        key("num_experts_per_tok", "moe_router_topk", 8),
        *_QWEN_KEYS,
    ),
    _QWEN_EXPERTS,
)
_SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_dtype": "fp32"}
GLM4_MOE = replace(
    _with_experts(
        _llama_like(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _WITHOUT_BIASES | _SIGMOID,
            8,
            keys.head_width(),
            key("rms_norm_eps", "norm_epsilon", 1e-5),
            key("attention_bias", "add_qkv_bias", False),
            key("use_qk_norm", "qk_layernorm", False),
            keys.num_experts("n_routed_experts", "num_local_experts"),
            key("num_experts_per_tok", "moe_router_topk", 8),
            key("moe_intermediate_size", "moe_ffn_hidden_size", 1408, written="expert_ffn_size"),
            key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0, written="topk_scaling_factor"),
            keys.leading_dense("first_k_dense_replace", 1),
            keys.shared_experts("n_shared_experts", "moe_intermediate_size", 1408),
            keys.expert_groups(),
            keys.normalized_scores("norm_topk_prob", "num_experts_per_tok", 8),
            keys.without_prediction_layers(),
            position=rotary(share="partial_rotary_factor", default_share=0.5),
        ),
        _QWEN_EXPERTS,
        *_gated(f"{_MLP}.shared_experts", "moe.shared", "shared_ffn"),
        Rule(f"{_MLP}.gate.e_score_correction_bias", "experts -> experts", (MappedBox("state/moe.expert_bias"),)),
    ),
    predicts_further=True,
)

_ONE_NORM = {"qk_layernorm": True, "qk_layernorm_over_heads": True}
_ONE_NORM_RULES = (
    *(
        rule
        for rule in _LLAMA_RULES
        if "attention.query_norm" not in str(rule) and "attention.key_norm" not in str(rule)
    ),
    Rule(f"{_ATTENTION}.q_norm.weight", "(heads width) -> heads width", (MappedBox("attention.query_norm.weight"),)),
    Rule(f"{_ATTENTION}.k_norm.weight", "(groups width) -> groups width", (MappedBox("attention.key_norm.weight"),)),
)
OLMOE = _with_experts(
    _llama_like(
        "olmoe",
        "OlmoeForCausalLM",
        _WITHOUT_BIASES | _ONE_NORM,
        None,
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        fixed("attention_bias", False),
        fixed("clip_qkv", None),
        keys.num_experts("num_experts", "num_local_experts"),
        key("num_experts_per_tok", "moe_router_topk", 8),
        keys.negated("norm_topk_prob", "moe_router_pre_softmax", False),
        rules=_ONE_NORM_RULES,
    ),
    _QWEN_EXPERTS,
)


def _choice_bias(block: str) -> Rule:
    return Rule(f"{block}.e_score_correction_bias", "experts -> experts", (MappedBox("state/moe.expert_bias"),))


_M2_EXPERTS = _with_experts(
    _llama_like(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _WITHOUT_BIASES | _SIGMOID | _ONE_NORM,
        8,
        keys.head_width(128),
        keys.num_experts("num_local_experts", "num_experts"),
        keys.several_experts("num_experts_per_tok", 8),
        fixed("router_jitter_noise", 0.0),
        keys.rotated_channels("rotary_dim", "head_dim", 128),
        position=rotary(share="partial_rotary_factor", default_base=5_000_000.0),
        rules=_ONE_NORM_RULES,
    ),
    _experts("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")),
)
MINIMAX_M2 = replace(
    _M2_EXPERTS,
    rules=(*_M2_EXPERTS.rules, _choice_bias("model.layers.{layer}.block_sparse_moe")),
    fused=(*_M2_EXPERTS.fused, _choice_bias(_MLP)),
)

_INTERLEAVED = (
    "experts hidden (expert_ffn two) -> experts two expert_ffn hidden",
    "experts (expert_ffn two) -> experts two expert_ffn",
)
_GPT_OSS_EXPERTS = (
    *linear(f"{_MLP}.router", ("experts hidden -> experts hidden", "experts -> experts"), MappedBox("moe.router")),
    Rule(f"{_MLP}.experts.gate_up_proj", _INTERLEAVED[0], (MappedBox("moe.gate_up"),)),
    Rule(f"{_MLP}.experts.gate_up_proj_bias", _INTERLEAVED[1], (MappedBox("moe.gate_up_bias"),)),
    Rule(
        f"{_MLP}.experts.down_proj", "experts expert_ffn hidden -> experts hidden expert_ffn", (MappedBox("moe.down"),)
    ),
    Rule(f"{_MLP}.experts.down_proj_bias", "experts hidden -> experts hidden", (MappedBox("moe.down_bias"),)),
    Rule(f"{_ATTENTION}.sinks", "heads -> heads", (MappedBox("attention.sink"),)),
)
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *_OF_ALL,
        *_LLAMA_KEYS,
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        keys.head_width(64),
        keys.grouped_queries(8),
        keys.num_experts("num_local_experts", "num_experts"),
        key("num_experts_per_tok", "moe_router_topk", 4),
        key("swiglu_limit", "activation_func_clamp_value", 7.0),
        fixed("swiglu_alpha", 1.702, written=False),
        fixed("hidden_act", "silu"),
        fixed("attention_bias", True),
        keys.quantization("mxfp4"),
        rotary(default_base=150_000.0, otherwise=_GPT_OSS_YARN),
        window_pattern(full_every=2, default=128),
        tied(False),
    ),
    _RMS_NORM
    | {"add_bias_linear": True, "quick_geglu": True, "glu_linear_offset": 1.0, "moe_router_bias": True}
    | {"softmax_type": "learnable"},
    (*_LLAMA_RULES, *_GPT_OSS_EXPERTS),
    mxfp4=True,
)

# ------------------------------------------------------------------------------------------------ Gemma

_GEMMA_ALWAYS = _WITHOUT_BIASES | {"apply_layernorm_1p": True, "scale_embeddings": True}
_GEMMA_KEYS = (*_OF_ALL, *_LLAMA_KEYS, keys.head_width(256), fixed("attention_bias", False), tied(True))
_ONE_WAY = fixed("use_bidirectional_attention", False, written=False)
_SANDWICH_RULES = (
    *_LLAMA_LAYER,
    *norm("model.layers.{layer}.post_attention_layernorm", "attention_output_norm"),
    *norm("model.layers.{layer}.pre_feedforward_layernorm", "mlp_norm"),
    *norm("model.layers.{layer}.post_feedforward_layernorm", "mlp_output_norm"),
    *_LLAMA_ENDS,
)
_SANDWICH_KEYS = (
    *_GEMMA_KEYS,
    keys.grouped_queries(4),
    keys.activation("hidden_activation", "gelu_pytorch_tanh", gated=True),
    keys.square_root_of_heads(),
    _ONE_WAY,
)

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    (*_GEMMA_KEYS, keys.grouped_queries(16), keys.tanh_gate(), rotary(), _ONE_WAY),
    _GEMMA_ALWAYS,
    _LLAMA_RULES,
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_SANDWICH_KEYS,
        rotary(),
        window_pattern(full_every=2),
        keys.soft_cap("attn_logit_softcapping", 50.0),
        keys.soft_cap("final_logit_softcapping", 30.0),
    ),
    _GEMMA_ALWAYS | {"sandwich_norm": True},
    _SANDWICH_RULES,
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_SANDWICH_KEYS,
        rotary_of_two_kinds(),
        window_pattern(full_every=6, pattern_key=True),
        fixed("attn_logit_softcapping", None),  # transformers reads this key, but does not apply a cap
        keys.soft_cap("final_logit_softcapping", None),
    ),
    _GEMMA_ALWAYS | {"sandwich_norm": True, "qk_layernorm": True},
    _SANDWICH_RULES,
)

# ------------------------------------------------------------------------------------------------ GPT-2, GPT-NeoX

# Boxes of a fused matrix [heads, three, width, hidden]. Per head it has the query, then the key, then the value.
_FUSED = (
    MappedBox("attention.query", (slice(None), 0)),
    MappedBox("attention.key_value", (slice(None), slice(1, 3))),
)
_FUSED_GPT2 = "hidden (three heads width) -> heads three width hidden", "(three heads width) -> heads three width"
_FUSED_NEOX = "(heads three width) hidden -> heads three width hidden", "(heads three width) -> heads three width"
# GPT-2 stores matrices as [inputs, outputs].
_GPT2_OUTPUT = "(heads width) hidden -> hidden heads width", "hidden -> hidden"
_GPT2_UP = "hidden ffn -> ffn hidden", "ffn -> ffn"
_GPT2_DOWN = "ffn hidden -> hidden ffn", "hidden -> hidden"
_LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        *_OF_ALL,
        key("vocab_size", "vocab_size"),
        key("n_embd", "hidden_size"),
        key("n_layer", "num_layers"),
        key("n_head", "num_attention_heads"),
        key("n_inner", "ffn_hidden_size", None, written="ffn_size"),
        key("n_positions", "max_position_embeddings"),
        key("initializer_range", "init_method_std", 0.02),
        key("layer_norm_epsilon", "norm_epsilon", 1e-5),
        keys.equal_dropouts("embd_pdrop", "resid_pdrop", default=0.1),
        key("attn_pdrop", "attention_dropout", 0.1),
        keys.activation("activation_function", "gelu_new", gated=False),
        tied(True),
        fixed("scale_attn_weights", True),
        fixed("scale_attn_by_inverse_layer_idx", False),
        fixed("reorder_and_upcast_attn", False),
    ),
    _LAYER_NORM | {"position_embedding_type": "learned_absolute"},
    (
        *linear("transformer.h.{layer}.attn.c_attn", _FUSED_GPT2, *_FUSED),
        *linear("transformer.h.{layer}.attn.c_proj", _GPT2_OUTPUT, MappedBox("attention.output")),
        *linear("transformer.h.{layer}.mlp.c_fc", _GPT2_UP, MappedBox("mlp.up")),
        *linear("transformer.h.{layer}.mlp.c_proj", _GPT2_DOWN, MappedBox("mlp.down")),
        *norm("transformer.h.{layer}.ln_1", "input_norm"),
        *norm("transformer.h.{layer}.ln_2", "mlp_norm"),
        table("transformer.wpe.weight", "positions", "embedding.position"),
        *_ends("transformer.wte.weight", "transformer.ln_f", "lm_head.weight"),
    ),
    prefix="transformer.",
    buffers=r".*\.attn\.(bias|masked_bias)",
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        *_OF_ALL,
        *_SIZES,
        key("layer_norm_eps", "norm_epsilon", 1e-5),
        key("hidden_dropout", "hidden_dropout", 0.0),
        key("attention_dropout", "attention_dropout", 0.0),
        key("use_parallel_residual", "use_parallel_residual", True),
        keys.activation("hidden_act", "gelu", gated=False),
        rotary("rotary_emb_base", "rotary_pct", 0.25),
        tied(False),
        fixed("attention_bias", True, written=False),
    ),
    _LAYER_NORM,
    (
        *linear("gpt_neox.layers.{layer}.attention.query_key_value", _FUSED_NEOX, *_FUSED),
        *linear("gpt_neox.layers.{layer}.attention.dense", ATTENTION_OUTPUT, MappedBox("attention.output")),
        *linear("gpt_neox.layers.{layer}.mlp.dense_h_to_4h", UP, MappedBox("mlp.up")),
        *linear("gpt_neox.layers.{layer}.mlp.dense_4h_to_h", DOWN, MappedBox("mlp.down")),
        *norm("gpt_neox.layers.{layer}.input_layernorm", "input_norm"),
        *norm("gpt_neox.layers.{layer}.post_attention_layernorm", "mlp_norm"),
        *_ends("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
    ),
    prefix="gpt_neox.",
    renamed={"lm_head.weight": "embed_out.weight"},
    head="embed_out.weight",
    buffers=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, OLMOE, MINIMAX_M2, GPT_OSS),
    *(GPT2, GPT_NEOX, GEMMA, GEMMA2, GEMMA3),
)
"""Families in the order in which they are tried. A network may belong to several families."""

LACKING = {
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention",
}
"""Model types that are refused, with the parts of the network that megalite lacks."""
