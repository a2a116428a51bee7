"""Kimi delta attention: costs and rules."""

from __future__ import annotations

import math
from collections.abc import Iterator

from megalite.config.kinds.kind import Kind, Split, Width, in_pattern
from megalite.config.layer_specs import KIMI_LETTER
from megalite.config.model import ModelConfig


def _weights(model: ModelConfig) -> int:
    """Count the matrices of queries, keys, values and output, two each of decay and gate, and that of beta."""
    inner, rank = model.kda_num_heads * model.kda_head_dim, model.kda_head_dim
    return model.hidden_size * (4 * inner + 2 * rank + model.kda_num_heads) + 2 * rank * inner


def _products(model: ModelConfig, seen: float) -> float:
    """Count as for the gated delta net, though decays stand inside the products within a chunk."""
    inner, width = model.kda_num_heads * model.kda_head_dim, model.kda_head_dim
    within = 5 * min(model.kda_chunk_size / 2, seen) * inner
    return _weights(model) + 3 * model.kda_conv_kernel_dim * inner + within + 3 * inner * width


def _problems(model: ModelConfig) -> Iterator[str]:
    if model.kda_lower_bound is not None and not -math.inf < model.kda_lower_bound < 0:
        yield f"--kda-lower-bound {model.kda_lower_bound} is not below 0: no decay lets a state grow"
    if (chunk := model.kda_chunk_size) & (chunk - 1):
        yield f"--kda-chunk-size {chunk} is not a power of two"


def _widths(model: ModelConfig) -> list[Width]:
    heads, width = model.kda_num_heads, model.kda_head_dim
    return [
        Width(f"the beta of each of --kda-num-heads {heads}", heads),
        Width(f"--kda-num-heads {heads} x --kda-head-dim {width}", heads * width),
    ]


KIMI_DELTA = Kind(
    _weights,
    _products,
    "kda_*",
    lambda model: in_pattern("Kimi delta attention", KIMI_LETTER),
    _problems,
    lambda model: [Split("heads of Kimi delta attention", model.kda_num_heads)],
    _widths,
)
