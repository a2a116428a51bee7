"""Families of Hugging Face models that megalite's network covers, one table per family.

Tensor names are those of published checkpoints; patterns and axes are explained in `mapping`.
"""

from __future__ import annotations

from dataclasses import replace

from megalite.conversion.config_keys import (
    Keys,
    activation,
    embedding_dropout,
    feed_forward_width,
    fixed,
    grouped_queries,
    head_width,
    key,
    linear_biases,
    soft_cap,
    square_root_of_heads,
    tanh_gate,
    tied,
    unread,
)
from megalite.conversion.family import Family
from megalite.conversion.mapping import MappedBox, Rule
from megalite.conversion.rotary_keys import rotary, rotary_of_two_kinds
from megalite.conversion.window_keys import window_everywhere, window_from_layer, window_pattern

_ALL = slice(None)


def _linear(file: str, weight: str, bias: str, *pieces: MappedBox) -> tuple[Rule, ...]:
    """Return the rules of a linear layer's weight and, if the model has one, its bias, with the same pieces for
    both."""
    of_bias = tuple(replace(piece, tensor=f"{piece.tensor}_bias") for piece in pieces)
    return Rule(f"{file}.weight", weight, pieces), Rule(f"{file}.bias", bias, of_bias)


def _norm(file: str, tensor: str, axis: str = "hidden") -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{file}.{part}", f"{axis} -> {axis}", (MappedBox(f"{tensor}.{part}"),)) for part in ("weight", "bias")
    )


# ------------------------------------------------------------------------------------------------ Llama and its like


def _llama_layer(name: str = "model.layers.{layer}") -> tuple[Rule, ...]:
    """Return the rules of a layer's matrices, with queries, keys and values in separate tensors, and gate and up
    too."""
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    key_value = "(groups width) hidden -> groups 1 width hidden", "(groups width) -> groups 1 width"
    gate_up = "ffn hidden -> 1 ffn hidden", "ffn -> 1 ffn"
    return (
        *_linear(
            f"{attention}.q_proj",
            "(heads width) hidden -> heads width hidden",
            "(heads width) -> heads width",
            MappedBox("attention.query"),
        ),
        *_linear(f"{attention}.k_proj", *key_value, MappedBox("attention.key_value", offset=(0, 0))),
        *_linear(f"{attention}.v_proj", *key_value, MappedBox("attention.key_value", offset=(0, 1))),
        *_linear(
            f"{attention}.o_proj",
            "hidden (heads width) -> hidden heads width",
            "hidden -> hidden",
            MappedBox("attention.output"),
        ),
        *_linear(f"{mlp}.gate_proj", *gate_up, MappedBox("mlp.gate_up", offset=(0,))),
        *_linear(f"{mlp}.up_proj", *gate_up, MappedBox("mlp.gate_up", offset=(1,))),
        *_linear(f"{mlp}.down_proj", "hidden ffn -> hidden ffn", "hidden -> hidden", MappedBox("mlp.down")),
        *_norm(f"{attention}.q_norm", "attention.query_norm", "width"),
        *_norm(f"{attention}.k_norm", "attention.key_norm", "width"),
        *_norm(f"{name}.input_layernorm", "input_norm"),
    )


def _ends(word: str, norm: str, head: str) -> tuple[Rule, ...]:
    """Return the rules of the tensors before and after the layers."""
    return (
        Rule(word, "vocabulary hidden -> vocabulary hidden", (MappedBox("embedding.word"),)),
        *_norm(norm, "final_norm"),
        Rule(head, "vocabulary hidden -> vocabulary hidden", (MappedBox("output"),)),
    )


_LLAMA_ENDS = _ends("model.embed_tokens.weight", "model.norm", "lm_head.weight")
_LLAMA_RULES = (
    *_llama_layer(),
    *_norm("model.layers.{layer}.post_attention_layernorm", "mlp_norm"),
    *_LLAMA_ENDS,
)

