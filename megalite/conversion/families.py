"""Families of Hugging Face models that megalite's network supports, one table per family.

Tensor names are those of published checkpoints. `mapping` explains the patterns and axes.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.conversion import config_keys as keys
from megalite.conversion import mxfp4
from megalite.conversion.config_keys import Keys, fixed, key, tied
from megalite.conversion.convolution_families import LFM2
from megalite.conversion.delta_families import OLMO_HYBRID, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT
from megalite.conversion.family import Family
from megalite.conversion.latent_families import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA, KIMI_LINEAR
from megalite.conversion.mamba_families import BAMBA, GRANITE, NEMOTRON_H
from megalite.conversion.mapping import ATTENTION_OUTPUT, DOWN, UP, MappedBox, Rule, linear, norm, table
from megalite.conversion.position_keys import (
    rotary,
    rotary_of_two_kinds,
    window_everywhere,
    window_from_layer,
    window_pattern,
)
from megalite.conversion.shared_rules import (
    ATTENTION,
    MLP,
    OF_ALL,
    RMS_NORM,
    SIGMOID,
    SIZES,
    WITHOUT_BIASES,
    WITHOUT_BLOCKS,
    attention,
    choice_bias,
    ends,
    experts,
    fused_experts,
    gated,
    gated_mlp,
    shared_expert,
)

# ------------------------------------------------------------------------------------------------ Llama and its like


_LLAMA_INPUT_NORM = norm("model.layers.{layer}.input_layernorm", "input_norm")
_LLAMA_ENDS = ends("model.embed_tokens.weight", "model.norm", "lm_head.weight")
_LLAMA_NORMS = (*_LLAMA_INPUT_NORM, *norm("model.layers.{layer}.post_attention_layernorm", "mlp_norm"))
_LLAMA_RULES = (*attention(), *gated_mlp(), *_LLAMA_NORMS, *_LLAMA_ENDS)

_LLAMA_KEYS = (
    *SIZES,
    key("rms_norm_eps", "norm_epsilon", 1e-6),
    key("attention_dropout", "attention_dropout", 0.0),
)


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
    shared = (*OF_ALL, keys.activation("hidden_act", "silu", gated=True), position or rotary(), tied(False))
    all_keys = (*_LLAMA_KEYS, *shared, keys.grouped_queries(groups), *own)
    return Family(name, architecture, all_keys, always, rules)


LLAMA = _llama_like(
    "llama",
    "LlamaForCausalLM",
    RMS_NORM,
    None,
    keys.head_width(),
    keys.linear_biases(),
    fixed("rope_interleaved", False, written=False),
)
MISTRAL = _llama_like("mistral", "MistralForCausalLM", WITHOUT_BIASES, 8, keys.head_width(), window_everywhere())
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    WITHOUT_BIASES | {"add_qkv_bias": True},
    32,
    keys.head_width(),
    window_from_layer(),
    fixed("use_mrope", False, written=False),
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    WITHOUT_BIASES | {"qk_layernorm": True},
    32,
    keys.head_width(128),
    fixed("attention_bias", False),
    window_from_layer(),
)

# ------------------------------------------------------------------------------------------------ experts


_QWEN_EXPERTS = experts(MLP)
_QWEN_KEYS = (
    keys.sparse_layers(),
    keys.negated("norm_topk_prob", "moe_router_pre_softmax", False),
    key("moe_intermediate_size", "moe_ffn_hidden_size", written="expert_ffn_size"),
)


def _with_experts(family: Family, rules: tuple[Rule, ...], *shared: Rule) -> Family:
    """Return the family with rules for experts one by one, and for shared ones."""
    rewritten = (*family.rules, *fused_experts(), *shared)
    return replace(family, rules=(*family.rules, *rules, *shared), rewritten=rewritten)


MIXTRAL = _with_experts(
    _llama_like(
        "mixtral",
        "MixtralForCausalLM",
        WITHOUT_BIASES,
        8,
        keys.head_width(),
        key("rms_norm_eps", "norm_epsilon", 1e-5),
        window_everywhere(None),
        keys.num_experts("num_local_experts", "num_experts"),
        key("num_experts_per_tok", "moe_router_topk", 2),
        fixed("router_jitter_noise", 0.0),
        position=rotary(default_base=1_000_000.0),
    ),
    experts("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")),
)
QWEN2_MOE = _with_experts(
    _llama_like(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        WITHOUT_BIASES | {"add_qkv_bias": True, "moe_shared_expert_gate": True},
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
    *shared_expert(MLP),
)
QWEN3_MOE = _with_experts(
    _llama_like(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        WITHOUT_BIASES | {"qk_layernorm": True},
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
GLM4_MOE = replace(
    _with_experts(
        _llama_like(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            WITHOUT_BIASES | SIGMOID,
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
        *gated(f"{MLP}.shared_experts", "moe.shared", "shared_ffn"),
        choice_bias(MLP),
    ),
    further=r"model\.layers\.({layers})\..*",
)

_ONE_NORM = {"qk_layernorm": True, "qk_layernorm_over_heads": True}
_ONE_NORM_RULES = (*attention(over_heads=True), *gated_mlp(), *_LLAMA_NORMS, *_LLAMA_ENDS)
OLMOE = _with_experts(
    _llama_like(
        "olmoe",
        "OlmoeForCausalLM",
        WITHOUT_BIASES | _ONE_NORM,
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


OLMO2 = _llama_like(
    "olmo2",
    "Olmo2ForCausalLM",
    WITHOUT_BIASES | _ONE_NORM | {"output_norm_freq": "1"},
    None,
    key("rms_norm_eps", "norm_epsilon", 1e-5),
    fixed("attention_bias", False),
    rules=(
        *attention(over_heads=True),
        *gated_mlp(),
        *norm("model.layers.{layer}.post_attention_layernorm", "attention_output_norm"),
        *norm("model.layers.{layer}.post_feedforward_layernorm", "mlp_output_norm"),
        *_LLAMA_ENDS,
    ),
)


def _bias_beside_router(block: str) -> Rule:
    return Rule(f"{block}.e_score_correction_bias", "experts -> experts", (MappedBox("state/moe.expert_bias"),))


_M2_EXPERTS = _with_experts(
    _llama_like(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        WITHOUT_BIASES | SIGMOID | _ONE_NORM,
        8,
        keys.head_width(128),
        keys.num_experts("num_local_experts", "num_experts"),
        keys.several_experts("num_experts_per_tok", 8),
        fixed("router_jitter_noise", 0.0),
        keys.rotated_channels("rotary_dim", "head_dim", 128),
        position=rotary(share="partial_rotary_factor", default_base=5_000_000.0),
        rules=_ONE_NORM_RULES,
    ),
    experts("model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")),
)
MINIMAX_M2 = replace(
    _M2_EXPERTS,
    rules=(*_M2_EXPERTS.rules, _bias_beside_router("model.layers.{layer}.block_sparse_moe")),
    rewritten=(*_M2_EXPERTS.rewritten, _bias_beside_router(MLP)),
)

_INTERLEAVED = (
    "experts hidden (expert_ffn two) -> experts two expert_ffn hidden",
    "experts (expert_ffn two) -> experts two expert_ffn",
)
_GPT_OSS_EXPERTS = (
    *linear(f"{MLP}.router", ("experts hidden -> experts hidden", "experts -> experts"), MappedBox("moe.router")),
    Rule(f"{MLP}.experts.gate_up_proj", _INTERLEAVED[0], (MappedBox("moe.gate_up"),)),
    Rule(f"{MLP}.experts.gate_up_proj_bias", _INTERLEAVED[1], (MappedBox("moe.gate_up_bias"),)),
    Rule(
        f"{MLP}.experts.down_proj", "experts expert_ffn hidden -> experts hidden expert_ffn", (MappedBox("moe.down"),)
    ),
    Rule(f"{MLP}.experts.down_proj_bias", "experts hidden -> experts hidden", (MappedBox("moe.down_bias"),)),
    Rule(f"{ATTENTION}.sinks", "heads -> heads", (MappedBox("attention.sink"),)),
)
_GPT_OSS_YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    (
        *WITHOUT_BLOCKS,
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
    RMS_NORM
    | {"add_bias_linear": True, "quick_geglu": True, "glu_linear_offset": 1.0, "moe_router_bias": True}
    | {"softmax_type": "learnable"},
    (*_LLAMA_RULES, *_GPT_OSS_EXPERTS),
    unpack=lambda stored, _: mxfp4.unpacked(stored),
)

# ------------------------------------------------------------------------------------------------ Gemma

_GEMMA_ALWAYS = WITHOUT_BIASES | {"apply_layernorm_1p": True, "scale_embeddings": True}
_GEMMA_KEYS = (*OF_ALL, *_LLAMA_KEYS, keys.head_width(256), fixed("attention_bias", False), tied(True))
_ONE_WAY = fixed("use_bidirectional_attention", False, written=False)
_SANDWICH_RULES = (
    *attention(),
    *gated_mlp(),
    *_LLAMA_INPUT_NORM,
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
        *OF_ALL,
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
        *ends("transformer.wte.weight", "transformer.ln_f", "lm_head.weight"),
    ),
    prefixes={"": "transformer."},
    buffers=r".*\.attn\.(bias|masked_bias)",
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        *OF_ALL,
        *SIZES,
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
        *ends("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
    ),
    prefixes={"": "gpt_neox."},
    renamed={r"lm_head\.weight": "embed_out.weight"},
    head="embed_out.weight",
    buffers=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN2_MOE, QWEN3_MOE, GLM4_MOE, OLMO2, OLMOE, MINIMAX_M2, GPT_OSS),
    *(GPT2, GPT_NEOX, GEMMA, GEMMA2, GEMMA3),
    *(NEMOTRON_H, BAMBA, GRANITE, QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, OLMO_HYBRID, LFM2),
    *(DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, GLM_MOE_DSA, KIMI_LINEAR),
)
"""Families in the order in which they are tried. A network may belong to several families."""
