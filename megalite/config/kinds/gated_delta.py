"""Gated delta net: costs and rules."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.kinds.kind import Kind, Split, Width, in_pattern
from megalite.config.layer_specs import DELTA_LETTER
from megalite.config.model import ModelConfig


def _weights(model: ModelConfig) -> int:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    return model.hidden_size * (2 * keys + 3 * values + 2 * model.linear_num_value_heads)


def _products(model: ModelConfig, seen: float) -> float:
    """Sum as for Mamba-2, with products of keys with keys, of each head of keys, and the solution of a triangle."""
    heads, key, value = model.linear_num_value_heads, model.linear_key_head_dim, model.linear_value_head_dim
    met = min(model.linear_chunk_size / 2, seen)
    shared = model.linear_num_key_heads * key
    convolution = model.linear_conv_kernel_dim * (2 * shared + heads * value)
    within = met * (2 * shared + heads * (key + 2 * value))
    return _weights(model) + convolution + within + 3 * heads * key * value


def _needed(model: ModelConfig) -> str | None:
    if model.experimental_attention_variant != "gated_delta_net":
        return in_pattern("a gated delta net", DELTA_LETTER)
    if (freq := model.linear_attention_freq) is None:  # reported by `relation_problems`
        return None
    return f"a gated delta net, but --linear-attention-freq {freq} leaves all layers attention"


def _problems(model: ModelConfig) -> Iterator[str]:
    if (values := model.linear_num_value_heads) % (keys := model.linear_num_key_heads):
        yield f"--linear-num-value-heads {values} is not a multiple of --linear-num-key-heads {keys}"


def _splits(model: ModelConfig) -> list[Split]:
    groups = ("--linear-num-key-heads", model.linear_num_key_heads)
    return [Split("heads of the gated delta net", model.linear_num_value_heads, groups=groups)]


def _widths(model: ModelConfig) -> list[Width]:
    heads, value = model.linear_num_value_heads, model.linear_value_head_dim
    keys, key, name = model.linear_num_key_heads, model.linear_key_head_dim, "--linear-num-key-heads"
    return [
        Width(f"the decay of each of --linear-num-value-heads {heads}", heads),
        Width(f"--linear-num-value-heads {heads} x --linear-value-head-dim {value}", heads * value),
        Width(f"{name} {keys} x --linear-key-head-dim {key}", keys * key, (name, keys)),
    ]


GATED_DELTA = Kind(
    _weights,
    _products,
    "linear_num_* linear_key_* linear_value_* linear_conv_* linear_allow_* linear_chunk_* linear_norm_*",
    _needed,
    _problems,
    _splits,
    _widths,
)
