"""RMSNorm and LayerNorm as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.context import ParallelContext
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite_kernels.norm import norm, residual_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, with weights replicated on every tensor-parallel rank.

    `of_part`: see `ParallelContext.replicated`.
    """

    def __init__(
        self, config: ModelConfig, context: ParallelContext, name: str, width: int, *, of_part: bool = False
    ) -> None:
        super().__init__()
        self.epsilon, self.around_one = config.norm_epsilon, config.apply_layernorm_1p

        def vector(part: str, value: float) -> Parameter:
            tensor = LogicalTensor(f"{name}.{part}", (width,), Constant(value), weight_decay=False)
            return context.parameter(context.replicated(tensor, of_part=of_part))

        self.weight = vector("weight", 0.0 if self.around_one else 1.0)
        self.bias = vector("bias", 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize the input [..., width]. With a residual of that shape, return the norm of their sum and the sum."""
        weight: Tensor = self.weight
        if self.around_one:  # in fp32: in bf16, adding 1 would round away small weights
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if residual is None:
            return norm(input, weight, self.bias, self.epsilon)
        return residual_norm(input, residual, weight, self.bias, self.epsilon)
