"""RMSNorm and LayerNorm over the last dimension.

RMSNorm (arXiv:1910.07467): x / sqrt(mean(x^2) + epsilon) * weight. LayerNorm (arXiv:1607.06450):
(x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias. Statistics in fp32 or wider.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(input: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden]."""
    return F.rms_norm(input, weight.shape, weight, epsilon)


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """[..., hidden] to [..., hidden]."""
    return F.layer_norm(input, weight.shape, weight, bias, epsilon)
