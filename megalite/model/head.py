"""The end of a GPT: final norm and output layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.config.model import ModelConfig
from megalite.model.norm import Norm
from megalite.parallel.linear import ColumnParallelLinear
from megalite.parallel.mesh import ParallelMesh
from megalite.parallel.parameter import Parameter
from megalite.parallel.placement import split
from megalite.parallel.sharding import LogicalTensor, Normal, Sharding
from megalite_kernels.activation import soft_cap


class Head(nn.Module):
    """`tied`: where the output layer shares the word embedding, that weight if this rank has it, or its placement."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        vocab_size: int,
        tied: Parameter | Sharding | None,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm = Norm(config, mesh, "final_norm", config.hidden_size, summed=sequence_parallel, dtype=dtype)
        self.soft_cap = config.final_logit_softcapping
        weight: Parameter | Sharding
        if tied is None:
            shape = (vocab_size, config.hidden_size)
            output = LogicalTensor("output", shape, Normal(config.init_method_std), weight_decay=True, token_table=True)
            weight = split(mesh, output, 0, padded=config.padded_vocab_size(mesh.size("tp")))
        else:
            weight = tied
        self.output = ColumnParallelLinear(
            [weight],
            [],
            mesh.group("tp"),
            sequence_parallel=sequence_parallel,
            dtype=dtype,
            device=mesh.device,
            use=1 if isinstance(tied, Parameter) else 0,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[sequence (/ size under sequence parallelism), batch, hidden] to logits [sequence, batch, columns]."""
        logits: Tensor = self.output(self.norm(hidden))
        return logits if self.soft_cap is None else soft_cap(logits, self.soft_cap)
