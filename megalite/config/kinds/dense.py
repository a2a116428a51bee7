"""Dense feed-forward layer: costs."""

from __future__ import annotations

from megalite.config.kinds.kind import Kind, Split, Width
from megalite.config.model import ModelConfig


def _weights(model: ModelConfig) -> int:
    return model.activation.matrices * model.hidden_size * model.ffn_size


DENSE = Kind(
    _weights,
    lambda model, seen: _weights(model),
    splits=lambda model: [Split("feed-forward width", model.ffn_size, "--ffn-hidden-size")],
    widths=lambda model: [Width(f"--ffn-hidden-size {model.ffn_size}", model.ffn_size)],
)
