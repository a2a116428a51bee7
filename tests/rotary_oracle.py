"""Rotary positions as the oracle computes them, with all their scalings. Like the oracle this imports nothing of
megalite."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rotary:
    """Options of positions; names and defaults are Megatron-LM's."""

    position_embedding_type: str = "learned_absolute"  # rope, yarn or none
    rotary_base: float = 10000.0
    window_rotary_base: float | None = None  # of layers with a window, which then know of no scaling
    rotary_percent: float = 1.0
    rotary_interleaved: bool = False  # a pair is of neighbours
    interpolation: float = 1.0  # rotary angles are divided by it
    use_rope_scaling: bool = False  # Llama 3's
    rope_scaling_factor: float = 8.0
    rope_scaling_turns: tuple[float, float] = (1.0, 4.0)  # over the original context
    rope_scaling_original: int = 8192
    yarn_factor: float = 1.0
    yarn_original: int = 4096
    yarn_turns: tuple[float, float] = (1.0, 32.0)
    yarn_whole_pairs: bool = True
    yarn_mscales: tuple[float, float] = (1.0, 0.0)
    yarn_attention_factor: float | None = None

    def rotate(self, states: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions: dimension i of the rotated part turns with i + half or, interleaved, 2i with 2i + 1."""
        half = int(states.shape[-1] * self.rotary_percent) // 2
        angles = positions[..., None, None].double() * self.rotary_frequencies(half)
        amplitude = self.rotary_amplitude()
        cosine, sine = (amplitude * angles.cos()).to(states.dtype), (amplitude * angles.sin()).to(states.dtype)
        if self.rotary_interleaved:
            plane = torch.view_as_complex(states[..., : 2 * half].unflatten(-1, (half, 2)).contiguous())
            turned = torch.view_as_real(plane * torch.complex(cosine, sine)).flatten(-2)
            return torch.cat((turned, states[..., 2 * half :]), dim=-1)
        first, second, rest = states.split([half, half, states.shape[-1] - 2 * half], dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine, rest), dim=-1)

    def rotary_frequencies(self, half: int) -> Tensor:
        """Radians a position, `[half]`; Llama 3 stretches the wavelengths that 8192 positions saw less than 4 times."""
        frequencies = self.rotary_base ** -(torch.arange(half, dtype=torch.float64) / half)
        if self.position_embedding_type == "yarn":
            return torch.stack([self.yarn_frequency(pair, half) for pair in frequencies.unbind()])
        if not self.use_rope_scaling:
            return frequencies / self.interpolation
        turns, (low, high) = self.rope_scaling_original * frequencies / (2 * math.pi), self.rope_scaling_turns
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # none below one turn, all from four turns on
        return frequencies * (kept + (1 - kept) / self.rope_scaling_factor)

    def yarn_frequency(self, frequency: Tensor, half: int) -> Tensor:
        """YaRN (arXiv:2309.00071, 3.2) as published in code: a ramp over the numbers of the pairs, here found back from
        their frequencies, base^(-pair / half), between those that turn so many times over the original context."""

        def pair_of(frequency: float) -> float:
            return -half * math.log(frequency) / math.log(self.rotary_base)

        slow, fast = (pair_of(2 * math.pi * turns / self.yarn_original) for turns in self.yarn_turns)
        if self.yarn_whole_pairs:
            slow, fast = math.ceil(slow), math.floor(fast)
        slow, fast = min(slow, 2 * half - 1), max(fast, 0)
        if slow == fast:
            slow += 0.001
        divided = min(max((pair_of(frequency.item()) - fast) / (slow - fast), 0.0), 1.0)
        return (1 - divided) * frequency + divided * frequency / self.yarn_factor

    def rotary_amplitude(self) -> float:
        """YaRN's factor on queries and keys (arXiv:2309.00071, 3.4)."""
        if self.position_embedding_type != "yarn":
            return 1.0
        above, below = (0.1 * mscale * math.log(self.yarn_factor) + 1 for mscale in self.yarn_mscales)
        return above / below if self.yarn_attention_factor is None else self.yarn_attention_factor
