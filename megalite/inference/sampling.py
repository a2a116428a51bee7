"""Sampling of the next token from its logits: greedy, temperature, top-k, top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling. The filters apply in this order: temperature, top-k, top-p."""

    temperature: float = 1.0
    """Divisor of the logits; 0 always chooses the most likely token."""
    top_k: int = 0
    """Number of most likely tokens to keep; 0 keeps all."""
    top_p: float = 1.0
    """Probability that the kept tokens reach, as few as possible (nucleus sampling, arXiv:1904.09751)."""
    seed: int = 1234
    """Seed of the random numbers. The same seed gives the same texts under any layout, except for rounding."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ConfigurationError(f"--temperature {self.temperature} must be a number from 0 on; 0 is greedy")
        if self.top_k < 0:
            raise ConfigurationError(f"--top-k {self.top_k} must not be negative; 0 keeps all tokens")
        if not 0.0 < self.top_p <= 1.0:
            raise ConfigurationError(f"--top-p {self.top_p} must be in (0, 1]; 1 keeps all tokens")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities to sample from, given [vocabulary] logits and a temperature above 0; fp64 on the CPU."""
    import torch  # here, so that wrong flags are reported before torch is imported

    scores = logits.double().cpu() / sampling.temperature
    if 0 < sampling.top_k < len(scores):
        kept = scores.topk(sampling.top_k).indices
        scores = torch.full_like(scores, -torch.inf).index_copy_(0, kept, scores[kept])
    chances = scores.softmax(dim=0)
    if sampling.top_p < 1.0:
        ordered, order = chances.sort(descending=True, stable=True)
        before = ordered.cumsum(dim=0) - ordered
        chances[order[before >= sampling.top_p]] = 0.0
    return chances / chances.sum()


def sample(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Draw a token from [vocabulary] logits. Ranks with the same logits and generator state draw the same token."""
    if sampling.temperature == 0.0:
        return int(logits.argmax().item())
    return int(probabilities(logits, sampling).multinomial(1, generator=generator).item())