_SIZES = (
    key("vocab_size", "vocab_size"),
    key("hidden_size", "hidden_size"),
    key("num_hidden_layers", "num_layers"),
    key("num_attention_heads", "num_attention_heads"),
    feed_forward_width(),
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


def _llama_like(name: str, architecture: str, always: dict[str, object], groups: int | None, *keys: Keys) -> Family:
    """Return a family like Llama; `groups`: the number of key-value heads if config.json does not give it."""
    common = (
        *_LLAMA_KEYS,
        activation("hidden_act", "silu", gated=True),
        rotary(),
        tied(False),
        grouped_queries(groups),
    )
    return Family(name, architecture, (*common, *keys), always, _LLAMA_RULES, prefix="model.")


_HALVES = fixed("rope_interleaved", False, written=False)
LLAMA = _llama_like("llama", "LlamaForCausalLM", _RMS_NORM, None, head_width(), linear_biases(), _HALVES)
MISTRAL = _llama_like("mistral", "MistralForCausalLM", _WITHOUT_BIASES, 8, head_width(), window_everywhere())
QWEN2 = _llama_like(
    "qwen2",
    "Qwen2ForCausalLM",
    _WITHOUT_BIASES | {"add_qkv_bias": True},
    32,
    head_width(),
    window_from_layer(),
    fixed("use_mrope", False, written=False),
)
QWEN3 = _llama_like(
    "qwen3",
    "Qwen3ForCausalLM",
    _WITHOUT_BIASES | {"qk_layernorm": True},
    32,
    head_width(128),
    fixed("attention_bias", False),
    window_from_layer(),
)

# ------------------------------------------------------------------------------------------------ Gemma

_GEMMA_ALWAYS = _WITHOUT_BIASES | {"apply_layernorm_1p": True, "scale_embeddings": True}
_GEMMA_KEYS = (*_LLAMA_KEYS, head_width(256), fixed("attention_bias", False), tied(True))
_ONE_WAY = fixed("use_bidirectional_attention", False, written=False)
_SANDWICH_RULES = (
    *_llama_layer(),
    *_norm("model.layers.{layer}.post_attention_layernorm", "attention_output_norm"),
    *_norm("model.layers.{layer}.pre_feedforward_layernorm", "mlp_norm"),
    *_norm("model.layers.{layer}.post_feedforward_layernorm", "mlp_output_norm"),
    *_LLAMA_ENDS,
)
_SANDWICH_KEYS = (
    *_GEMMA_KEYS,
    grouped_queries(4),
    activation("hidden_activation", "gelu_pytorch_tanh", gated=True),
    unread("hidden_act", "sliding_window_size"),
    square_root_of_heads(),
    _ONE_WAY,
)

GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    (
        *_GEMMA_KEYS,
        grouped_queries(16),
        tanh_gate(),
        rotary(),
        _ONE_WAY,
    ),
    _GEMMA_ALWAYS,
    _LLAMA_RULES,
    prefix="model.",
)
GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    (
        *_SANDWICH_KEYS,
        rotary(),
        window_pattern(full_every=2),
        soft_cap("attn_logit_softcapping", 50.0),
        soft_cap("final_logit_softcapping", 30.0),
    ),
    _GEMMA_ALWAYS | {"sandwich_norm": True},
    _SANDWICH_RULES,
    prefix="model.",
)
GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_SANDWICH_KEYS,
        rotary_of_two_kinds(),
        window_pattern(full_every=6),
        fixed("attn_logit_softcapping", None),  # transformers reads it, and caps nothing
        soft_cap("final_logit_softcapping", None),
    ),
    _GEMMA_ALWAYS | {"sandwich_norm": True, "qk_layernorm": True},
    _SANDWICH_RULES,
    prefix="model.",
)

# ------------------------------------------------------------------------------------------------ GPT-2, GPT-NeoX

_QUERY = MappedBox("attention.query", (_ALL, 0))
_KEY_VALUE = MappedBox("attention.key_value", (_ALL, slice(1, 3)))
_LAYER_NORM = {"normalization": "LayerNorm", "add_bias_linear": True}

