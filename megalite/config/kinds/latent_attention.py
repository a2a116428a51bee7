"""Latent attention: costs and rules."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.fields import needs
from megalite.config.kinds.kind import Kind, Split, Width, in_pattern
from megalite.config.layer_specs import LATENT_LETTER
from megalite.config.model import ModelConfig

_OF_OTHERS = """group_query_attention num_query_groups kv_channels query_pre_attn_scalar window_size add_qkv_bias
    rotary_percent rotary_interleaved softmax_type qk_layernorm_over_heads no_rope_freq"""
"""Flags of attention that attention over latents does not read."""


def latent_weights(model: ModelConfig) -> int:
    """Count the matrices to the latents, those from them to the heads, perhaps those of gates, and the output layer."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    keys, values = model.qk_head_dim + model.qk_pos_emb_head_dim, heads * model.v_head_dim
    of_input = model.kv_lora_rank + model.qk_pos_emb_head_dim + (model.q_lora_rank or heads * keys)
    of_input += values * (1 + model.attention_output_gate)
    of_latents = model.kv_lora_rank * (heads * model.qk_head_dim + values) + (model.q_lora_rank or 0) * heads * keys
    return hidden * of_input + of_latents


def _products(model: ModelConfig, seen: float) -> float:
    widths = model.qk_head_dim + model.qk_pos_emb_head_dim + model.v_head_dim
    return latent_weights(model) + model.num_attention_heads * widths * seen


def _needed(model: ModelConfig) -> str | None:
    if model.has_latents:
        return None
    if model.hybrid_layer_pattern is not None:
        return in_pattern("latent attention", LATENT_LETTER)
    return "layers with attention" if model.multi_latent_attention else "--multi-latent-attention"


def latent_problems(model: ModelConfig) -> Iterator[str]:
    """Yield a line for each option of attention over latents that contradicts another."""
    without = "attention without latents: drop it, or drop --multi-latent-attention (+ or D in a pattern)"
    yield from needs(model, _OF_OTHERS, without)
    if "attention" in model.kinds:
        yield "a network has attention (*) or attention over latents (+, D), not both: choose one"
    if model.rotary and model.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} is odd, and channels are rotated in pairs"
    if not model.qk_layernorm:
        yield from needs(model, "latent_norm_epsilon", "--qk-layernorm, which normalises latents")


def latent_widths(model: ModelConfig) -> list[Width]:
    """Return the channels of queries, and of gates and weighted values. Keys and values are made in the core."""
    heads, keys, values = model.num_attention_heads, model.qk_head_dim + model.qk_pos_emb_head_dim, model.v_head_dim
    return [
        Width(f"--num-attention-heads {heads} x (--qk-head-dim + --qk-pos-emb-head-dim {keys})", heads * keys),
        Width(f"--num-attention-heads {heads} x --v-head-dim {values}", heads * values),
    ]


LATENT_ATTENTION = Kind(
    latent_weights,
    _products,
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim latent_norm_epsilon",
    _needed,
    latent_problems,
    lambda model: [Split("attention heads", model.num_attention_heads, "--num-attention-heads")],
    latent_widths,
)
