"""Tables of rotary position embedding, and their scaling for contexts longer than the training context."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from megalite.config.model import ModelConfig


def in_windows(config: ModelConfig, base: float) -> ModelConfig:
    """Return the configuration whose rotary settings are those of layers with a sliding window and this base."""
    return replace(
        config,
        position_embedding_type="rope",
        rotary_base=base,
        rotary_seq_len_interpolation_factor=None,
        use_rope_scaling=False,
    )


def plain_frequencies(channels: int, base: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of channels, unscaled, [channels / 2]."""
    return 1.0 / base ** (torch.arange(0, channels, 2, dtype=dtype, device=device) / channels)


def inverse_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the angle per position of each pair of channels, [rotated / 2]."""
    frequencies = plain_frequencies(config.rotated_channels, config.rotary_base, dtype, device)
    if config.position_embedding_type == "yarn":
        return _yarn(frequencies, config)
    if config.use_rope_scaling:
        return _llama3(frequencies, config)
    factor = config.rotary_seq_len_interpolation_factor
    return frequencies if factor is None else frequencies / factor


def _llama3(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Scale as in Llama 3.1, blended by the number of turns of a pair over the original context.

    Source: huggingface.co/meta-llama/Llama-3.1-8B, config.json: rope_scaling.
    """
    low, high = config.rope_scaling_low_freq_factor, config.rope_scaling_high_freq_factor
    turns = config.rope_scaling_original_max_position_embeddings * frequencies / (2 * math.pi)
    return _blend(frequencies, ((turns - low) / (high - low)).clamp(0.0, 1.0), config.rope_scaling_factor)


def _yarn(frequencies: Tensor, config: ModelConfig) -> Tensor:
    """Scale as in YaRN, "NTK-by-parts" (arXiv:2309.00071, 3.2).

    The blend is linear in the index of the pair, as in all implementations. The formula in the paper is linear in the
    number of turns.
    """
    original = config.yarn_original_max_position_embeddings
    if original is None:
        raise ValueError("YaRN needs yarn_original_max_position_embeddings")

    def pair_that_turns(times: float) -> float:
        """Return the fractional index of the pair that turns `times` times over the original context."""
        return len(frequencies) * math.log(original / (times * 2 * math.pi), config.rotary_base)

    first, last = pair_that_turns(config.yarn_beta_fast), pair_that_turns(config.yarn_beta_slow)
    if config.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(frequencies) - 1)
    pairs = torch.arange(len(frequencies), dtype=frequencies.dtype, device=frequencies.device)
    scaled = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return _blend(frequencies, 1.0 - scaled, config.rotary_scaling_factor)


def _blend(frequencies: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Blend each frequency with the frequency divided by `factor`. `kept`: the weight of the original frequency."""
    return frequencies * (kept + (1.0 - kept) / factor)


def amplitude(config: ModelConfig) -> float:
    """Return the factor of queries and keys: 1, except in YaRN, which scales the scores (arXiv:2309.00071, 3.4)."""
    if config.position_embedding_type != "yarn":
        return 1.0
    if config.yarn_attention_factor is not None:
        return config.yarn_attention_factor
    growth = 0.1 * math.log(config.rotary_scaling_factor)
    return (growth * config.mscale + 1.0) / (growth * config.mscale_all_dim + 1.0)


def growth_of_scores(config: ModelConfig) -> float:
    """Return YaRN's factor of the scores of latent attention, whose unrotated channels `amplitude` does not reach."""
    if config.position_embedding_type != "yarn":
        return 1.0
    return (0.1 * math.log(config.rotary_scaling_factor) * config.mscale_all_dim + 1.0) ** 2


def rotary_tables(config: ModelConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [sequence, batch, 1, rotated / 2] for positions [batch, sequence], in fp32 or wider."""
    wide = torch.promote_types(dtype, torch.float32)
    tables = tables_of(inverse_frequencies(config, wide, positions.device), positions)
    scale = amplitude(config)
    return tables if scale == 1.0 else (tables[0] * scale, tables[1] * scale)


def tables_of(frequencies: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [sequence, batch, 1, pairs] of positions [batch, sequence], in the frequencies' dtype."""
    angles = positions.t().unsqueeze(-1).to(frequencies.dtype) * frequencies
    return angles.cos().unsqueeze(2), angles.sin().unsqueeze(2)
