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


class Head(nn.Module):
    """`tied`: the word embedding's weight, where the output layer shares it."""

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        vocab_size: int,
        tied: Parameter | None,
        *,
        sequence_parallel: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.norm = Norm(config, mesh, "final_norm", config.hidden_size, summed=sequence_parallel, dtype=dtype)
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
            use=0 if tied is None else tied.sharding.uses - 1,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[sequence (/ size under sequence parallelism), batch, hidden] to logits [sequence, batch, columns]."""
        logits: Tensor = self.output(self.norm(hidden))
        return logits
