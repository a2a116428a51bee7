"""LayerNorm and RMSNorm, with weights that all tensor-parallel ranks have."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.parallel.context import ParallelContext
from megalite.parallel.parameter import Parameter
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite_kernels.norm import norm, residual_norm


class LayerNorm(nn.Module):
    """`nn.LayerNorm` over the last dimension. With sequence parallelism, ranks add up their parts of its gradient."""

    has_bias = True

    def __init__(
        self,
        context: ParallelContext,
        name: str,
        width: int,
        eps: float = 1e-5,
        *,
        around_one: bool = False,
        of_part: bool = False,
        decays: bool = False,
    ) -> None:
        """Make the layer.

        Args:
            around_one: the parameter is the weight minus 1, and begins at 0.
            of_part: see `ParallelContext.replicated`.
            decays: weight decay applies to it.
        """
        super().__init__()
        self.eps, self.around_one = eps, around_one

        def vector(part: str, value: float) -> Parameter:
            tensor = LogicalTensor(f"{name}.{part}", (width,), Constant(value), weight_decay=decays)
            return context.parameter(context.replicated(tensor, of_part=of_part))

        self.weight = vector("weight", 0.0 if around_one else 1.0)
        self.bias = vector("bias", 0.0) if self.has_bias else None

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Normalize the input [..., width]. With a residual of that shape, return the norm of their sum and the sum."""
        weight: Tensor = self.weight
        if self.around_one:  # in fp32: in bf16, adding 1 would round away small weights
            weight = 1.0 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        if residual is None:
            return norm(input, weight, self.bias, self.eps)
        return residual_norm(input, residual, weight, self.bias, self.eps)


class RMSNorm(LayerNorm):
    """`nn.RMSNorm` over the last dimension, as `LayerNorm`."""

    has_bias = False
