"""Activations of the feed-forward layer.

GELU in its tanh form (arXiv:1606.08415), squared ReLU (arXiv:2109.08668), and SwiGLU, silu(gate) * up
(arXiv:2002.05202), over the fused layout in which the gate's columns stand before the up projection's.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(input: Tensor) -> Tensor:
    return F.gelu(input, approximate="tanh")


def squared_relu(input: Tensor) -> Tensor:
    return F.relu(input).square()


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 * ffn] to [..., ffn]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
