"""The tables of rotary position embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megalite.config.model import ModelConfig

# Llama 3.1's scaling: wavelengths past the original context length are stretched by the factor, short ones are kept,
# those between are blended (huggingface.co/meta-llama/Llama-3.1-8B, config.json: rope_scaling).
LOW_FREQUENCY_FACTOR = 1.0
HIGH_FREQUENCY_FACTOR = 4.0
ORIGINAL_CONTEXT_LENGTH = 8192


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The angle of each pair of dimensions per position, [rotated / 2]."""
    rotated = int(config.head_dim * config.rotary_percent) // 2 * 2
    exponents = torch.arange(0, rotated, 2, dtype=dtype, device=device) / rotated
    frequencies = 1.0 / config.rotary_base**exponents
    return _stretch(frequencies, config.rope_scaling_factor) if config.use_rope_scaling else frequencies


def _stretch(frequencies: Tensor, factor: float) -> Tensor:
    rotations = ORIGINAL_CONTEXT_LENGTH * frequencies / (2 * math.pi)
    kept = (rotations - LOW_FREQUENCY_FACTOR) / (HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / factor)


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [sequence, batch, 1, rotated / 2] at positions [batch, sequence], in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    angles = positions.t().unsqueeze(-1).to(wide) * inverse_frequencies(config, wide, positions.device)
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
