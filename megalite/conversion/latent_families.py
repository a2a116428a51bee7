"""Families of Hugging Face models with attention over latents: those of DeepSeek, GLM-5, Kimi Linear."""

from __future__ import annotations

from dataclasses import replace

from megalite.config.layer_specs import EXPERTS_LETTER, LATENT_LETTER
from megalite.conversion import config_keys as keys
from megalite.conversion import latent_keys
from megalite.conversion.config_keys import Keys, fixed, key, tied
from megalite.conversion.family import Family
from megalite.conversion.indexer_keys import INDEXERS, choosing_layers, indexer
from megalite.conversion.latent_keys import (
    LATENT_NORMS,
    kimi_letters,
    latent_rotary,
    latent_sizes,
    listed_dense_layers,
    with_names,
)
from megalite.conversion.layer_keys import only_with
from megalite.conversion.mapping import MappedBox, Rule, norm
from megalite.conversion.prediction_layers import OF_DEPTHS
from megalite.conversion.recurrent_rules import kimi_convolutions, kimi_delta, norms
from megalite.conversion.shared_rules import (
    ATTENTION,
    FFN,
    MLP,
    OF_ALL,
    SIGMOID,
    SIZES,
    WIDTHS,
    WITHOUT_BIASES,
    choice_bias,
    ends,
    experts,
    fused_experts,
    gated,
    gated_mlp,
)

_LAYER = "model.layers.{layer}"
_LATENTS = "latent_attention"


def _matrices(file: str, tensor: str, *matrices: tuple[str, str, str]) -> tuple[Rule, ...]:
    """Return the rules of matrices by the name in the files, that of the logical tensor, and the view of it.

    `file`, `tensor`: what stands before these names.
    """
    return tuple(
        Rule(f"{file}.{theirs}.weight", pattern, (MappedBox(f"{tensor}.{ours}"),)) for theirs, ours, pattern in matrices
    )


def _latent_attention() -> tuple[Rule, ...]:
    """Return the rules for attention over latents, of whose queries there may be a latent."""
    matrices = (
        ("q_proj", "query", "(heads query_width) hidden -> heads query_width hidden"),
        ("q_a_proj", "query_down", "query_rank hidden -> query_rank hidden"),
        ("q_b_proj", "query_up", "(heads query_width) query_rank -> heads query_width query_rank"),
        ("kv_a_proj_with_mqa", "key_value_down", "latent_rows hidden -> latent_rows hidden"),
        ("kv_b_proj", "key_value_up", "(heads key_and_value) latent_rank -> heads key_and_value latent_rank"),
        ("o_proj", "output", "hidden (heads latent_value) -> hidden heads latent_value"),
    )
    return (
        *_matrices(ATTENTION, _LATENTS, *matrices),
        *norm(f"{ATTENTION}.q_a_layernorm", f"{_LATENTS}.query_norm", "query_rank"),
        *norm(f"{ATTENTION}.kv_a_layernorm", f"{_LATENTS}.key_value_norm", "latent_rank"),
    )


def _indexer() -> tuple[Rule, ...]:
    """Return the rules for an indexer."""
    file, tensor = f"{ATTENTION}.indexer", f"{_LATENTS}.indexer"
    matrices = (
        ("wq_b", "query", "(index_heads index_width) index_input -> index_heads index_width index_input"),
        ("wk", "key", "index_width hidden -> index_width hidden"),
        ("weights_proj", "weights", "index_heads hidden -> index_heads hidden"),
    )
    return (*_matrices(file, tensor, *matrices), *norm(f"{file}.k_norm", f"{tensor}.key_norm", "index_width"))


def _rules(block: str, *own: Rule) -> tuple[Rule, ...]:
    """Return the rules that all have, and these. `block`: prefix of the experts of a layer."""
    return (
        *norms(f"{_LAYER}.input_layernorm", f"{_LATENTS}_norm", "kimi_delta_norm"),
        *norm(f"{_LAYER}.post_attention_layernorm", "mlp_norm"),
        *_latent_attention(),
        *gated_mlp(),
        *gated(f"{block}.shared_experts", "moe.shared", "shared_ffn"),
        choice_bias(block),
        *ends("model.embed_tokens.weight", "model.norm", "lm_head.weight"),
        *own,
    )


def _of_experts(width: int, topk: int, scaling: float) -> tuple[Keys, ...]:
    """Return the entries for experts chosen by sigmoid and bias. All arguments: what a missing key means."""
    return (
        key("num_experts_per_tok", "moe_router_topk", topk),
        key("moe_intermediate_size", "moe_ffn_hidden_size", width, written="expert_ffn_size"),
        key("routed_scaling_factor", "moe_router_topk_scaling_factor", scaling, written="topk_scaling_factor"),
        keys.shared_experts("n_shared_experts", "moe_intermediate_size", width),
        keys.normalized_scores("norm_topk_prob", "num_experts_per_tok", topk),
        fixed("moe_layer_freq", 1),
    )


_SHARED = (
    *OF_ALL,
    key("attention_dropout", "attention_dropout", 0.0),
    fixed("hidden_act", "silu"),  # also of a convolution
    fixed("attention_bias", False),
    tied(False),
)
_ALWAYS = WITHOUT_BIASES | {"swiglu": True}
_OF_ALL_LAYERS = _ALWAYS | LATENT_NORMS | {"multi_latent_attention": True}

DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (
        *_SHARED,
        *SIZES,
        key("rms_norm_eps", "norm_epsilon", 1e-6),
        fixed("mlp_bias", False),
        *latent_rotary(),
        *latent_sizes(1536, None),
        keys.num_experts("n_routed_experts", "num_experts"),
        key("num_experts_per_tok", "moe_router_topk"),
        key("moe_intermediate_size", "moe_ffn_hidden_size", 1407, written="expert_ffn_size"),
        key("routed_scaling_factor", "moe_router_topk_scaling_factor", 1.0, written="topk_scaling_factor"),
        keys.leading_dense("first_k_dense_replace", 0),
        keys.shared_experts("n_shared_experts", "moe_intermediate_size", 1407, 2),
        latent_keys.choice_of_v2(),
        fixed("norm_topk_prob", False),  # transformers 5.24 does not read it
        fixed("scoring_func", "softmax"),
        fixed("moe_layer_freq", 1),
    ),
    _OF_ALL_LAYERS | {"moe_router_pre_softmax": True, "moe_router_dtype": "fp32"},
    _rules(MLP, *experts(MLP)),
    rewritten=_rules(MLP, *fused_experts(MLP)),
)


def _of_v3(
    *own: Keys, epsilon: float = 1e-6, groups: tuple[int, int] = (8, 4), sizes: tuple[Keys, ...]
) -> tuple[Keys, ...]:
    """Return the entries of DeepSeek-V3 and its like, and these.

    `epsilon`, `groups`: the norms' epsilon, and the groups of experts and the chosen ones, if config.json lacks them.
    """
    return (
        *_SHARED,
        *SIZES,
        key("rms_norm_eps", "norm_epsilon", epsilon),
        *latent_rotary(),
        fixed("rope_interleave", True),
        *sizes,
        keys.num_experts("n_routed_experts", "num_local_experts"),
        *_of_experts(2048, 8, 2.5),
        keys.expert_groups(*groups),
        fixed("topk_method", "noaux_tc"),
        fixed("scoring_func", "sigmoid"),
        keys.prediction_depths(),
        *own,
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _of_v3(keys.leading_dense("first_k_dense_replace", 3), sizes=latent_sizes(1536, 128)),
    _OF_ALL_LAYERS | SIGMOID,
    _rules(MLP, *experts(MLP), *OF_DEPTHS),
    rewritten=_rules(MLP, *fused_experts(MLP), *OF_DEPTHS),
    further=r"model\.layers\.({layers})\..*",
    other_names=("kimi_k2",),
)

# ------------------------------------------------------------------------------------------------ sparse attention

_WITHOUT_MLP_BIASES = fixed("mlp_bias", False)
DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    keys=_of_v3(
        _WITHOUT_MLP_BIASES,
        listed_dense_layers(3),
        *indexer(64, interleaved=False),
        sizes=latent_sizes(1536, 128, ranked=True),
    ),
    always={**DEEPSEEK_V3.always, **INDEXERS},
    rules=(*DEEPSEEK_V3.rules, *_indexer()),
    rewritten=(*DEEPSEEK_V3.rewritten, *_indexer()),
    other_names=(),
)
GLM_MOE_DSA = replace(
    DEEPSEEK_V32,
    name="glm_moe_dsa",
    architecture="GlmMoeDsaForCausalLM",
    keys=_of_v3(
        _WITHOUT_MLP_BIASES,
        listed_dense_layers(3),
        *indexer(32, interleaved=True),
        choosing_layers(),
        epsilon=1e-5,
        groups=(1, 1),
        sizes=latent_sizes(2048, 64, widths=(192, 256), ranked=True),
    ),
    always={**DEEPSEEK_V32.always, "dsa_indexer_rope_interleaved": True},
)

# ------------------------------------------------------------------------------------------------ Kimi Linear

_KIMI_NAMES = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
_KIMI_EXPERTS = f"{_LAYER}.block_sparse_moe"
KIMI_LINEAR = Family(
    "kimi_linear",
    "KimiLinearForCausalLM",
    tuple(
        with_names(entry, _KIMI_NAMES)
        for entry in (
            *_SHARED,
            *WIDTHS,
            FFN,
            latent_keys.kimi_layers(),
            key("rms_norm_eps", "norm_epsilon", 1e-5),
            Keys((), lambda _: {}, lambda _: {"pad_token_id": None}),  # otherwise transformers takes number 163839
            *only_with(
                LATENT_LETTER,
                kimi_letters,
                Keys((), lambda _: LATENT_NORMS, lambda _: {}),
                *latent_sizes(None, 32),
                fixed("mla_use_nope", True),
            ),
            *only_with(
                EXPERTS_LETTER,
                kimi_letters,
                Keys((), lambda _: SIGMOID, lambda _: {}),
                keys.num_experts("num_experts", "num_local_experts"),
                *_of_experts(1024, 8, 2.446),
                keys.expert_groups(),
                fixed("moe_router_activation_func", "sigmoid"),
                fixed("use_grouped_topk", True),
            ),
            fixed("num_nextn_predict_layers", 0, written=False),
        )
    ),
    _ALWAYS | {"position_embedding_type": "none"},
    _rules(
        _KIMI_EXPERTS,
        *experts(_KIMI_EXPERTS, ("w1", "w3", "w2")),
        *kimi_delta(ATTENTION),
        *kimi_convolutions(ATTENTION),
    ),
    rewritten=_rules(
        MLP,
        *fused_experts(MLP),
        *kimi_delta(ATTENTION, "forget_gate."),
        *kimi_convolutions(ATTENTION, together=True),
    ),
    # transformers 5.24 saves dense layers with the prefix of experts.
    renamed={r"(.*)\.block_sparse_moe\.(gate|up|down)_proj\.weight": r"\1.mlp.\2_proj.weight"},
)
