"""The norms of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import replicated
from megalite.parallel.sharding import Constant, LogicalTensor
from megalite_kernels.norm import layer_norm, residual_layer_norm, residual_rms_norm, rms_norm


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, its weights whole on every tensor-parallel rank.

    `summed` where each rank normalises only a part of the activations (see `replicated`).
    """

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, name: str, width: int, *, summed: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.epsilon, self.around_one = config.norm_epsilon, config.apply_layernorm_1p

        def vector(part: str, value: float) -> Parameter:
            tensor = LogicalTensor(f"{name}.{part}", (width,), Constant(value), weight_decay=False)
            return Parameter(replicated(mesh, tensor, summed=summed), dtype, mesh.device)

        self.weight = vector("weight", 0.0 if self.around_one else 1.0)
        self.bias = vector("bias", 0.0) if config.normalization == "LayerNorm" else None

    def forward(self, input: Tensor) -> Tensor:
        """[..., width] to [..., width]."""
        if self.bias is None:
            return rms_norm(input, self._scale(), self.epsilon)
        return layer_norm(input, self._scale(), self.bias, self.epsilon)

    def of_sum(self, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of input + residual, and that sum; all [..., width]."""
        if self.bias is None:
            return residual_rms_norm(input, residual, self._scale(), self.epsilon)
        return residual_layer_norm(input, residual, self._scale(), self.bias, self.epsilon)

    def _scale(self) -> Tensor:
        if not self.around_one:
            return self.weight
        # What is close to 1 would lose the digits that its distance from 1 has.
        return 1.0 + self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
