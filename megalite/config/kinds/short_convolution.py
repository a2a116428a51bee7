"""Short convolution: costs and rules."""

from __future__ import annotations

from megalite.config.kinds.kind import Kind, Split, Width, in_pattern
from megalite.config.layer_specs import CONVOLUTION_LETTER
from megalite.config.model import ModelConfig


def _weights(model: ModelConfig) -> int:
    return 4 * model.hidden_size**2


def _products(model: ModelConfig, seen: float) -> float:
    """Count also the convolution, and for each channel the products with B and C."""
    return _weights(model) + (model.short_conv_kernel_dim + 2) * model.hidden_size


SHORT_CONVOLUTION = Kind(
    _weights,
    _products,
    "short_conv_*",
    lambda model: in_pattern("a short convolution", CONVOLUTION_LETTER),
    splits=lambda model: [Split("channels of the short convolution", model.hidden_size)],
    widths=lambda model: [Width(f"--hidden-size {model.hidden_size}", model.hidden_size)],
)