GPT2 = Family(
    "gpt2",
    "GPT2LMHeadModel",
    (
        key("vocab_size", "vocab_size"),
        key("n_embd", "hidden_size"),
        key("n_layer", "num_layers"),
        key("n_head", "num_attention_heads"),
        feed_forward_width("n_inner"),
        key("n_positions", "max_position_embeddings"),
        key("initializer_range", "init_method_std", 0.02),
        key("layer_norm_epsilon", "norm_epsilon", 1e-5),
        key("resid_pdrop", "hidden_dropout", 0.1),
        key("attn_pdrop", "attention_dropout", 0.1),
        embedding_dropout(),
        activation("activation_function", "gelu_new", gated=False),
        tied(True),
        fixed("scale_attn_weights", True),
        fixed("scale_attn_by_inverse_layer_idx", False),
        fixed("reorder_and_upcast_attn", False),
        fixed("add_cross_attention", False, written=False),
    ),
    _LAYER_NORM | {"position_embedding_type": "learned_absolute"},
    (
        # Its matrices stand transposed: what goes in before what comes out.
        *_linear(
            "transformer.h.{layer}.attn.c_attn",
            "hidden (three heads width) -> heads three width hidden",
            "(three heads width) -> heads three width",
            _QUERY,
            _KEY_VALUE,
        ),
        *_linear(
            "transformer.h.{layer}.attn.c_proj",
            "(heads width) hidden -> hidden heads width",
            "hidden -> hidden",
            MappedBox("attention.output"),
        ),
        *_linear("transformer.h.{layer}.mlp.c_fc", "hidden ffn -> ffn hidden", "ffn -> ffn", MappedBox("mlp.up")),
        *_linear(
            "transformer.h.{layer}.mlp.c_proj", "ffn hidden -> hidden ffn", "hidden -> hidden", MappedBox("mlp.down")
        ),
        *_norm("transformer.h.{layer}.ln_1", "input_norm"),
        *_norm("transformer.h.{layer}.ln_2", "mlp_norm"),
        Rule("transformer.wpe.weight", "positions hidden -> positions hidden", (MappedBox("embedding.position"),)),
        *_ends("transformer.wte.weight", "transformer.ln_f", "lm_head.weight"),
    ),
    prefix="transformer.",
    buffers=r".*\.attn\.(bias|masked_bias)",
)

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    (
        *_SIZES,
        key("layer_norm_eps", "norm_epsilon", 1e-5),
        key("hidden_dropout", "hidden_dropout", 0.0),
        key("attention_dropout", "attention_dropout", 0.0),
        key("use_parallel_residual", "use_parallel_residual", True),
        activation("hidden_act", "gelu", gated=False),
        rotary("rotary_emb_base", "rotary_pct", 0.25),
        tied(False),
        fixed("attention_bias", True, written=False),
        unread("attention_probs_dropout_prob", "hidden_dropout_prob"),
    ),
    _LAYER_NORM,
    (
        *_linear(
            "gpt_neox.layers.{layer}.attention.query_key_value",
            "(heads three width) hidden -> heads three width hidden",
            "(heads three width) -> heads three width",
            _QUERY,
            _KEY_VALUE,
        ),
        *_linear(
            "gpt_neox.layers.{layer}.attention.dense",
            "hidden (heads width) -> hidden heads width",
            "hidden -> hidden",
            MappedBox("attention.output"),
        ),
        *_linear(
            "gpt_neox.layers.{layer}.mlp.dense_h_to_4h", "ffn hidden -> ffn hidden", "ffn -> ffn", MappedBox("mlp.up")
        ),
        *_linear(
            "gpt_neox.layers.{layer}.mlp.dense_4h_to_h",
            "hidden ffn -> hidden ffn",
            "hidden -> hidden",
            MappedBox("mlp.down"),
        ),
        *_norm("gpt_neox.layers.{layer}.input_layernorm", "input_norm"),
        *_norm("gpt_neox.layers.{layer}.post_attention_layernorm", "mlp_norm"),
        *_ends("gpt_neox.embed_in.weight", "gpt_neox.final_layer_norm", "embed_out.weight"),
    ),
    prefix="gpt_neox.",
    renamed={"lm_head.weight": "embed_out.weight"},
    head="embed_out.weight",
    buffers=r".*\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

FAMILIES = (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, GPT_NEOX, GEMMA, GEMMA2, GEMMA3)
"""Families in the order in which they are tried: a network may belong to several."""
