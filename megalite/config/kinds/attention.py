"""Attention: costs, and flags. The rules of its positions are in `validate_model.py`."""

from __future__ import annotations

from megalite.config.kinds.kind import Kind, Split, Width
from megalite.config.model import ModelConfig

OF_ATTENTION = """group_query_attention num_query_groups qk_layernorm apply_wd_to_qk_layernorm attn_logit_softcapping
    query_pre_attn_scalar window_size window_attn_skip_freq window_rotary_base add_qkv_bias rotary_* use_rope_scaling
    rope_scaling_* yarn_* mscale mscale_all_dim qk_layernorm_over_heads softmax_type attention_output_gate no_rope_freq
    attention_dropout kv_channels qk_clip* log_max_attention_logit"""
"""Fields that nothing but attention reads, beside the number of its heads. Without it, they are turned off."""


def _weights(model: ModelConfig) -> int:
    of_heads = 3 if model.attention_output_gate else 2  # queries, perhaps gates, and the output layer
    return model.hidden_size * (of_heads * model.num_attention_heads + 2 * model.kv_groups) * model.head_dim


def _products(model: ModelConfig, seen: float) -> float:
    scores_and_context = 2 * model.num_attention_heads * model.head_dim * seen
    return _weights(model) + scores_and_context


def _widths(model: ModelConfig) -> list[Width]:
    heads, groups, width = model.num_attention_heads, model.kv_groups, model.head_dim
    name = "--num-query-groups" if model.group_query_attention else "--num-attention-heads"
    channels = f"--kv-channels {width}"
    return [
        Width(f"--num-attention-heads {heads} x {channels}", heads * width),
        Width(f"2 x {name} {groups} x {channels}", 2 * groups * width, (name, groups)),
    ]


ATTENTION = Kind(
    _weights,
    _products,
    splits=lambda model: [Split("attention heads", model.num_attention_heads, "--num-attention-heads")],
    widths=_widths,
)
