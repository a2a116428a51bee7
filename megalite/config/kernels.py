"""Which implementation of the fused operations runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KernelsConfig:
    """How operations are computed; what they compute is the same, but for rounding."""

    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Triton's kernels, plain PyTorch (reference), or Triton where there is a GPU and PyTorch elsewhere (auto)."""
    fused_linear_cross_entropy: bool = False
    """Compute the loss with the output layer, over chunks of tokens: logits are made twice, and take no memory."""
