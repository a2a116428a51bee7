"""The norms of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.context import ParallelContext
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite_kernels.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, its weights whole on every rank.

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
        """The norm of the input [..., width]; or, with a residual like it, that of their sum, and the sum."""
        weight: Tensor = self.weight
        if self.around_one:  # what is close to 1 would lose the digits that its distance from 1 has
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if residual is None:
            if self.bias is None:
                return rms_norm(input, weight, self.epsilon)
            return layer_norm(input, weight, self.bias, self.epsilon)
        if self.bias is None:
            return residual_rms_norm(input, residual, weight, self.epsilon)
        return residual_layer_norm(input, residual, weight, self.bias, self.epsilon)
