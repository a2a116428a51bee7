"""Gradient of the router's z-loss in megatron-core 0.19.2, of logits in bf16: `python megatron_z_loss.py`.

It needs torch and megatron-core, and prints by which factor the gradient is off as a whole, which no sum evens out.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.moe.moe_utils import z_loss_func
from torch import Tensor

TOKENS, EXPERTS = 32, 4


def gradient(logits: Tensor, coefficient: float) -> Tensor:
    """Return the gradient of the z-loss with respect to the logits, in fp64."""
    logits = logits.clone().requires_grad_()
    (found,) = torch.autograd.grad(z_loss_func(logits, coefficient), logits)
    return found.double()


def main() -> None:
    """Print the factors."""
    logits = (2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))).bfloat16()
    for coefficient in (1e-1, 1e-2, 1e-3):
        right = gradient(logits.double(), coefficient)
        for name, given in (("bf16", logits), ("fp32", logits.float())):
            factor = (gradient(given, coefficient) * right).sum() / right.square().sum()
            print(f"coefficient {coefficient}, logits in {name}: {float(factor):.6f} times the right gradient")


if __name__ == "__main__":
    main()
